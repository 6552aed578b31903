// The transport between ranks of one host. Each rank of a group owns two slots of the group's segment and fills them in
// turns: it writes a piece of its data into one, says so, waits until the others have written theirs, and reads what it
// needs. When all have written in a turn, all are through with what they read in the turn before, so that its slots can
// be written again in the next turn.
//
// Messages between two ranks go another way, as no other rank may be needed for them: each rank owns an inbox, with a
// channel for each rank that sends to it. A rank that waits, to receive or for room in another's inbox, waits for its
// own bell, which the others ring whenever they have put something into its inbox or taken something out of theirs.
#include "hidet_dist/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
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
#include <thread>
#include <utility>
#include <vector>

#include "blocks.hpp"
#include "communicator.hpp"
#include "reduce.hpp"

namespace {

using hidet_dist::Blocks;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kMagic = 0x686964646973746e;
constexpr uint64_t kInboxMagic = 0x686964646973746a;
constexpr int64_t kSlotBytes = 256 * 1024;  // large against the cost of a hand-over, small against caches
constexpr int kSlots = 2;
constexpr int64_t kPieceBytes = 64 * 1024;  // of a message: two of them fit into a second-level cache, twice
constexpr uint32_t kPieces = 2;             // in a channel at a time
constexpr int64_t kShareBytes = 4 * 1024;  // adding up less than this takes no longer than a hand-over
// How long a rank looks before it falls asleep: as long as it took to be woken before, within these bounds.
constexpr auto kLeastSpin = std::chrono::microseconds(5);
constexpr auto kMostSpin = std::chrono::microseconds(40);
constexpr auto kLookAround = std::chrono::milliseconds(20);  // how often a sleeper looks for ended processes
constexpr size_t kLine = 64;

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a futex is a plain 32-bit word");

// A count that goes up, and that others wait for. Counts wrap around: only differences matter.
struct alignas(kLine) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
  std::atomic<int64_t> called;  // when sleepers were woken last, in the clock's ticks
};

struct Member {
  Counter written;  // how often this rank has said so
  std::atomic<int32_t> process;
  std::atomic<uint32_t> closed;
  hidet_dist_envelope envelopes[kSlots];  // of what is in each slot
};
static_assert(sizeof(Member) == 2 * kLine, "the envelopes are to be in one line");

struct Header {
  uint64_t magic;
  int64_t slot_bytes;
  int32_t ranks;
};

constexpr size_t whole_pages(size_t bytes) {
  const size_t page = 4096;
  return (bytes + page - 1) / page * page;
}

size_t header_bytes(int32_t ranks) { return whole_pages(kLine + static_cast<size_t>(ranks) * sizeof(Member)); }

size_t segment_bytes(int32_t ranks) {
  return header_bytes(ranks) + static_cast<size_t>(ranks) * kSlots * kSlotBytes;
}

// The owner of an inbox, as the others see it.
struct Owner {
  Counter bell;
  std::atomic<int32_t> process;
  std::atomic<uint32_t> closed;
};

// The pieces that one rank has put into another's inbox. Only the sender writes `put`, only the receiver `taken`.
struct Channel {
  alignas(kLine) std::atomic<uint32_t> put;
  alignas(kLine) std::atomic<uint32_t> taken;
  alignas(kLine) hidet_dist_envelope envelopes[kPieces];  // of the message that the piece belongs to
};

size_t inbox_header_bytes(int32_t ranks) {
  return whole_pages(kLine + sizeof(Owner) + static_cast<size_t>(ranks) * sizeof(Channel));
}

// Memory that nobody sends through is never touched, and so takes no room.
size_t inbox_bytes(int32_t ranks) {
  return inbox_header_bytes(ranks) + static_cast<size_t>(ranks) * kPieces * static_cast<size_t>(kPieceBytes);
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

void wake_sleepers(Counter *counter) {
  if (counter->sleepers.load(std::memory_order_seq_cst) == 0) return;
  counter->called.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  futex(&counter->value, FUTEX_WAKE, INT_MAX, nullptr);
}

void advance(Counter *counter, uint32_t value) {
  counter->value.store(value, std::memory_order_seq_cst);
  wake_sleepers(counter);  // either the sleeper is seen there, or it sees the new value before it falls asleep
}

void ring(Counter *bell) {
  bell->value.fetch_add(1, std::memory_order_seq_cst);
  wake_sleepers(bell);
}

bool reached(const Counter &counter, uint32_t value) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - value) >= 0;
}

