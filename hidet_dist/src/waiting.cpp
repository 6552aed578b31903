#include "waiting.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <utility>

namespace {

using hidet_dist::Clock;
using hidet_dist::Counter;

constexpr auto kLookAround = std::chrono::milliseconds(20);  // how often sleepers check for ended processes

long futex(std::atomic<uint32_t> *word, int operation, uint32_t value, const timespec *timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), operation, value, timeout, nullptr, 0);
}

void wake_sleepers(Counter *counter) {
  if (counter->sleepers.load(std::memory_order_seq_cst) == 0) return;
  counter->called.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  futex(&counter->value, FUTEX_WAKE, INT_MAX, nullptr);
}

bool has_core_each(int32_t ranks) {
  cpu_set_t cpus;
  return sched_getaffinity(0, sizeof cpus, &cpus) == 0 && CPU_COUNT(&cpus) >= ranks;
}

}  // namespace

namespace hidet_dist {

void advance(Counter *counter, uint32_t value) {
  counter->value.store(value, std::memory_order_seq_cst);
  wake_sleepers(counter);  // either the sleeper is seen there, or it sees the new value before it falls asleep
}

void ring(Counter *bell) {
  bell->value.fetch_add(1, std::memory_order_seq_cst);
  wake_sleepers(bell);
}

void wake_all(Counter *counter) { futex(&counter->value, FUTEX_WAKE, INT_MAX, nullptr); }

bool reached(const Counter &counter, uint32_t value) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - value) >= 0;
}

Process::Process(int32_t number) {
  if (number == getpid()) return;  // ranks may be threads of one process
  descriptor_ = static_cast<int>(syscall(SYS_pidfd_open, number, 0));
  gone_ = descriptor_ < 0 && errno == ESRCH;
}

Process::Process(Process &&other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)), gone_(other.gone_) {}

Process::~Process() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool Process::ended() const {
  if (gone_ || descriptor_ < 0) return gone_;
  pollfd entry{descriptor_, POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

std::string why_not(const std::string &who, const std::atomic<uint32_t> &closed, const Process &process,
                    ActiveTime *waited, std::chrono::nanoseconds timeout) {
  if (failed_meanwhile()) return "the communicator failed meanwhile";
  if (closed.load(std::memory_order_seq_cst) != 0) return who + " has closed its end";
  if (process.ended()) return "the process of " + who + " has ended";
  if (waited->so_far() > timeout) return "timed out after " + in_seconds(timeout) + ", waiting for " + who;
  return "";
}

Patience::Patience(int32_t ranks) : spins_(has_core_each(ranks)) {}

void Patience::sleep(Counter *counter, uint32_t value) {
  const timespec pause{0, std::chrono::nanoseconds(kLookAround).count()};
  if (futex(&counter->value, FUTEX_WAIT, value, &pause) != 0) return;
  const auto called = Clock::time_point(Clock::duration(counter->called.load(std::memory_order_relaxed)));
  const auto took = std::clamp<Clock::duration>(Clock::now() - called, kLeastSpin, kMostSpin);
  spin_ += (took - spin_) / 8;
}

}  // namespace hidet_dist
