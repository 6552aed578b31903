// A communicator's record of the collectives that were started and not yet waited for.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "hidet_dist/overlap.h"

namespace hidet_dist {

struct Overlap {
  hidet_dist_overlap table{};
  bool present = false;
  int64_t started = 0;
  int64_t waited = 0;
  int64_t passed = 0;  // the last ticket that was waited for: those up to it have ended
  std::unordered_map<const void *, int64_t> tickets;
};

}  // namespace hidet_dist
