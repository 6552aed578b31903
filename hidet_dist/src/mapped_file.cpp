// Watching mapped files, and the handler of bus errors. See mapped_file.h.
#include "mapped_file.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "communicator.hpp"

namespace {

std::mutex mutex;  // protects all of the following, except what the handler reads
std::atomic<hidet_dist_mapped_file *> files{nullptr};
struct sigaction earlier{};
uintptr_t page_bytes = 4096;

// Replaces the page at an address, and those behind it, by zeros. False if no watched file is mapped there.
bool replace(uintptr_t address) {
  for (auto *file = files.load(std::memory_order_acquire); file != nullptr; file = file->next) {
    const uintptr_t end = file->end.load(std::memory_order_acquire);
    if (address < file->begin.load(std::memory_order_acquire) || address >= end) continue;
    file->lost.store(true, std::memory_order_seq_cst);  // before anyone can read zeros
    const uintptr_t page = address / page_bytes * page_bytes;
    return mmap(reinterpret_cast<void *>(page), end - page, PROT_READ,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
  }
  return false;
}

void on_bus_error(int number, siginfo_t *info, void *context) {
  const int saved = errno;
  const bool sent = info->si_code <= 0;  // by a process, not by a read
  const bool replaced = !sent && replace(reinterpret_cast<uintptr_t>(info->si_addr));
  errno = saved;
  if (replaced) return;
  if ((earlier.sa_flags & SA_SIGINFO) != 0) {
    earlier.sa_sigaction(number, info, context);
  } else if (earlier.sa_handler == SIG_DFL || (earlier.sa_handler == SIG_IGN && !sent)) {
    signal(number, SIG_DFL);
    raise(number);  // delivered on return from the handler
  } else if (earlier.sa_handler != SIG_IGN) {
    earlier.sa_handler(number);
  }
}

void handle_bus_errors() {
  static bool handled = false;
  if (handled) return;
  page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  sigaction(SIGBUS, nullptr, &earlier);  // must be known before the handler can run
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
  // A child must not find the mutex locked by a thread that it does not have.
  const auto unlock = [] { mutex.unlock(); };
  pthread_atfork([] { mutex.lock(); }, unlock, unlock);
  handled = true;
}

// An unused watch.
hidet_dist_mapped_file *unused() {
  hidet_dist_mapped_file *first = files.load(std::memory_order_relaxed);
  for (auto *file = first; file != nullptr; file = file->next) {
    if (file->descriptor < 0) return file;
  }
  auto *file = new hidet_dist_mapped_file;
  file->next = first;
  files.store(file, std::memory_order_release);
  return file;
}

bool same(const struct timespec &a, const struct timespec &b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

}  // namespace

int32_t hidet_dist_mapped_file::change(bool *explained) const {
  if (lost.load(std::memory_order_seq_cst)) return 1;
  struct stat now{};
  if (fstat(descriptor, &now) != 0 || now.st_dev != before.st_dev || now.st_ino != before.st_ino ||
      now.st_size != before.st_size || !same(now.st_mtim, before.st_mtim)) {
    return 1;
  }
  if (explained != nullptr) {
    *explained = now.st_nlink != before.st_nlink || now.st_mode != before.st_mode || now.st_uid != before.st_uid ||
                 now.st_gid != before.st_gid;
  }
  return same(now.st_ctim, before.st_ctim) ? 0 : 2;
}

bool hidet_dist_mapped_file::changed() const {
  bool explained = false;
  const int32_t what = change(&explained);
  return what == 1 || (what == 2 && !explained);
}

extern "C" {

hidet_dist_mapped_file *hidet_dist_mapped_file_watch(int32_t descriptor, void *memory, int64_t bytes,
                                                     const char *name) {
  struct stat status{};
  if (fstat(descriptor, &status) != 0) {
    hidet_dist::set_last_error(std::string(name) + " cannot be watched: " + std::strerror(errno));
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  handle_bus_errors();
  hidet_dist_mapped_file *file = unused();
  file->descriptor = descriptor;
  file->before = status;
  file->name = name;
  file->lost.store(false, std::memory_order_relaxed);
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t pages = (static_cast<uintptr_t>(bytes) + page_bytes - 1) / page_bytes;
  file->begin.store(begin, std::memory_order_relaxed);
  file->end.store(begin + pages * page_bytes, std::memory_order_release);
  return file;
}

int32_t hidet_dist_mapped_file_change(const hidet_dist_mapped_file *file) { return file->change(); }

void hidet_dist_mapped_file_renew(hidet_dist_mapped_file *file) {
  struct stat now{};
  if (fstat(file->descriptor, &now) != 0) return;
  if (now.st_dev != file->before.st_dev || now.st_ino != file->before.st_ino || now.st_size != file->before.st_size ||
      !same(now.st_mtim, file->before.st_mtim)) {
    return;  // this change is permanent
  }
  file->before = now;
}

void hidet_dist_mapped_file_condemn(hidet_dist_mapped_file *file) { file->lost.store(true, std::memory_order_seq_cst); }

void hidet_dist_mapped_file_forget(hidet_dist_mapped_file *file) {
  const std::lock_guard<std::mutex> lock(mutex);
  file->end.store(0, std::memory_order_seq_cst);
  file->descriptor = -1;
}

void hidet_dist_communicator_rely_on(hidet_dist_communicator *communicator, const hidet_dist_mapped_file *file) {
  communicator->rely_on(file);
}

}  // extern "C"
