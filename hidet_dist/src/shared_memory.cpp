// The transport between ranks of one host. Each rank of a group owns two slots of the group's segment and fills them in
// turns: it writes a piece of its data into one, says so, waits until the others have written theirs, and reads what it
// needs. When all have written in a turn, all are through with what they read in the turn before, so that its slots can
// be written again in the next turn.
#include "hidet_dist/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "communicator.hpp"
#include "reduce.hpp"

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMagic = 0x686964646973746d;
constexpr int64_t kSlotBytes = 256 * 1024;  // large against the cost of a hand-over, small against caches
constexpr int kSlots = 2;
constexpr int64_t kShareBytes = 4 * 1024;  // adding up less than this takes no longer than a hand-over
constexpr auto kSpin = std::chrono::microseconds(5);         // about what falling asleep and being woken costs
constexpr auto kLookAround = std::chrono::milliseconds(20);  // how often a sleeper looks for ended processes
constexpr size_t kLine = 64;

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a futex is a plain 32-bit word");

// A count that goes up, and that others wait for. Counts wrap around: only differences matter.
struct alignas(kLine) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};

struct Member {
  Counter written;  // how often this rank has said so
  std::atomic<int32_t> process;
  std::atomic<uint32_t> closed;
};

struct Header {
  uint64_t magic;
  int64_t slot_bytes;
  int32_t ranks;
};

size_t header_bytes(int32_t ranks) {
  const size_t bytes = kLine + static_cast<size_t>(ranks) * sizeof(Member);
  const size_t page = 4096;
  return (bytes + page - 1) / page * page;
}

size_t segment_bytes(int32_t ranks) {
  return header_bytes(ranks) + static_cast<size_t>(ranks) * kSlots * kSlotBytes;
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t> *word, int operation, uint32_t value, const timespec *timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), operation, value, timeout, nullptr, 0);
}

void advance(Counter *counter, uint32_t value) {
  counter->value.store(value, std::memory_order_seq_cst);
  // Either the sleeper is seen here, or it sees the new value before it falls asleep.
  if (counter->sleepers.load(std::memory_order_seq_cst) != 0) futex(&counter->value, FUTEX_WAKE, INT_MAX, nullptr);
}

bool reached(const Counter &counter, uint32_t value) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - value) >= 0;
}

// A failure that another rank caused, with what is to be said of it.
struct PeerFailure {
  std::string message;
};

// A mapped segment. Ranks that are threads of one process share the mapping too, so that tools see them share memory.
class Mapping {
 public:
  // The mapping of a descriptor, or null.
  static std::shared_ptr<Mapping> of(int descriptor, dev_t device, ino_t file, size_t bytes) {
    static std::mutex mutex;
    static std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Mapping>> known;
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
  Mapping(void *memory, size_t bytes) : memory_(static_cast<char *>(memory)), bytes_(bytes) {}
  Mapping(const Mapping &) = delete;
  Mapping &operator=(const Mapping &) = delete;
  ~Mapping() { munmap(memory_, bytes_); }

  char *memory() const { return memory_; }

 private:
  char *const memory_;
  const size_t bytes_;
};

// The segment of one group, and this rank's place in it.
class Segment {
 public:
  Segment(std::shared_ptr<Mapping> mapping, int32_t place, int32_t ranks, std::chrono::nanoseconds timeout)
      : mapping_(std::move(mapping)), memory_(mapping_->memory()), place_(place), ranks_(ranks), timeout_(timeout) {
    cpu_set_t cpus;
    const bool known = sched_getaffinity(0, sizeof cpus, &cpus) == 0;
    // Where ranks share cores, whoever waits should let go of its core at once.
    spins_ = known && CPU_COUNT(&cpus) >= ranks;
    member(place).process.store(getpid(), std::memory_order_release);
  }
  Segment(const Segment &) = delete;
  Segment &operator=(const Segment &) = delete;
  ~Segment() {
    close();
    for (const int descriptor : processes_) {
      if (descriptor >= 0) ::close(descriptor);
    }
  }

  int32_t ranks() const { return ranks_; }
  int32_t place() const { return place_; }

  void close() {
    Member &own = member(place_);
    own.closed.store(1, std::memory_order_seq_cst);
    futex(&own.written.value, FUTEX_WAKE, INT_MAX, nullptr);
  }

  // This rank's slot for the next turn.
  char *begin_turn() {
    if (processes_.empty()) watch_processes();
    ++turn_;
    return slot(place_);
  }