// A failure that another rank caused, with what is to be said of it.
struct PeerFailure {
  std::string message;
};

// A failure that no other rank caused: data that must not be sent.
struct OwnFailure {
  std::string message;
};

// Other ranks are in another collective; the communicator has been told.
struct OutOfStep {};

// What this rank says of its collective; nothing outside of one.
hidet_dist_envelope own_envelope() {
  hidet_dist_envelope envelope{};
  static_cast<void>(hidet_dist_current_envelope(&envelope));
  return envelope;
}

// Throws where another rank is in another collective, before its data is taken.
void check_envelope(const hidet_dist_envelope &theirs, int64_t from) {
  if (hidet_dist_check_envelope(&theirs, from) == HIDET_DIST_FAILED) throw OutOfStep{};
}

// Throws where what this rank is about to let others read was made of a file that has been changed.
void check_files() {
  const auto *communicator = hidet_dist::current();
  if (communicator == nullptr) return;
  if (std::string problem = communicator->spoiled(); !problem.empty()) throw OwnFailure{std::move(problem)};
}

// Tells when a process ends; its number alone may be given to another one.
class Process {
 public:
  explicit Process(int32_t number) {
    if (number == getpid()) return;  // ranks may be threads of one process
    descriptor_ = static_cast<int>(syscall(SYS_pidfd_open, number, 0));
    gone_ = descriptor_ < 0 && errno == ESRCH;
  }
  Process(Process &&other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)), gone_(other.gone_) {}
  Process(const Process &) = delete;
  Process &operator=(const Process &) = delete;
  ~Process() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  bool ended() const {
    if (gone_ || descriptor_ < 0) return gone_;
    pollfd entry{descriptor_, POLLIN, 0};
    return poll(&entry, 1, 0) > 0;
  }

 private:
  int descriptor_ = -1;
  bool gone_ = false;
};

