#include "ascent.hpp"

#include <algorithm>
#include <cmath>

namespace hidet_dist::pairwise {

namespace {

// Counts and ratios, tuned on the contest's instances; no bound's validity depends on them.
constexpr int kPassesBeforePrices = 10;  // passes until messages are meaningful for memory
constexpr double kFirstStep = 0.1, kMostStep = 0.5, kLeastStep = 1e-6;  // of the prices, as parts of Polyak's step
constexpr double kStepGrowth = 1.05, kStepCut = 0.5;
constexpr int kPatience = 20;             // passes without a better bound until the step is cut
constexpr double kAveraging = 0.3;        // weight of the last pass in the direction of the prices
constexpr double kAssumedGap = 0.1;  // the greatest gap to the cost of an assignment that steps of the prices assume
constexpr double kLeastGap = 1e-3;  // the least gap that steps of the prices assume
constexpr double kLeastProgress = 0.01;  // of the bound, as a part of the gap, that counts as one
constexpr double kRounding = 1e-9;  // relative, of bounds: they are sums of many terms

}  // namespace

Ascent::Ascent(const Problem &problem, const Duals &duals, double bound)
    : problem_(problem),
      bounds_(problem, duals),
      least_scale_(kLeastGap * problem.big),
      bound_(bound),
      reached_(-std::numeric_limits<double>::infinity()),
      noted_(-std::numeric_limits<double>::infinity()),
      step_(kFirstStep),
      warm_(!duals.prices.empty()),
      direction_(static_cast<std::size_t>(problem.points), 0.0),
      best_prices_(bounds_.prices()) {}

void Ascent::step(double cutoff) {
  const double backward = bounds_.pass(false);
  const double slack = cutoff - backward * (1 - kRounding) + kRounding * std::abs(cutoff);
  bounds_.set_slack(std::clamp(slack, 0.0, std::numeric_limits<double>::max()));
  const double bound = bounds_.pass(true);
  ++passes_;
  take(std::max(backward, bound), cutoff - bound_);
  if (problem_.points > 0 && (warm_ || passes_ >= kPassesBeforePrices)) move_prices(bound, cutoff);
}

void Ascent::take(double bound, double gap) {
  bound *= 1 - kRounding;
  ++stalled_;
  if (bound > reached_) {
    if (bound > reached_ + kLeastStep * scale()) {
      without_better_ = 0;
      step_ = std::min(kMostStep, step_ * kStepGrowth);
    }
    reached_ = bound;
    best_prices_ = bounds_.prices();
  }
  bound_ = std::max(bound_, reached_);
  if (bound_ > noted_ + kLeastProgress * (std::isfinite(gap) ? gap : kAssumedGap * scale())) {
    noted_ = bound_;
    stalled_ = 0;
  }
}

void Ascent::move_prices(double bound, double cutoff) {
  const std::vector<double> held = bounds_.fractional_profile();
  if (++without_better_ > kPatience) {
    without_better_ = 0;
    step_ = std::max(kLeastStep, step_ * kStepCut);
    std::fill(direction_.begin(), direction_.end(), 0.0);
    bounds_.set_prices(best_prices_);
    return;
  }
  double square = 0;
  for (int t = 0; t < problem_.points; ++t) {
    direction_[t] += kAveraging * (held[t] - problem_.byte_limit - direction_[t]);
    if (direction_[t] > 0 || bounds_.prices()[t] > 0) square += direction_[t] * direction_[t];
  }
  if (square == 0) return;
  const double target = std::min(cutoff, bound_ + kAssumedGap * scale());
  const double step = step_ * std::max(target - bound, kLeastGap * scale()) / square;
  std::vector<double> prices(bounds_.prices());
  for (int t = 0; t < problem_.points; ++t) prices[t] = std::max(0.0, prices[t] + step * direction_[t]);
  bounds_.set_prices(prices);
}

}  // namespace hidet_dist::pairwise
