// Moves of a few nodes that share memory or an edge: all combinations of their strategies are compared, so that one
// node can take the bytes that others give up.
#pragma once

#include <random>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "problem.hpp"

namespace hidet_dist::pairwise {

class Trade {
 public:
  explicit Trade(const Problem &problem);

  // Tries a trade around a random node. If one costs less and fits the limit, applies it to both the assignment and its
  // memory. Returns by how much the cost changes: 0 or less.
  double attempt(std::vector<int> &assignment, Memory &memory, std::mt19937_64 &random);

 private:
  void choose(std::mt19937_64 &random);
  int beside(int node, std::mt19937_64 &random) const;
  void compare(const std::vector<int> &assignment);
  void change_bytes(const std::vector<int> &assignment, std::int64_t combination, bool back, Memory &memory) const;

  const Problem &problem_;
  std::vector<std::pair<int, int>> by_begin_;  // holds and their nodes, by where they begin
  std::vector<int> chosen_;
  std::vector<std::pair<double, std::int64_t>> better_;  // combinations that cost less, and by how much
  std::vector<double> sums_, next_;
};

}  // namespace hidet_dist::pairwise