  // Says that this rank has written its slot, and waits for all others. May be called several times a turn.
  void exchange() {
    ++pieces_;
    advance(&member(place_).written, pieces_);
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      if (rank != place_) wait(rank, pieces_);
    }
  }

  // What a rank has written this turn.
  char *slot(int32_t rank) {
    const size_t number = static_cast<size_t>(rank) * kSlots + turn_ % kSlots;
    return memory_ + header_bytes(ranks_) + number * kSlotBytes;
  }

 private:
  Member &member(int32_t rank) { return reinterpret_cast<Member *>(memory_ + kLine)[rank]; }

  // One descriptor a process, which tells when it ends; a process number alone may be given to another one.
  void watch_processes() {
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      const int32_t process = member(rank).process.load(std::memory_order_acquire);
      const bool other = process != getpid();  // ranks may be threads of one process
      processes_.push_back(other ? static_cast<int>(syscall(SYS_pidfd_open, process, 0)) : -1);
      gone_.push_back(other && processes_.back() < 0 && errno == ESRCH);
    }
  }

  bool ended(int32_t rank) {
    const auto index = static_cast<size_t>(rank);
    if (gone_[index] || processes_[index] < 0) return gone_[index];
    pollfd entry{processes_[index], POLLIN, 0};
    return poll(&entry, 1, 0) > 0;
  }

  void wait(int32_t rank, uint32_t value) {
    Counter &counter = member(rank).written;
    if (reached(counter, value)) return;
    const auto start = Clock::now();
    if (spins_) {
      do {
        for (int i = 0; i < 16; ++i) relax();
        if (reached(counter, value)) return;
      } while (Clock::now() - start < kSpin);
    }
    counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
    std::string failure;
    while (failure.empty()) {
      const uint32_t now = counter.value.load(std::memory_order_seq_cst);
      if (static_cast<int32_t>(now - value) >= 0) break;
      const timespec pause{0, std::chrono::nanoseconds(kLookAround).count()};
      futex(&counter.value, FUTEX_WAIT, now, &pause);
      failure = why_not(rank, start);
    }
    counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    // A rank may have done its part and ended since.
    if (!failure.empty() && !reached(counter, value)) throw PeerFailure{failure};
  }

  // Why there is no use in waiting for a rank any longer, or an empty string.
  std::string why_not(int32_t rank, Clock::time_point start) {
    const std::string who = "the rank in place " + std::to_string(rank) + " of the group of " + std::to_string(ranks_);
    if (const auto *communicator = hidet_dist::current(); communicator != nullptr && communicator->error() != nullptr) {
      return "the communicator failed meanwhile";
    }
    if (member(rank).closed.load(std::memory_order_seq_cst) != 0) return who + " has closed its end";
    if (ended(rank)) return "the process of " + who + " has ended";
    if (Clock::now() - start > timeout_) {
      const double seconds = std::chrono::duration<double>(timeout_).count();
      std::string text = std::to_string(seconds);
      text.erase(text.find_last_not_of('0') + 1);
      if (text.back() == '.') text.pop_back();
      return "timed out after " + text + " s, waiting for " + who;
    }
    return "";
  }

  const std::shared_ptr<Mapping> mapping_;
  char *const memory_;
  const int32_t place_;
  const int32_t ranks_;
  const std::chrono::nanoseconds timeout_;
  bool spins_ = false;
  uint32_t turn_ = 0;
  uint32_t pieces_ = 0;
  std::vector<int> processes_;
  std::vector<bool> gone_;
};

void copy(void *target, const void *source, int64_t bytes) { std::memcpy(target, source, static_cast<size_t>(bytes)); }

const char *at(const void *buffer, int64_t offset) { return static_cast<const char *>(buffer) + offset; }
char *at(void *buffer, int64_t offset) { return static_cast<char *>(buffer) + offset; }

// Reduces the elements [begin, begin + count) of all ranks' slots into `result`.
void reduce_slots(Segment &segment, int64_t begin_bytes, void *result, int64_t count, int32_t dtype, int32_t op) {
  std::vector<const void *> sources;
  for (int32_t rank = 0; rank < segment.ranks(); ++rank) sources.push_back(segment.slot(rank) + begin_bytes);
  hidet_dist::reduce(sources.data(), segment.ranks(), result, count, dtype, op);
}