std::string in_seconds(std::chrono::nanoseconds time) {
  std::string text = std::to_string(std::chrono::duration<double>(time).count());
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// Why there is no use in waiting for a rank any longer, or an empty string.
std::string why_not(const std::string &who, const std::atomic<uint32_t> &closed, const Process &process,
                    Clock::time_point start, std::chrono::nanoseconds timeout) {
  if (const auto *communicator = hidet_dist::current(); communicator != nullptr && communicator->error() != nullptr) {
    return "the communicator failed meanwhile";
  }
  if (closed.load(std::memory_order_seq_cst) != 0) return who + " has closed its end";
  if (process.ended()) return "the process of " + who + " has ended";
  if (Clock::now() - start > timeout) return "timed out after " + in_seconds(timeout) + ", waiting for " + who;
  return "";
}

// Where ranks share cores, whoever waits should let go of its core at once.
bool has_core_each(int32_t ranks) {
  cpu_set_t cpus;
  return sched_getaffinity(0, sizeof cpus, &cpus) == 0 && CPU_COUNT(&cpus) >= ranks;
}

// How one thread waits for counts. It looks for as long as being woken takes before it falls asleep, so that a wait
// takes at most twice the time that it would if its length were known (A. Karlin et al., "Empirical studies of
// competitive spinning for a shared-memory multiprocessor", SOSP 1991). What being woken takes depends on the host,
// between some microseconds and tens of them, and is measured each time.
class Patience {
 public:
  explicit Patience(int32_t ranks) : spins_(has_core_each(ranks)) {}

  // Whether it happens soon.
  template <class Happened>
  bool look(Happened happened) const {
    if (happened()) return true;
    if (!spins_) return false;
    const auto begin = Clock::now();
    do {
      for (int i = 0; i < 16; ++i) relax();
      if (happened()) return true;
    } while (Clock::now() - begin < spin_);
    return false;
  }

  // Sleeps while the count is this one, for a while.
  void sleep(Counter *counter, uint32_t value) {
    const timespec pause{0, std::chrono::nanoseconds(kLookAround).count()};
    if (futex(&counter->value, FUTEX_WAIT, value, &pause) != 0) return;
    const auto called = Clock::time_point(Clock::duration(counter->called.load(std::memory_order_relaxed)));
    const auto took = std::clamp<Clock::duration>(Clock::now() - called, kLeastSpin, kMostSpin);
    spin_ += (took - spin_) / 8;
  }

 private:
  const bool spins_;
  Clock::duration spin_ = kLeastSpin;
};

// A new file without a name that begins with this header, or -1.
int new_file(const Header &header, size_t bytes) {
  const int descriptor = static_cast<int>(syscall(SYS_memfd_create, "hidet_dist", MFD_CLOEXEC));
  if (descriptor < 0) return -1;
  const bool written = ftruncate(descriptor, static_cast<off_t>(bytes)) == 0 &&
                       pwrite(descriptor, &header, sizeof header, 0) == static_cast<ssize_t>(sizeof header);
  if (written) return descriptor;
  ::close(descriptor);
  return -1;
}

// A mapped segment. Ranks that are threads of one process share the mapping too, so that tools see them share memory.
class Mapping {
 public:
  // The mapping of a descriptor, or null.
  static std::shared_ptr<Mapping> of(int descriptor, dev_t device, ino_t file, size_t bytes) {
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
  // The mapping of a descriptor of exactly such a file, or null.
  static std::shared_ptr<Mapping> of(int descriptor, const Header &expected, size_t bytes) {
    struct stat status {};
    if (fstat(descriptor, &status) != 0 || static_cast<size_t>(status.st_size) != bytes) return nullptr;
    std::shared_ptr<Mapping> mapping = of(descriptor, status.st_dev, status.st_ino, bytes);
    if (mapping == nullptr) return nullptr;
    const auto *header = reinterpret_cast<const Header *>(mapping->memory());
    const bool fits = header->magic == expected.magic && header->slot_bytes == expected.slot_bytes &&
                      header->ranks == expected.ranks;
    return fits ? mapping : nullptr;
  }

  Mapping(void *memory, size_t bytes) : memory_(static_cast<char *>(memory)), bytes_(bytes) {}
  Mapping(const Mapping &) = delete;
  Mapping &operator=(const Mapping &) = delete;
  ~Mapping() { munmap(memory_, bytes_); }

  char *memory() const { return memory_; }

 private:
  static void unlock() { mutex.unlock(); }

  static inline std::mutex mutex;  // of the known mappings
  char *const memory_;
  const size_t bytes_;
};

// The segment of one group, and this rank's place in it.
class Segment {
 public:
  Segment(std::shared_ptr<Mapping> mapping, int32_t place, int32_t ranks, std::chrono::nanoseconds timeout)
      : mapping_(std::move(mapping)),
        memory_(mapping_->memory()),
        place_(place),
        ranks_(ranks),
        timeout_(timeout),
        patience_(ranks) {
    member(place).process.store(getpid(), std::memory_order_release);
  }
  Segment(const Segment &) = delete;
  Segment &operator=(const Segment &) = delete;
  ~Segment() { close(); }

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
    member(place_).envelopes[turn_ % kSlots] = own_envelope();
    return slot(place_);
  }

  // Says that this rank has written its slot, waits for all others, and throws where one is in another collective: then
  // all of them see that. May be called several times a turn.
  void exchange() {
    check_files();
    ++pieces_;
    advance(&member(place_).written, pieces_);
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      if (rank != place_) wait(rank, pieces_);
    }
    const hidet_dist_envelope &own = member(place_).envelopes[turn_ % kSlots];
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      const hidet_dist_envelope &theirs = member(rank).envelopes[turn_ % kSlots];
      if (!hidet_dist::equal(own, theirs)) check_envelope(theirs, hidet_dist::current()->rank_at(rank));
    }
  }

  // What a rank has written this turn.
  char *slot(int32_t rank) {
    const size_t number = static_cast<size_t>(rank) * kSlots + turn_ % kSlots;
    return memory_ + header_bytes(ranks_) + number * kSlotBytes;
  }

 private:
  Member &member(int32_t rank) { return reinterpret_cast<Member *>(memory_ + kLine)[rank]; }

  void watch_processes() {
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      processes_.emplace_back(member(rank).process.load(std::memory_order_acquire));
    }
  }

  void wait(int32_t rank, uint32_t value) {
    Counter &counter = member(rank).written;
    if (patience_.look([&] { return reached(counter, value); })) return;
    const auto start = Clock::now();
    counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
    std::string failure;
    while (failure.empty()) {
      const uint32_t now = counter.value.load(std::memory_order_seq_cst);
      if (static_cast<int32_t>(now - value) >= 0) break;
      patience_.sleep(&counter, now);
      const std::string who =
          "the rank in place " + std::to_string(rank) + " of the group of " + std::to_string(ranks_);
      failure = why_not(who, member(rank).closed, processes_[static_cast<size_t>(rank)], start, timeout_);
    }
    counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    // A rank may have done its part and ended since.
    if (!failure.empty() && !reached(counter, value)) throw PeerFailure{failure};
  }

  const std::shared_ptr<Mapping> mapping_;
  char *const memory_;
  const int32_t place_;
  const int32_t ranks_;
  const std::chrono::nanoseconds timeout_;
  Patience patience_;
  uint32_t turn_ = 0;
  uint32_t pieces_ = 0;
  std::vector<Process> processes_;
};

