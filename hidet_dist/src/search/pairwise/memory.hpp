// The bytes held at every program point, and their peak.
#pragma once

#include <algorithm>
#include <vector>

#include "problem.hpp"

namespace hidet_dist::pairwise {

// The bytes held at every program point, in one pass.
inline std::vector<double> profile(const Problem &problem, const std::vector<int> &assignment) {
  std::vector<double> held(static_cast<std::size_t>(problem.points) + 1, 0.0);
  for (int v = 0; v < problem.nodes; ++v)
    for (int h = problem.hold_begin[v]; h < problem.hold_begin[v + 1]; ++h) {
      const double bytes = problem.bytes[problem.held[h] + assignment[v]];
      held[problem.begin[h]] += bytes;
      held[problem.end[h]] -= bytes;
    }
  for (int t = 1; t < problem.points; ++t) held[t] += held[t - 1];
  held.resize(static_cast<std::size_t>(problem.points));
  for (int t = 0; t < problem.points; ++t) held[t] += problem.base_bytes[t];
  return held;
}

// A segment tree of additions to ranges.
class Memory {
 public:
  Memory(const Problem &problem, const std::vector<int> &assignment) : Memory(problem, profile(problem, assignment)) {}

  // Of the bytes held at each point.
  Memory(const Problem &problem, const std::vector<double> &held) {
    while (leaves_ < problem.points) leaves_ *= 2;
    most_.assign(2 * static_cast<std::size_t>(leaves_), 0.0);
    added_.assign(2 * static_cast<std::size_t>(leaves_), 0.0);
    std::copy(held.begin(), held.end(), most_.begin() + leaves_);
    for (int node = leaves_ - 1; node > 0; --node) most_[node] = std::max(most_[2 * node], most_[2 * node + 1]);
  }

  // Changes the bytes of a node from those of one strategy to those of another.
  void change(const Problem &problem, int node, int from, int to) {
    for (int h = problem.hold_begin[node]; h < problem.hold_begin[node + 1]; ++h)
      add(problem.begin[h], problem.end[h],
          problem.bytes[problem.held[h] + to] - problem.bytes[problem.held[h] + from]);
  }

  // Adds the bytes of a node's strategy so many times.
  void add(const Problem &problem, int node, int strategy, double times) {
    for (int h = problem.hold_begin[node]; h < problem.hold_begin[node + 1]; ++h)
      add(problem.begin[h], problem.end[h], times * problem.bytes[problem.held[h] + strategy]);
  }

  double peak() const { return most_[1]; }

 private:
  // Adds bytes to the points from `begin` to `end`, exclusively.
  void add(int begin, int end, double bytes) {
    if (begin < end && bytes != 0) add(1, 0, leaves_, begin, end, bytes);
  }

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

}  // namespace hidet_dist::pairwise
