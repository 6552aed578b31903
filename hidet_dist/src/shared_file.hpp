// Unnamed files that ranks of one host map to share memory.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace hidet_dist {

// The header of such a file; the rest depends on its kind.
struct FileHeader {
  uint64_t magic;  // of the kind
  int64_t slot_bytes;
  int32_t ranks;
};

constexpr size_t whole_pages(size_t bytes) {
  const size_t page = 4096;
  return (bytes + page - 1) / page * page;
}

// Makes a file that begins with this header, and returns its descriptor, or -1.
int new_file(const FileHeader &header, size_t bytes);

// A mapped file. Ranks that are threads of one process share the mapping too, so that tools see them share memory.
class Mapping {
 public:
  // The mapping of a descriptor of exactly such a file, or null.
  static std::shared_ptr<Mapping> of(int descriptor, const FileHeader &expected, size_t bytes);

  Mapping(void *memory, size_t bytes) : memory_(static_cast<char *>(memory)), bytes_(bytes) {}
  Mapping(const Mapping &) = delete;
  Mapping &operator=(const Mapping &) = delete;
  ~Mapping();

  char *memory() const { return memory_; }

 private:
  static std::shared_ptr<Mapping> of(int descriptor, dev_t device, ino_t file, size_t bytes);
  static void unlock() { mutex.unlock(); }

  static inline std::mutex mutex;  // of the known mappings
  char *const memory_;
  const size_t bytes_;
};

}  // namespace hidet_dist