// A rank's inbox, as this process sees it: its own, or another's.
class Inbox {
 public:
  Inbox(std::shared_ptr<Mapping> mapping, int32_t ranks)
      : mapping_(std::move(mapping)), memory_(mapping_->memory()), ranks_(ranks) {}

  static Header header(int32_t ranks) { return Header{kInboxMagic, kPieceBytes, ranks}; }

  Owner &owner() { return *reinterpret_cast<Owner *>(memory_ + kLine); }

  // What a rank has sent to the owner.
  Channel &channel(int32_t sender) {
    return reinterpret_cast<Channel *>(memory_ + kLine + sizeof(Owner))[sender];
  }

  char *piece(int32_t sender, uint32_t number) {
    const size_t index = static_cast<size_t>(sender) * kPieces + number % kPieces;
    return memory_ + inbox_header_bytes(ranks_) + index * static_cast<size_t>(kPieceBytes);
  }

 private:
  const std::shared_ptr<Mapping> mapping_;
  char *const memory_;
  const int32_t ranks_;
};

// Another rank that this one exchanges messages with.
struct Peer {
  Peer(int32_t number, std::shared_ptr<Mapping> mapping, int32_t ranks)
      : rank(number), inbox(std::move(mapping), ranks), process(inbox.owner().process.load(std::memory_order_acquire)) {}

  const int32_t rank;
  Inbox inbox;
  const Process process;
};

// A message on its way, in one direction.
struct Message {
  Peer *peer = nullptr;  // null for none
  int64_t bytes = 0;
  int64_t done = 0;

  bool over() const { return done == bytes; }
};

// The messages between this rank and others.
class Post {
 public:
  Post(int32_t descriptor, std::shared_ptr<Mapping> mapping, int32_t rank, int32_t ranks,
       std::chrono::nanoseconds timeout)
      : descriptor_(descriptor),
        rank_(rank),
        timeout_(timeout),
        patience_(ranks),
        own_(std::move(mapping), ranks) {
    own_.owner().process.store(getpid(), std::memory_order_release);
  }
  Post(const Post &) = delete;
  Post &operator=(const Post &) = delete;
  ~Post() {
    own_.owner().closed.store(1, std::memory_order_seq_cst);
    ::close(descriptor_);
  }

  int32_t descriptor() const { return descriptor_; }

  void close(const std::map<int32_t, std::unique_ptr<Peer>> &peers) {
    own_.owner().closed.store(1, std::memory_order_seq_cst);
    for (const auto &[rank, peer] : peers) {
      if (peer != nullptr) ring(&peer->inbox.owner().bell);
    }
  }

  void exchange(const void *send, Message out, void *recv, Message in) {
    auto start = Clock::now();
    while (!out.over() || !in.over()) {
      const uint32_t heard = own_.owner().bell.value.load(std::memory_order_seq_cst);
      const bool sent = put(send, &out);
      const bool received = take(recv, &in);
      if (sent || received) {
        start = Clock::now();
      } else {
        listen(heard, out, in, start);
      }
    }
  }

