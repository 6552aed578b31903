// Moves of many nodes at once: a set of nodes that induces a forest is given its best strategies, the others staying as
// they are, by dynamic programming from the leaves to the roots.
#pragma once

#include <random>
#include <vector>

#include "problem.hpp"

namespace hidet_dist::pairwise {

class Forest {
 public:
  explicit Forest(const Problem &problem);

  // Chooses nearly all nodes that fit into a forest, in random order (sometimes nodes of many edges first).
  void grow_all(std::mt19937_64 &random);
  // Chooses up to `most` nodes around one, breadth first or at random.
  void grow_around(int seed, int most, bool at_random, std::mt19937_64 &random);

  // Finds the best strategies of the nodes for costs with priced bytes. `price_sums[t]` is the sum of the prices of the
  // program points before t. False if they equal those of the assignment.
  bool solve(const std::vector<int> &assignment, const std::vector<double> &price_sums);

  // The change of the assignment's cost, without prices, with the best strategies.
  double change(const std::vector<int> &assignment) const;

  const std::vector<int> &nodes() const { return order_; }
  int strategy(int k) const { return best_[k]; }  // of nodes()[k]

 private:
  bool join(int node);
  int root(int node);
  void set_order();

  const Problem &problem_;
  std::vector<int> members_;
  std::vector<unsigned> member_, seen_, counted_;  // stamps: of the nodes in the forest, met, and counted as a root
  unsigned stamp_ = 0, counting_ = 0;
  std::vector<int> tree_;  // union-find over the trees of the forest
  std::vector<int> roots_, queue_;
  std::vector<int> order_;  // the forest's nodes, parents first
  std::vector<int> parent_, parent_edge_, place_;
  std::vector<std::size_t> value_begin_, choice_begin_;
  std::vector<double> values_;
  std::vector<int> choices_, best_;
};

}  // namespace hidet_dist::pairwise
