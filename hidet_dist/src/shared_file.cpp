#include "shared_file.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <map>
#include <utility>

namespace hidet_dist {

int new_file(const FileHeader &header, size_t bytes) {
  const int descriptor = static_cast<int>(syscall(SYS_memfd_create, "hidet_dist", MFD_CLOEXEC));
  if (descriptor < 0) return -1;
  const bool written = ftruncate(descriptor, static_cast<off_t>(bytes)) == 0 &&
                       pwrite(descriptor, &header, sizeof header, 0) == static_cast<ssize_t>(sizeof header);
  if (written) return descriptor;
  ::close(descriptor);
  return -1;
}

std::shared_ptr<Mapping> Mapping::of(int descriptor, dev_t device, ino_t file, size_t bytes) {
  static std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Mapping>> known;
  // A child must not find the mutex locked by a thread that it does not have.
  static const int registered = pthread_atfork([] { mutex.lock(); }, unlock, unlock);
  (void)registered;
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<Mapping> &entry = known[{device, file}];
  std::shared_ptr<Mapping> mapping = entry.lock();
  if (mapping != nullptr) return mapping;
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) return nullptr;
  mapping = std::make_shared<Mapping>(memory, bytes);
  entry = mapping;
  return mapping;
}

std::shared_ptr<Mapping> Mapping::of(int descriptor, const FileHeader &expected, size_t bytes) {
  struct stat status{};
  if (fstat(descriptor, &status) != 0 || static_cast<size_t>(status.st_size) != bytes) return nullptr;
  std::shared_ptr<Mapping> mapping = of(descriptor, status.st_dev, status.st_ino, bytes);
  if (mapping == nullptr) return nullptr;
  const auto *header = reinterpret_cast<const FileHeader *>(mapping->memory());
  const bool fits =
      header->magic == expected.magic && header->slot_bytes == expected.slot_bytes && header->ranks == expected.ranks;
  return fits ? mapping : nullptr;
}

Mapping::~Mapping() { munmap(memory_, bytes_); }

}  // namespace hidet_dist