 private:
  bool put(const void *send, Message *message) {
    if (message->over()) return false;
    Channel &channel = message->peer->inbox.channel(rank_);
    const uint32_t number = channel.put.load(std::memory_order_relaxed);
    if (number - channel.taken.load(std::memory_order_acquire) >= kPieces) return false;
    const int64_t size = std::min(kPieceBytes, message->bytes - message->done);
    channel.envelopes[number % kPieces] = own_envelope();
    std::memcpy(message->peer->inbox.piece(rank_, number), static_cast<const char *>(send) + message->done,
                static_cast<size_t>(size));
    check_files();
    message->done += size;
    channel.put.store(number + 1, std::memory_order_release);
    ring(&message->peer->inbox.owner().bell);
    return true;
  }

  bool take(void *recv, Message *message) {
    if (message->over()) return false;
    const int32_t sender = message->peer->rank;
    Channel &channel = own_.channel(sender);
    const uint32_t number = channel.taken.load(std::memory_order_relaxed);
    if (channel.put.load(std::memory_order_acquire) == number) return false;
    check_envelope(channel.envelopes[number % kPieces], sender);
    const int64_t size = std::min(kPieceBytes, message->bytes - message->done);
    std::memcpy(static_cast<char *>(recv) + message->done, own_.piece(sender, number), static_cast<size_t>(size));
    message->done += size;
    channel.taken.store(number + 1, std::memory_order_release);
    ring(&message->peer->inbox.owner().bell);
    return true;
  }

  // Returns once the bell was rung after `heard`.
  void listen(uint32_t heard, const Message &out, const Message &in, Clock::time_point start) {
    Counter &bell = own_.owner().bell;
    const auto rung = [&] { return bell.value.load(std::memory_order_seq_cst) != heard; };
    if (patience_.look(rung)) return;
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    std::string failure;
    while (failure.empty() && !rung()) {
      patience_.sleep(&bell, heard);
      for (const Message *message : {&out, &in}) {
        if (!failure.empty() || message->over()) continue;
        Peer &peer = *message->peer;
        failure = why_not("rank " + std::to_string(peer.rank), peer.inbox.owner().closed, peer.process, start, timeout_);
      }
    }
    bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    // A rank may have done its part and ended since.
    if (!failure.empty() && !rung()) throw PeerFailure{failure};
  }

  const int32_t descriptor_;
  const int32_t rank_;
  const std::chrono::nanoseconds timeout_;
  Patience patience_;
  Inbox own_;
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

void all_gather(Segment &segment, const void *send, void *recv, const Blocks &received) {
  const int64_t bytes = received.bytes();
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(kSlotBytes, bytes - done);
    copy(segment.begin_turn(), at(send, done), size);
    segment.exchange();
    for (int32_t rank = 0; rank < segment.ranks(); ++rank) {
      const char *source = rank == segment.place() ? at(send, done) : segment.slot(rank);
      received.put(recv, rank, done, size, source);
    }
    done += size;
  }
}

void broadcast(Segment &segment, const void *send, void *recv, int64_t bytes, int32_t root) {
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(kSlotBytes, bytes - done);
    char *own = segment.begin_turn();
    if (segment.place() == root) copy(own, at(send, done), size);
    segment.exchange();
    if (segment.place() != root) copy(at(recv, done), segment.slot(root), size);
    done += size;
  }
  if (segment.place() == root && send != recv) copy(recv, send, bytes);
}

// A slot holds the same stretch of what each rank is to get.
int64_t stretch(const Segment &segment, int64_t element) { return kSlotBytes / element / segment.ranks(); }

void write_stretches(Segment &segment, const void *send, const Blocks &sent, int64_t done, int64_t size) {
  char *own = segment.begin_turn();
  for (int32_t rank = 0; rank < segment.ranks(); ++rank) sent.take(send, rank, done, size, own + rank * size);
  segment.exchange();
}

void reduce_scatter(Segment &segment, const void *send, void *recv, const Blocks &sent, int32_t dtype, int32_t op) {
  const int64_t element = hidet_dist_dtype_size(dtype);
  const int64_t bytes = sent.bytes();
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(stretch(segment, element) * element, bytes - done);
    write_stretches(segment, send, sent, done, size);
    reduce_slots(segment, segment.place() * size, at(recv, done), size / element, dtype, op);
    done += size;
  }
}

void all_to_all(Segment &segment, const void *send, const Blocks &sent, void *recv, const Blocks &received) {
  const int64_t bytes = sent.bytes();
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(stretch(segment, 1), bytes - done);
    write_stretches(segment, send, sent, done, size);
    for (int32_t rank = 0; rank < segment.ranks(); ++rank) {
      received.put(recv, rank, done, size, segment.slot(rank) + segment.place() * size);
    }
    done += size;
  }
}

}  // namespace

