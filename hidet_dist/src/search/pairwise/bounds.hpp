// Lower bounds: memory is priced at every program point, and the remaining problem, without a limit, is bounded by
// sequential message passing between nodes and edges (TRW-S; V. Kolmogorov, "Convergent tree-reweighted message passing
// for energy minimization", PAMI 28(10), 2006, in the form of his SRMP, PAMI 37(5), 2015). A pass takes time linear in
// the entries of all matrices, and the bound never falls as long as the prices stay.
#pragma once

#include <limits>
#include <vector>

#include "problem.hpp"

namespace hidet_dist::pairwise {

class Bounds {
 public:
  // Starts from the duals given: no prices and messages for empty ones.
  Bounds(const Problem &problem, const Duals &duals);

  // Makes one pass over the nodes, forwards or backwards. Returns a lower bound on all assignments that fit the limit.
  // A forward pass also rounds: it gives each node in turn the strategy that is best with those before it.
  double pass(bool forward);

  // In the next pass, removes strategies that raise the bound by more than `slack`. The bound before it, with the same
  // prices, plus the slack must be above the cost of an assignment that is known.
  void set_slack(double slack) { slack_ = slack; }
  // Whether each strategy has been removed, and how many have.
  const std::vector<char> &removed() const { return removed_; }
  int removals() const { return removals_; }

  // The strategies' costs, messages included, beside those of the best of their node in the last pass.
  const std::vector<double> &surplus() const { return surplus_; }
  // The weights of strategies in the fractional assignment that attains the last pass, after fractional_profile.
  const std::vector<double> &weights() const { return weight_; }

  // The bytes held at each program point in the fractional assignment that attains the last pass, which must have been
  // forwards. Less the limit, they are a supergradient of that pass's bound in the prices.
  std::vector<double> fractional_profile();

  // Prices of a byte at each program point, 0 or more.
  void set_prices(const std::vector<double> &prices);

  const std::vector<double> &prices() const { return prices_; }
  // The last messages, with prices that may be other ones.
  Duals duals(const std::vector<double> &prices) const { return {prices, first_, second_}; }
  const std::vector<int> &rounded() const { return rounded_; }

 private:
  void least_of_edge(int edge, bool to_first, double *least) const;

  const Problem &problem_;
  std::vector<double> node_;  // the remaining cost of each strategy, with its priced bytes
  std::vector<int> to_first_, to_second_;  // the begin of each edge's messages
  std::vector<double> first_, second_;  // the costs moved into each edge from the strategies of its nodes
  std::vector<double> prices_;
  double constant_ = 0;  // the cost, with priced bytes, of what has no choice, less the limit's bytes at all prices
  double slack_ = std::numeric_limits<double>::max();
  std::vector<char> removed_;
  int removals_ = 0;
  std::vector<double> surplus_;
  std::vector<int> rounded_;
  std::vector<double> least_, conditioned_;
  std::vector<int> best_;  // of each node, the strategy of least cost in the last pass forwards
  std::vector<double> stayed_, part_;  // the parts of its cost that stayed, and were moved to each later edge, there
  std::vector<double> weight_;  // of each strategy in the fractional assignment
};

}  // namespace hidet_dist::pairwise
