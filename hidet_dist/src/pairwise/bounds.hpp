// Lower bounds: memory is priced at every program point, and the remaining problem, without a limit, is bounded by
// sequential message passing between nodes and edges (TRW-S; V. Kolmogorov, "Convergent tree-reweighted message passing
// for energy minimization", PAMI 28(10), 2006, in the form of his SRMP, PAMI 37(5), 2015). A pass takes time linear in
// the entries of all matrices, and the bound never falls as long as the prices stay.
#pragma once

#include <vector>

#include "problem.hpp"

namespace hidet_dist::pairwise {

class Bounds {
 public:
  explicit Bounds(const Problem &problem);

  // Makes one pass over the nodes, forwards or backwards. Returns a lower bound on all assignments that fit the limit.
  // A forward pass also rounds: it gives each node in turn the strategy that is best with those before it.
  double pass(bool forward);

  // The bytes held at each program point in the fractional assignment that attains the last pass, which must have been
  // forwards. Less the limit, they are a supergradient of that pass's bound in the prices.
  std::vector<double> fractional_profile();

  // Prices of a byte at each program point, 0 or more.
  void set_prices(const std::vector<double> &prices);

  const std::vector<double> &prices() const { return prices_; }
  const std::vector<int> &rounded() const { return rounded_; }

 private:
  void least_of_edge(int edge, bool to_first, double *least) const;

  const Problem &problem_;
  std::vector<double> node_;  // the remaining cost of each strategy, with its priced bytes
  std::vector<int> to_first_, to_second_;  // the begin of each edge's messages
  std::vector<double> first_, second_;  // the costs moved into each edge from the strategies of its nodes
  std::vector<double> prices_;
  double constant_ = 0;  // the cost, with priced bytes, of what has no choice, less the limit's bytes at all prices
  std::vector<int> rounded_;
  std::vector<double> least_, conditioned_;
  std::vector<int> best_;  // of each node, the strategy of least cost in the last pass forwards
  std::vector<double> stayed_, part_;  // the parts of its cost that stayed, and were moved to each later edge, there
  std::vector<double> weight_;  // of each strategy in the fractional assignment
};

}  // namespace hidet_dist::pairwise
