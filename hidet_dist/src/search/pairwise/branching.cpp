#include "branching.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "ascent.hpp"
#include "merge.hpp"

namespace hidet_dist::pairwise {

namespace {

constexpr int kLeastSteps = 10, kMostSteps = 200;  // of the bound of a part
constexpr int kWindow = 10;                        // steps over which progress is looked at
constexpr double kLeastProgress = 0.02;            // of the bound in a window, as a part of the gap, to go on
constexpr double kMostRemoved = 0.2;               // of the strategies, until the part is merged anew
constexpr double kVariance = 1e-4;                 // of priced bytes, as a part of the squared gap, that matters
constexpr double kMostStored = 1e9;                // bytes of open parts, until late ones come first
constexpr double kSure = 0.999;                    // weights above are not fractional

// Divides the strategies of one node: 1 for those of one side, 2 for those of the other, 0 for other nodes'. Where the
// fractional assignment mixes strategies that hold different bytes, the node whose priced bytes vary most is divided at
// their mean; otherwise one that is undecided and has many edges, into its best strategy and the others.
std::vector<char> divide(const Problem &problem, Ascent &ascent, double gap) {
  const std::vector<double> &prices = ascent.prices(), &weights = ascent.weights();
  const std::vector<char> &removed = ascent.bounds().removed();
  std::vector<double> sums(static_cast<std::size_t>(problem.points) + 1, 0.0), priced(problem.cost.size(), 0.0);
  for (int t = 0; t < problem.points; ++t) sums[t + 1] = sums[t] + prices[t];
  int by_bytes = -1, by_weight = -1;
  double most_variance = 0, most_undecided = -1, mean_there = 0;
  for (int v = 0; v < problem.nodes; ++v) {
    const int begin = problem.strategy_begin[v], end = problem.strategy_begin[v + 1];
    problem.add_priced(v, sums, &priced[begin]);
    double greatest = 0, mean = 0, square = 0, low = priced[begin], high = priced[begin];
    int left = 0;
    for (int s = begin; s < end; ++s) {
      const double weight = weights[s];
      greatest = std::max(greatest, weight);
      mean += weight * priced[s];
      square += weight * priced[s] * priced[s];
      if (removed[s]) continue;
      low = left == 0 ? priced[s] : std::min(low, priced[s]);
      high = left == 0 ? priced[s] : std::max(high, priced[s]);
      ++left;
    }
    if (left < 2) continue;
    if (square - mean * mean > most_variance && low <= mean && high > mean) {
      most_variance = square - mean * mean;
      mean_there = mean;
      by_bytes = v;
    }
    const double score = std::max(1 - greatest, 1 - kSure) * (1 + problem.degree(v));
    if (score > most_undecided) most_undecided = score, by_weight = v;
  }
  std::vector<char> side(problem.cost.size(), 0);
  const bool memory_binds = most_variance > kVariance * (gap * gap);
  const int node = memory_binds ? by_bytes : by_weight;
  const int begin = problem.strategy_begin[node], end = problem.strategy_begin[node + 1];
  int best = begin;
  for (int s = begin; s < end; ++s)
    if (!removed[s] && (removed[best] || weights[s] > weights[best])) best = s;
  for (int s = begin; s < end; ++s) side[s] = memory_binds ? (priced[s] <= mean_there ? 1 : 2) : (s == best ? 1 : 2);
  return side;
}

// The bytes that a part takes, about half of its problem's: two parts share it.
double bytes_of(const Problem *problem) {
  const std::size_t doubles = problem->entries.size() + problem->bytes.size() + problem->cost.size() +
                              problem->choice_begin.size() + 2 * problem->base_bytes.size();
  const std::size_t ints = problem->choices.size() + 4 * problem->cost.size() + problem->part_of.size();
  return static_cast<double>(doubles * sizeof(double) + ints * sizeof(int)) / 2;
}

}  // namespace

Branching::Branching(const Problem &problem, Duals duals, double bound) {
  push(
      {bound, std::make_shared<const Problem>(problem.rebased()), std::make_shared<const Duals>(std::move(duals)), {}});
}

void Branching::push(Part part) {
  const std::lock_guard lock(mutex_);
  stored_ += bytes_of(part.problem.get());
  open_.push_back(std::move(part));
  std::push_heap(open_.begin(), open_.end());
}

Branching::Part Branching::pop() {
  // Where memory is short, a late part, whose own parts are the smallest and fewest, instead of that of least bound.
  if (stored_ < kMostStored) std::pop_heap(open_.begin(), open_.end());
  Part part = std::move(open_.back());
  open_.pop_back();
  stored_ -= bytes_of(part.problem.get());
  return part;
}

void Branching::step(double cutoff, const std::function<bool()> &stop) {
  std::unique_lock lock(mutex_);
  if (!best_.empty()) cutoff = std::min(cutoff, best_cost_);
  if (open_.empty()) return;
  Part part = pop();
  lock.unlock();
  treat(std::move(part), cutoff, stop);
}

void Branching::treat(Part part, double cutoff, const std::function<bool()> &stop) {
  if (part.bound >= cutoff) return;
  std::shared_ptr<const Problem> problem = part.problem;
  Duals duals = *part.duals;
  double bound = part.bound;
  std::vector<char> removed = std::move(part.removed);
  for (bool merge_anew = !removed.empty();;) {
    if (merge_anew) {
      auto made = std::make_shared<Problem>();
      if (!without(*problem, removed, *made, duals)) return;
      problem = std::move(made);
      removed.assign(problem->cost.size(), 0);
    }
    if (problem->nodes == 0) {
      const std::lock_guard lock(mutex_);
      if (problem->base_cost < cutoff && (best_.empty() || problem->base_cost < best_cost_)) {
        best_ = problem->given_strategies({});
        best_cost_ = problem->base_cost;
      }
      return;
    }
    Ascent ascent(*problem, duals, bound);
    double before = -std::numeric_limits<double>::infinity();
    for (int step = 1; step <= kMostSteps; ++step) {
      if (stop()) return push({bound, problem, std::make_shared<const Duals>(duals), removed});
      ascent.step(cutoff);
      if (ascent.bound() >= cutoff) return;
      if (ascent.bounds().removals() > kMostRemoved * static_cast<double>(problem->cost.size())) break;
      if (step % kWindow != 0 || step < kLeastSteps) continue;
      if (ascent.reached() < before + kLeastProgress * (cutoff - ascent.reached())) break;
      before = ascent.reached();
    }
    bound = ascent.bound();
    duals = ascent.duals();
    removed = ascent.bounds().removed();
    merge_anew = ascent.bounds().removals() > kMostRemoved * static_cast<double>(problem->cost.size());
    if (merge_anew) continue;
    {
      const std::lock_guard lock(mutex_);
      rounded_ = problem->given_strategies(ascent.bounds().rounded());
    }
    const auto shared_duals = std::make_shared<const Duals>(std::move(duals));
    const std::vector<char> chosen = divide(*problem, ascent, cutoff - bound);
    for (const int side : {0, 1}) {
      Part half{bound, problem, shared_duals, removed};
      for (std::size_t s = 0; s < chosen.size(); ++s)
        if (chosen[s] == 1 + side) half.removed[s] = 1;
      push(std::move(half));
    }
    return;
  }
}

}  // namespace hidet_dist::pairwise
