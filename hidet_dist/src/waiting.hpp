// How a thread waits for counts that other processes put up in memory that they share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "transport.hpp"

namespace hidet_dist {

constexpr size_t kLine = 64;  // bytes of a cache line

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a futex is a plain 32-bit word");

// A count that goes up, and that others wait for. Counts wrap around: only differences matter.
struct alignas(kLine) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
  std::atomic<int64_t> called;  // when sleepers were woken last, in the clock's ticks
};

// Sets the count, and wakes whoever waits for it.
void advance(Counter *counter, uint32_t value);

// Adds one, and wakes whoever waits.
void ring(Counter *bell);

// Wakes whoever waits, so that it looks around, without a new count.
void wake_all(Counter *counter);

bool reached(const Counter &counter, uint32_t value);

// Tells when a process ends; its number alone may be given to another one.
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

// Why there is no use in waiting for a rank any longer, or an empty string.
std::string why_not(const std::string &who, const std::atomic<uint32_t> &closed, const Process &process,
                    Clock::time_point start, std::chrono::nanoseconds timeout);

// How one thread waits for counts. It looks for as long as being woken takes before it falls asleep, so that a wait
// takes at most twice the time that it would if its length were known (A. Karlin et al., "Empirical studies of
// competitive spinning for a shared-memory multiprocessor", SOSP 1991). What being woken takes depends on the host,
// between some microseconds and tens of them, and is measured each time.
class Patience {
 public:
  // Where the ranks share cores, whoever waits lets go of its core at once.
  explicit Patience(int32_t ranks);

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
  void sleep(Counter *counter, uint32_t value);

 private:
  // As long as it took to be woken before, within these bounds.
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
