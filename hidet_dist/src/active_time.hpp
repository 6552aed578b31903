// The time that a rank has waited for others, for time-outs.
#pragma once

#include <algorithm>
#include <chrono>

#include "transport.hpp"

namespace hidet_dist {

// The time since this was made, without that in which this process was stopped: ranks that stop together, as their
// machine does, cannot answer one another meanwhile, and none of them is to blame. As `ActiveTime` in liveness.py.
class ActiveTime {
 public:
  // The caller looks more often than once in kMostOfALook, also where it has to wait for a processor.
  Clock::duration so_far() {
    const auto now = Clock::now();
    time_ += std::min<Clock::duration>(now - last_, kMostOfALook);
    last_ = now;
    return time_;
  }

 private:
  static constexpr auto kMostOfALook = std::chrono::milliseconds(200);

  Clock::time_point last_ = Clock::now();
  Clock::duration time_{};
};

}  // namespace hidet_dist