struct hidet_dist_shm {
 public:
  hidet_dist_shm(const hidet_dist_transport &fallback, hidet_dist_shm_connect connect,
                 hidet_dist_shm_connect connect_peer, int32_t rank, int32_t ranks, std::chrono::nanoseconds timeout)
      : fallback_(fallback),
        connect_(connect),
        connect_peer_(connect_peer),
        rank_(rank),
        ranks_(ranks),
        timeout_(timeout) {}

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
    if (found->second != nullptr) return guard([&] { shared(*found->second); });
    const int32_t status = guard(check_files);
    return status == HIDET_DIST_OK ? other(fallback_) : status;
  }

  int32_t send_recv(const void *send, int64_t send_count, int32_t to, void *recv, int64_t recv_count, int32_t from,
                    int32_t dtype) {
    // Pairs meet in the same order on all ranks, so that those of a ring do not wait for one another.
    int32_t first = to;
    int32_t second = from;
    if (pair_with(second) < pair_with(first)) std::swap(first, second);
    for (const int32_t rank : {first, second}) {
      if (rank == HIDET_DIST_NOBODY || peers_.find(rank) != peers_.end()) continue;
      const int32_t status = connect_peer_(rank);
      if (status != HIDET_DIST_OK) return status;
      if (peers_.find(rank) == peers_.end()) {
        fail("the process did not decide how ranks " + std::to_string(rank_) + " and " + std::to_string(rank) +
             " communicate");
        return HIDET_DIST_FAILED;
      }
    }
    const int64_t element = hidet_dist_dtype_size(dtype);
    const Message out{to == HIDET_DIST_NOBODY ? nullptr : peers_[to].get(), send_count * element};
    const Message in{from == HIDET_DIST_NOBODY ? nullptr : peers_[from].get(), recv_count * element};
    const bool sends_here = out.peer != nullptr;
    const bool receives_here = in.peer != nullptr;
    const bool sends_there = to != HIDET_DIST_NOBODY && !sends_here;
    const bool receives_there = from != HIDET_DIST_NOBODY && !receives_here;
    const auto here = [&] {
      return guard([&] { post_->exchange(send, sends_here ? out : Message{}, recv, receives_here ? in : Message{}); });
    };
    const auto there = [&] {
      if (const int32_t status = guard(check_files); status != HIDET_DIST_OK) return status;
      return fallback_.send_recv(fallback_.context, send, sends_there ? send_count : 0,
                                 sends_there ? to : HIDET_DIST_NOBODY, recv, receives_there ? recv_count : 0,
                                 receives_there ? from : HIDET_DIST_NOBODY, dtype);
    };
    if (!sends_there && !receives_there) return here();
    if (!sends_here && !receives_here) return there();
    // One direction each: neither may wait for the other.
    int32_t status = HIDET_DIST_FAILED;
    std::thread other([&, communicator = hidet_dist::current()] {
      hidet_dist_bind(communicator);
      status = there();
    });
    const int32_t own_status = here();
    other.join();
    return own_status != HIDET_DIST_OK ? own_status : status;
  }

  // This rank's inbox, made now or before.
  int32_t inbox() {
    if (post_ == nullptr) {
      const int32_t descriptor = new_file(Inbox::header(ranks_), inbox_bytes(ranks_));
      if (descriptor < 0) return -1;
      auto mapping = Mapping::of(descriptor, Inbox::header(ranks_), inbox_bytes(ranks_));
      if (mapping == nullptr) {
        ::close(descriptor);
        return -1;
      }
      post_ = std::make_unique<Post>(descriptor, std::move(mapping), rank_, ranks_, timeout_);
    }
    return post_->descriptor();
  }

  int32_t attach_peer(int32_t rank, int32_t descriptor) {
    if (rank < 0 || rank >= ranks_ || rank == rank_ || post_ == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
    auto mapping = Mapping::of(descriptor, Inbox::header(ranks_), inbox_bytes(ranks_));
    if (mapping == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
    peers_[rank] = std::make_unique<Peer>(rank, std::move(mapping), ranks_);
    return HIDET_DIST_OK;
  }

  void delegate_peer(int32_t rank) { peers_[rank] = nullptr; }

  int32_t attach(int32_t group, int32_t descriptor, int32_t place, int32_t ranks) {
    if (ranks < 2 || place < 0 || place >= ranks) return HIDET_DIST_INVALID_ARGUMENT;
    auto mapping = Mapping::of(descriptor, Header{kMagic, kSlotBytes, ranks}, segment_bytes(ranks));
    if (mapping == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
    groups_[group] = std::make_unique<Segment>(std::move(mapping), place, ranks, timeout_);
    return HIDET_DIST_OK;
  }

  void delegate(int32_t group) { groups_[group] = nullptr; }

  bool failed_by_peer() const { return failed_by_peer_.load(); }

  void close() {
    for (auto &[group, segment] : groups_) {
      if (segment != nullptr) segment->close();
    }
    if (post_ != nullptr) post_->close(peers_);
  }

 private:
  template <typename Exchange>
  int32_t guard(Exchange exchange) {
    try {
      exchange();
      return HIDET_DIST_OK;
    } catch (const PeerFailure &failure) {
      failed_by_peer_.store(true);
      fail(failure.message);
    } catch (const OwnFailure &failure) {
      fail(failure.message);
    } catch (const OutOfStep &) {
    }
    return HIDET_DIST_FAILED;
  }

  std::pair<int32_t, int32_t> pair_with(int32_t rank) const { return {std::min(rank, rank_), std::max(rank, rank_)}; }

  static void fail(const std::string &message) {
    if (auto *communicator = hidet_dist::current(); communicator != nullptr) communicator->fail(message);
  }

  const hidet_dist_transport fallback_;
  const hidet_dist_shm_connect connect_;
  const hidet_dist_shm_connect connect_peer_;
  const int32_t rank_;
  const int32_t ranks_;
  const std::chrono::nanoseconds timeout_;
  std::map<int32_t, std::unique_ptr<Segment>> groups_;
  std::unique_ptr<Post> post_;
  std::map<int32_t, std::unique_ptr<Peer>> peers_;
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

int64_t size_of(int32_t group) { return hidet_dist::current()->mesh().group_size(group); }

// Blocks of so many elements that lie one behind the other, for the ranks of a group.
Blocks behind(const Segment &segment, int64_t count, int32_t dtype) {
  return Blocks::behind(count, dtype, segment.ranks());
}

int32_t route_all_gather(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) {
  return transport_of(context).run(
      group, [&](Segment &segment) { all_gather(segment, send, recv, behind(segment, count, dtype)); },
      [&](const hidet_dist_transport &other) {
        return other.all_gather(other.context, send, recv, count, dtype, group);
      });
}

int32_t route_reduce_scatter(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                             int32_t group) {
  return transport_of(context).run(
      group,
      [&](Segment &segment) { reduce_scatter(segment, send, recv, behind(segment, count, dtype), dtype, op); },
      [&](const hidet_dist_transport &other) {
        return other.reduce_scatter(other.context, send, recv, count, dtype, op, group);
      });
}

int32_t route_all_to_all(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) {
  return transport_of(context).run(
      group,
      [&](Segment &segment) {
        const Blocks blocks = behind(segment, count, dtype);
        all_to_all(segment, send, blocks, recv, blocks);
      },
      [&](const hidet_dist_transport &other) {
        return other.all_to_all(other.context, send, recv, count, dtype, group);
      });
}

int32_t route_all_gather_blocks(void *context, const void *send, void *recv, const hidet_dist_blocks *received,
                                int32_t dtype, int32_t group) {
  return transport_of(context).run(
      group, [&](Segment &segment) { all_gather(segment, send, recv, Blocks::of(*received, dtype)); },
      [&](const hidet_dist_transport &other) {
        return hidet_dist::all_gather_blocks(other, size_of(group), send, recv, received, dtype, group);
      });
}

int32_t route_reduce_scatter_blocks(void *context, const void *send, void *recv, const hidet_dist_blocks *sent,
                                    int32_t dtype, int32_t op, int32_t group) {
  return transport_of(context).run(
      group, [&](Segment &segment) { reduce_scatter(segment, send, recv, Blocks::of(*sent, dtype), dtype, op); },
      [&](const hidet_dist_transport &other) {
        return hidet_dist::reduce_scatter_blocks(other, size_of(group), send, recv, sent, dtype, op, group);
      });
}

int32_t route_all_to_all_blocks(void *context, const void *send, const hidet_dist_blocks *sent, void *recv,
                                const hidet_dist_blocks *received, int32_t dtype, int32_t group) {
  return transport_of(context).run(
      group,
      [&](Segment &segment) {
        const hidet_dist_blocks &known = sent != nullptr ? *sent : *received;
        const Blocks plain = behind(segment, known.rows * known.row, dtype);
        all_to_all(segment, send, sent != nullptr ? Blocks::of(*sent, dtype) : plain, recv,
                   received != nullptr ? Blocks::of(*received, dtype) : plain);
      },
      [&](const hidet_dist_transport &other) {
        return hidet_dist::all_to_all_blocks(other, size_of(group), send, sent, recv, received, dtype, group);
      });
}

int32_t route_broadcast(void *context, const void *send, void *recv, int64_t count, int32_t dtype, int32_t root,
                        int32_t group) {
  return transport_of(context).run(
      group,
      [&](Segment &segment) { broadcast(segment, send, recv, count * hidet_dist_dtype_size(dtype), root); },
      [&](const hidet_dist_transport &other) {
        return other.broadcast(other.context, send, recv, count, dtype, root, group);
      });
}

int32_t route_send_recv(void *context, const void *send, int64_t send_count, int32_t to, void *recv,
                        int64_t recv_count, int32_t from, int32_t dtype) {
  return transport_of(context).send_recv(send, send_count, to, recv, recv_count, from, dtype);
}

}  // namespace

extern "C" {

hidet_dist_shm *hidet_dist_shm_create(const hidet_dist_transport *fallback, hidet_dist_shm_connect connect,
                                      hidet_dist_shm_connect connect_peer, int32_t rank, int32_t ranks,
                                      double timeout_seconds) {
  if (fallback == nullptr || connect == nullptr || connect_peer == nullptr || !(timeout_seconds > 0)) return nullptr;
  if (rank < 0 || rank >= ranks) return nullptr;
  const auto timeout = std::chrono::duration<double>(std::min(timeout_seconds, 1e9));
  return new hidet_dist_shm(*fallback, connect, connect_peer, rank, ranks,
                            std::chrono::duration_cast<std::chrono::nanoseconds>(timeout));
}

void hidet_dist_shm_table(hidet_dist_shm *transport, hidet_dist_transport *table) {
  *table = hidet_dist_transport{};
  table->context = transport;
  table->all_reduce = route_all_reduce;
  table->all_gather = route_all_gather;
  table->reduce_scatter = route_reduce_scatter;
  table->all_to_all = route_all_to_all;
  table->broadcast = route_broadcast;
  table->send_recv = route_send_recv;
  table->all_gather_blocks = route_all_gather_blocks;
  table->reduce_scatter_blocks = route_reduce_scatter_blocks;
  table->all_to_all_blocks = route_all_to_all_blocks;
}

int32_t hidet_dist_shm_segment(int32_t ranks) {
  return ranks < 2 ? -1 : new_file(Header{kMagic, kSlotBytes, ranks}, segment_bytes(ranks));
}

int32_t hidet_dist_shm_attach(hidet_dist_shm *transport, int32_t group, int32_t descriptor, int32_t place,
                              int32_t ranks) {
  return transport->attach(group, descriptor, place, ranks);
}

void hidet_dist_shm_delegate(hidet_dist_shm *transport, int32_t group) { transport->delegate(group); }

int32_t hidet_dist_shm_inbox(hidet_dist_shm *transport) { return transport->inbox(); }

int32_t hidet_dist_shm_attach_peer(hidet_dist_shm *transport, int32_t rank, int32_t descriptor) {
  return transport->attach_peer(rank, descriptor);
}

void hidet_dist_shm_delegate_peer(hidet_dist_shm *transport, int32_t rank) { transport->delegate_peer(rank); }

int32_t hidet_dist_shm_failed_by_peer(const hidet_dist_shm *transport) { return transport->failed_by_peer() ? 1 : 0; }

void hidet_dist_shm_close(hidet_dist_shm *transport) { transport->close(); }

void hidet_dist_shm_destroy(hidet_dist_shm *transport) { delete transport; }

}  // extern "C"