void all_reduce(Segment &segment, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op) {
  const int64_t element = hidet_dist_dtype_size(dtype);
  const int64_t most = kSlotBytes / element;
  const int32_t ranks = segment.ranks();
  for (int64_t done = 0; done < count;) {
    const int64_t size = std::min(most, count - done);
    char *own = segment.begin_turn();
    copy(own, at(send, done * element), size * element);
    segment.exchange();
    // Every rank reduces all of it, or each its share, which the others read then: one more hand-over, but a share of
    // the additions. With two ranks, the sharing would move as many bytes.
    if (ranks == 2 || size * element < ranks * kShareBytes) {
      reduce_slots(segment, 0, at(recv, done * element), size, dtype, op);
    } else {
      const auto first = [&](int64_t rank) { return size * rank / ranks; };
      const int64_t begin = first(segment.place());
      reduce_slots(segment, begin * element, own + begin * element, first(segment.place() + 1) - begin, dtype, op);
      segment.exchange();
      for (int32_t rank = 0; rank < ranks; ++rank) {
        copy(at(recv, (done + first(rank)) * element), segment.slot(rank) + first(rank) * element,
             (first(rank + 1) - first(rank)) * element);
      }
    }
    done += size;
  }
}

void all_gather(Segment &segment, const void *send, void *recv, int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(kSlotBytes, bytes - done);
    copy(segment.begin_turn(), at(send, done), size);
    segment.exchange();
    for (int32_t rank = 0; rank < segment.ranks(); ++rank) {
      const char *source = rank == segment.place() ? at(send, done) : segment.slot(rank);
      copy(at(recv, rank * bytes + done), source, size);
    }
    done += size;
  }
}

// A slot holds the same stretch of what each rank is to get.
int64_t stretch(const Segment &segment, int64_t element) { return kSlotBytes / element / segment.ranks(); }

void write_stretches(Segment &segment, const void *send, int64_t run, int64_t done, int64_t size, int64_t element) {
  char *own = segment.begin_turn();
  for (int32_t rank = 0; rank < segment.ranks(); ++rank) {
    copy(own + rank * size * element, at(send, (rank * run + done) * element), size * element);
  }
  segment.exchange();
}

void reduce_scatter(Segment &segment, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op) {
  const int64_t element = hidet_dist_dtype_size(dtype);
  for (int64_t done = 0; done < count;) {
    const int64_t size = std::min(stretch(segment, element), count - done);
    write_stretches(segment, send, count, done, size, element);
    reduce_slots(segment, segment.place() * size * element, at(recv, done * element), size, dtype, op);
    done += size;
  }
}

void all_to_all(Segment &segment, const void *send, void *recv, int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(stretch(segment, 1), bytes - done);
    write_stretches(segment, send, bytes, done, size, 1);
    for (int32_t rank = 0; rank < segment.ranks(); ++rank) {
      copy(at(recv, rank * bytes + done), segment.slot(rank) + segment.place() * size, size);
    }
    done += size;
  }
}

}  // namespace

struct hidet_dist_shm {
 public:
  hidet_dist_shm(const hidet_dist_transport &fallback, hidet_dist_shm_connect connect, std::chrono::nanoseconds timeout)
      : fallback_(fallback), connect_(connect), timeout_(timeout) {}

  // Carries a collective out where the group's way is known, or found out now.
  template <typename Shared, typename Other>
  int32_t run(int32_t group, Shared shared, Other other) {
    if (groups_.find(group) == groups_.end()) {
      const int32_t status = connect_(group);
      if (status != HIDET_DIST_OK) return status;
    }
    const auto found = groups_.find(group);
    if (found == groups_.end()) {
      fail("the process did not decide how group " + std::to_string(group) + " communicates");
      return HIDET_DIST_FAILED;
    }
    if (found->second == nullptr) return other(fallback_);
    try {
      shared(*found->second);
      return HIDET_DIST_OK;
    } catch (const PeerFailure &failure) {
      failed_by_peer_.store(true);
      fail(failure.message);
      return HIDET_DIST_FAILED;
    }
  }

  int32_t attach(int32_t group, int32_t descriptor, int32_t place, int32_t ranks) {
    struct stat status {};
    if (ranks < 2 || place < 0 || place >= ranks || fstat(descriptor, &status) != 0) return HIDET_DIST_INVALID_ARGUMENT;
    if (static_cast<size_t>(status.st_size) != segment_bytes(ranks)) return HIDET_DIST_INVALID_ARGUMENT;
    auto mapping = Mapping::of(descriptor, status.st_dev, status.st_ino, segment_bytes(ranks));
    if (mapping == nullptr) return HIDET_DIST_FAILED;
    const auto *header = reinterpret_cast<const Header *>(mapping->memory());
    if (header->magic != kMagic || header->slot_bytes != kSlotBytes || header->ranks != ranks) {
      return HIDET_DIST_INVALID_ARGUMENT;
    }
    groups_[group] = std::make_unique<Segment>(std::move(mapping), place, ranks, timeout_);
    return HIDET_DIST_OK;
  }

