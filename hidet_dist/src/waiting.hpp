// Waiting for counters that other processes increase in shared memory.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "active_time.hpp"
#include "transport.hpp"

namespace hidet_dist {

constexpr size_t kLine = 64;  // bytes of a cache line

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a futex is a plain 32-bit word");

// A counter that other processes wait for. It wraps around: only differences matter.
struct alignas(kLine) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
  std::atomic<int64_t> called;  // the last time when sleepers were woken, in the clock's ticks
};

// Sets the counter, and wakes all that wait for it.
void advance(Counter *counter, uint32_t value);

// Increments the counter, and wakes all that wait for it.
void ring(Counter *bell);

// Wakes all that wait without changing the counter, so that they check for failures.
void wake_all(Counter *counter);

bool reached(const Counter &counter, uint32_t value);

// Detects the end of a process, whose number the system may reuse.
class Process {
 public:
  explicit Process(int32_t number);
  Process(Process &&other) noexcept;
  Process(const Process &) = delete;
  Process &operator=(const Process &) = delete;
  ~Process();

  bool ended() const;

 private:
  int descriptor_ = -1;
  bool gone_ = false;
};

// The reason why waiting for a rank is useless, or an empty string. To be called between short sleeps.
std::string why_not(const std::string &who, const std::atomic<uint32_t> &closed, const Process &process,
                    ActiveTime *waited, std::chrono::nanoseconds timeout);

// The waiting strategy of one thread. It spins for as long as being woken takes before it sleeps, so that a wait costs
// at most twice its cost if its length were known (A. Karlin et al., "Empirical studies of competitive spinning for a
// shared-memory multiprocessor", SOSP 1991). The time of being woken depends on the host, from some microseconds to
// tens of them, and is measured at each wake.
class Patience {
 public:
  // If ranks share cores, a waiting thread releases its core at once.
  explicit Patience(int32_t ranks);

  // Spins; returns whether the condition becomes true meanwhile.
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

  // Sleeps for a while, or until the counter differs from this value.
  void sleep(Counter *counter, uint32_t value);

 private:
  // The time of spinning: as long as being woken took before, within these bounds.
  static constexpr auto kLeastSpin = std::chrono::microseconds(5);
  static constexpr auto kMostSpin = std::chrono::microseconds(40);

  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const bool spins_;
  Clock::duration spin_ = kLeastSpin;
};

}  // namespace hidet_dist
