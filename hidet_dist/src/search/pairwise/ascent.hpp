// The ascent of the bound: passes of messages alternate with steps of the prices of memory, along the excess of memory.
#pragma once

#include <functional>
#include <limits>
#include <vector>

#include "bounds.hpp"
#include "problem.hpp"

namespace hidet_dist::pairwise {

class Ascent {
 public:
  // Starts from duals, which may be empty.
  Ascent(const Problem &problem, const Duals &duals, double bound);

  // Makes one pass backwards and one forwards, and a step of the prices. `cutoff` is the cost of the best assignment
  // known; strategies that only worse ones take are removed.
  void step(double cutoff);

  // No assignment of at most the cutoff's cost costs less. The bound given to the constructor, or a better one.
  double bound() const { return bound_; }
  // The best bound of this ascent alone, which starts from nothing.
  double reached() const { return reached_; }
  // The prices of a byte at each program point that gave the best bound.
  const std::vector<double> &prices() const { return best_prices_; }
  Duals duals() const { return bounds_.duals(best_prices_); }
  // The weights of strategies in the fractional assignment that attains the last pass.
  const std::vector<double> &weights() {
    if (problem_.points == 0) bounds_.fractional_profile();
    return bounds_.weights();
  }
  // Messages and prices have hardly raised the bound for many steps, for this gap to the cutoff.
  bool stalled() const { return stalled_ >= kStalled; }
  const Bounds &bounds() const { return bounds_; }

 private:
  static constexpr int kStalled = 100;

  void take(double bound, double gap);
  void move_prices(double bound, double cutoff);
  double scale() const { return bound_ > 0 ? bound_ : least_scale_; }

  const Problem &problem_;
  Bounds bounds_;
  double least_scale_;
  double bound_, reached_;  // the best bound, and the best one of this ascent
  double noted_;  // the bound from which progress is counted
  int passes_ = 0, without_better_ = 0, stalled_ = 0;
  double step_;
  bool warm_;
  std::vector<double> direction_, best_prices_;
};

}  // namespace hidet_dist::pairwise