  void delegate(int32_t group) { groups_[group] = nullptr; }

  bool failed_by_peer() const { return failed_by_peer_.load(); }

  void close() {
    for (auto &[group, segment] : groups_) {
      if (segment != nullptr) segment->close();
    }
  }

 private:
  static void fail(const std::string &message) {
    if (auto *communicator = hidet_dist::current(); communicator != nullptr) communicator->fail(message);
  }

  const hidet_dist_transport fallback_;
  const hidet_dist_shm_connect connect_;
  const std::chrono::nanoseconds timeout_;
  std::map<int32_t, std::unique_ptr<Segment>> groups_;
  std::atomic<bool> failed_by_peer_{false};
};

namespace {

hidet_dist_shm &transport_of(void *context) { return *static_cast<hidet_dist_shm *>(context); }

int32_t route_all_reduce(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                         int32_t group) {
  return transport_of(context).run(
      group, [&](Segment &segment) { all_reduce(segment, send, recv, count, dtype, op); },
      [&](const hidet_dist_transport &other) {
        return other.all_reduce(other.context, send, recv, count, dtype, op, group);
      });
}

int32_t route_all_gather(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) {
  return transport_of(context).run(
      group, [&](Segment &segment) { all_gather(segment, send, recv, count * hidet_dist_dtype_size(dtype)); },
      [&](const hidet_dist_transport &other) {
        return other.all_gather(other.context, send, recv, count, dtype, group);
      });
}

int32_t route_reduce_scatter(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                             int32_t group) {
  return transport_of(context).run(
      group, [&](Segment &segment) { reduce_scatter(segment, send, recv, count, dtype, op); },
      [&](const hidet_dist_transport &other) {
        return other.reduce_scatter(other.context, send, recv, count, dtype, op, group);
      });
}

int32_t route_all_to_all(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) {
  return transport_of(context).run(
      group, [&](Segment &segment) { all_to_all(segment, send, recv, count * hidet_dist_dtype_size(dtype)); },
      [&](const hidet_dist_transport &other) {
        return other.all_to_all(other.context, send, recv, count, dtype, group);
      });
}

}  // namespace

extern "C" {

hidet_dist_shm *hidet_dist_shm_create(const hidet_dist_transport *fallback, hidet_dist_shm_connect connect,
                                      double timeout_seconds) {
  if (fallback == nullptr || connect == nullptr || !(timeout_seconds > 0)) return nullptr;
  const auto timeout = std::chrono::duration<double>(std::min(timeout_seconds, 1e9));
  return new hidet_dist_shm(*fallback, connect, std::chrono::duration_cast<std::chrono::nanoseconds>(timeout));
}

void hidet_dist_shm_table(hidet_dist_shm *transport, hidet_dist_transport *table) {
  *table = hidet_dist_transport{};
  table->context = transport;
  table->all_reduce = route_all_reduce;
  table->all_gather = route_all_gather;
  table->reduce_scatter = route_reduce_scatter;
  table->all_to_all = route_all_to_all;
}

int32_t hidet_dist_shm_segment(int32_t ranks) {
  if (ranks < 2) return -1;
  const int descriptor = static_cast<int>(syscall(SYS_memfd_create, "hidet_dist", MFD_CLOEXEC));
  if (descriptor < 0) return -1;
  const Header header{kMagic, kSlotBytes, ranks};
  const bool written = ftruncate(descriptor, static_cast<off_t>(segment_bytes(ranks))) == 0 &&
                       pwrite(descriptor, &header, sizeof header, 0) == static_cast<ssize_t>(sizeof header);
  if (written) return descriptor;
  ::close(descriptor);
  return -1;
}

int32_t hidet_dist_shm_attach(hidet_dist_shm *transport, int32_t group, int32_t descriptor, int32_t place,
                              int32_t ranks) {
  return transport->attach(group, descriptor, place, ranks);
}

void hidet_dist_shm_delegate(hidet_dist_shm *transport, int32_t group) { transport->delegate(group); }

int32_t hidet_dist_shm_failed_by_peer(const hidet_dist_shm *transport) { return transport->failed_by_peer() ? 1 : 0; }

void hidet_dist_shm_close(hidet_dist_shm *transport) { transport->close(); }

void hidet_dist_shm_destroy(hidet_dist_shm *transport) { delete transport; }

}  // extern "C"
