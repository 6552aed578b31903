// The program points at which memory can bind. Most points of a production graph never exceed the limit, whatever is
// chosen, or hold at most the bytes of another point; without them memory takes less time, and more strategies are
// dominated.
#pragma once

#include <vector>

#include "problem.hpp"

namespace hidet_dist::pairwise {

// The bytes that a node holds at the program points from `begin` up to, not including, `end`, one per strategy.
struct Hold {
  int begin, end;
  std::vector<double> bytes;
};

// Replaces the holds of a problem by those given for each node, joined where they have the same points or follow one
// another.
void set_holds(Problem &problem, std::vector<std::vector<Hold>> holds);

// Removes program points that cannot bind, because all assignments fit there or because another point holds as many
// bytes in every assignment. The price of a removed point is added to that of the point that stands for it. Returns
// whether any was removed.
bool remove_points(Problem &problem, std::vector<double> &prices);

}  // namespace hidet_dist::pairwise
