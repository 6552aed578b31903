// The bytes held at every program point, and their peak: a segment tree of additions to ranges.
#pragma once

#include <algorithm>
#include <vector>

#include "problem.hpp"

namespace hidet_dist::pairwise {

class Memory {
 public:
  Memory(const Problem &problem, const std::vector<int> &assignment) {
    while (leaves_ < problem.points) leaves_ *= 2;
    most_.assign(2 * static_cast<std::size_t>(leaves_), 0.0);
    added_.assign(2 * static_cast<std::size_t>(leaves_), 0.0);
    for (int v = 0; v < problem.nodes; ++v)
      add(problem.begin[v], problem.end[v], problem.bytes[problem.strategy_begin[v] + assignment[v]]);
  }

  // Adds bytes to the points from `begin` to `end`, exclusively.
  void add(int begin, int end, double bytes) {
    if (begin < end && bytes != 0) add(1, 0, leaves_, begin, end, bytes);
  }

  double peak() const { return most_[1]; }

 private:
  void add(int node, int from, int to, int begin, int end, double bytes) {
    if (begin <= from && to <= end) {
      most_[node] += bytes;
      added_[node] += bytes;
      return;
    }
    const int middle = (from + to) / 2;
    if (begin < middle) add(2 * node, from, middle, begin, end, bytes);
    if (end > middle) add(2 * node + 1, middle, to, begin, end, bytes);
    most_[node] = std::max(most_[2 * node], most_[2 * node + 1]) + added_[node];
  }

  int leaves_ = 1;
  std::vector<double> most_, added_;
};

// The bytes held at every program point, in one pass.
inline std::vector<double> profile(const Problem &problem, const std::vector<int> &assignment) {
  std::vector<double> held(static_cast<std::size_t>(problem.points) + 1, 0.0);
  for (int v = 0; v < problem.nodes; ++v) {
    const double bytes = problem.bytes[problem.strategy_begin[v] + assignment[v]];
    held[problem.begin[v]] += bytes;
    held[problem.end[v]] -= bytes;
  }
  for (int t = 1; t < problem.points; ++t) held[t] += held[t - 1];
  held.resize(static_cast<std::size_t>(problem.points));
  return held;
}

}  // namespace hidet_dist::pairwise
