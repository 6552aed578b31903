// The search for an assignment, alternating with the search for a bound. Each round
//   1. improves the bound, by passes of messages and steps of the prices along the excess of memory (a subgradient),
// 2. takes the assignment that the last pass rounded to, and descends: random induced forests over nearly all nodes are
//      solved exactly for costs with priced memory; where memory does not fit, its prices rise until it does,
//   3. polishes the best assignment known, by forests of few nodes that keep within the limit.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <exception>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "../communicator.hpp"
#include "bounds.hpp"
#include "forest.hpp"
#include "memory.hpp"
#include "problem.hpp"
#include "trade.hpp"

namespace hidet_dist::pairwise {

namespace {

// All of these are counts and ratios of the search, tuned on the contest's instances; no cost depends on them.
constexpr int kPassesPerRound = 25;  // forwards and backwards
constexpr int kPassesBeforePrices = 10;  // passes until messages are meaningful for memory
constexpr double kFirstStep = 0.1, kMostStep = 0.5, kLeastStep = 1e-6;  // of the prices, as parts of Polyak's step
constexpr double kStepGrowth = 1.05, kStepCut = 0.5;
constexpr int kPatience = 20;  // passes without a better bound until the step is cut
constexpr double kAveraging = 0.3;  // weight of the last pass in the direction of the prices
constexpr double kAssumedGap = 0.1;  // the gap to the cost of an assignment, as long as none is known
constexpr double kLeastGap = 1e-3;  // the least gap that steps of the prices assume
constexpr int kStaleForests = 10;  // without an improvement until a descent ends, or raises prices
constexpr int kStaleAfterRise = 3;  // forests tried after each rise
constexpr int kMostRises = 200;
constexpr double kRise = 0.05, kRiseGrowth = 1.1;  // of the prices of memory that does not fit
constexpr double kNoImprovement = 1e-5;  // less, relative to the bound, does not count
constexpr int kNodesPerMove = 8;  // a round tries a move for so many nodes
constexpr int kLeastMoves = 500;
constexpr int kMovesPerPrice = 200;
constexpr int kForestsPerTrade = 3;  // one move in so many is a trade
constexpr double kPriceScales[] = {0.0, 0.5, 0.8, 1.0, 1.25, 2.0};
constexpr int kLeastForest = 5, kForestDoublings = 8;  // sizes of forests of few nodes: 5, 10, ... 640
constexpr int kRepairs = 2000;  // moves around forbidden pairs, in one descent
constexpr double kRounding = 1e-9;  // relative, of bounds: they are sums of many terms

// The seconds since it was made, of the wall or of the process's CPU time.
class Clock {
 public:
  explicit Clock(const hidet_dist_pairwise_options &options) : cpu_(options.cpu_time != 0) {}

  double seconds() const {
    if (cpu_) return static_cast<double>(std::clock() - cpu_start_) / CLOCKS_PER_SEC;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const bool cpu_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const std::clock_t cpu_start_ = std::clock();
};

class Solver {
 public:
  Solver(const Problem &problem, const hidet_dist_pairwise_options &options, double forbidden,
         hidet_dist_pairwise_progress progress, void *context, const Clock &clock)
      : problem_(problem),
        options_(options),
        forbidden_(forbidden),
        progress_(progress),
        context_(context),
        clock_(clock),
        random_(static_cast<std::uint64_t>(options.seed)),
        bounds_(problem),
        forest_(problem),
        trade_(problem),
        direction_(problem.points, 0.0),
        best_prices_(problem.points, 0.0),
        price_sums_(static_cast<std::size_t>(problem.points) + 1, 0.0) {}

  void run() {
    do {
      ++rounds_;
      improve_bound();
      if (!over()) descend(bounds_.rounded());
      if (has_best_ && !over()) polish();
      report();
    } while (!over() && (options_.rounds == 0 || rounds_ < options_.rounds));
  }

  bool has_best() const { return has_best_; }
  const std::vector<int> &best() const { return best_; }
  double cost() const { return best_cost_; }
  double bound() const { return has_best_ ? std::min(bound_, best_cost_) : bound_; }
  double seconds() const { return clock_.seconds(); }
  std::int64_t rounds() const { return rounds_; }

 private:
  bool over() {
    if (stopped_) return true;
    if (options_.seconds > 0 && seconds() >= options_.seconds) stopped_ = true;
    if (has_best_ && best_cost_ - bound() <= options_.gap * best_cost_) stopped_ = true;
    return stopped_;
  }

  void report() {
    if (progress_ != nullptr && progress_(context_, seconds(), has_best_ ? best_cost_ : forbidden_, bound()) != 0)
      stopped_ = true;
  }

  void keep(const std::vector<int> &assignment, double cost) {
    if (has_best_ && cost >= best_cost_) return;
    const bool first = !has_best_;
    has_best_ = true;
    best_ = assignment;
    best_cost_ = cost;
    if (first) report();
  }

  // Keeps an assignment that is allowed and fits.
  void offer(const std::vector<int> &assignment) {
    const double cost = problem_.cost_of(assignment);
    if (cost >= problem_.big || (has_best_ && cost >= best_cost_)) return;
    const std::vector<double> held = profile(problem_, assignment);
    if (held.empty() || *std::max_element(held.begin(), held.end()) <= problem_.byte_limit) keep(assignment, cost);
  }

  void improve_bound() {
    for (int count = 0; count < kPassesPerRound && !over(); ++count) {
      const double backward = bounds_.pass(false), bound = bounds_.pass(true);
      ++passes_;
      take_bound(std::max(backward, bound));
      offer(bounds_.rounded());
      if (passes_ >= kPassesBeforePrices && problem_.points > 0) move_prices(bound);
    }
  }

  void take_bound(double bound) {
    bound *= 1 - kRounding;
    if (bound <= bound_) return;
    if (bound > bound_ + kLeastStep * scale()) {
      without_better_ = 0;
      step_ = std::min(kMostStep, step_ * kStepGrowth);
    }
    bound_ = bound;
    best_prices_ = bounds_.prices();
  }

  void move_prices(double bound) {
    if (++without_better_ > kPatience) {
      without_better_ = 0;
      step_ = std::max(kLeastStep, step_ * kStepCut);
      std::fill(direction_.begin(), direction_.end(), 0.0);
      bounds_.set_prices(best_prices_);
      return;
    }
    const std::vector<double> held = bounds_.fractional_profile();
    double square = 0;
    for (int t = 0; t < problem_.points; ++t) {
      direction_[t] += kAveraging * (held[t] - problem_.byte_limit - direction_[t]);
      if (direction_[t] > 0 || bounds_.prices()[t] > 0) square += direction_[t] * direction_[t];
    }
    if (square == 0) return;
    const double target = has_best_ ? best_cost_ : bound_ + kAssumedGap * scale();
    const double step = step_ * std::max(target - bound, kLeastGap * scale()) / square;
    std::vector<double> prices(bounds_.prices());
    for (int t = 0; t < problem_.points; ++t) prices[t] = std::max(0.0, prices[t] + step * direction_[t]);
    bounds_.set_prices(prices);
  }

  // The order of magnitude of costs: the bound, or what it starts from.
  double scale() const { return bound_ > 0 ? bound_ : kLeastGap * problem_.big; }

  void sum_prices(double scale, const std::vector<double> &more) {
    for (int t = 0; t < problem_.points; ++t)
      price_sums_[t + 1] = price_sums_[t] + scale * best_prices_[t] + (more.empty() ? 0.0 : more[t]);
  }

  // The change of the cost with priced bytes by the forest's strategies.
  double priced(double change, const std::vector<int> &assignment) const {
    for (std::size_t k = 0; k < forest_.nodes().size(); ++k) {
      const int v = forest_.nodes()[k], s = forest_.strategy(static_cast<int>(k));
      if (s != assignment[v]) change += problem_.priced_change(v, assignment[v], s, price_sums_);
    }
    return change;
  }

  void take(std::vector<int> &assignment) const {
    for (std::size_t k = 0; k < forest_.nodes().size(); ++k)
      assignment[forest_.nodes()[k]] = forest_.strategy(static_cast<int>(k));
  }

  void descend(std::vector<int> assignment) {
    std::vector<double> more(problem_.points, 0.0);
    sum_prices(1.0, more);
    // The price of a byte where none is known: the bound, divided by the memory at all points.
    double usual = scale() / (problem_.byte_limit * std::max(1, problem_.points) + 1.0);
    const auto priced_points = std::count_if(best_prices_.begin(), best_prices_.end(), [](double x) { return x > 0; });
    if (priced_points > 0)
      usual = std::max(
          usual, std::accumulate(best_prices_.begin(), best_prices_.end(), 0.0) / static_cast<double>(priced_points));
    int stale = 0, rises = 0;
    double rise = kRise;
    while (!over()) {
      forest_.grow_all(random_);
      double better = 0;
      if (forest_.solve(assignment, price_sums_)) {
        better = -priced(forest_.change(assignment), assignment);
        take(assignment);
      }
      stale = better > kNoImprovement * scale() ? 0 : stale + 1;
      if (stale < kStaleForests) continue;
      if (problem_.cost_of(assignment) >= problem_.big && !repair(assignment)) return;
      const std::vector<double> held = profile(problem_, assignment);
      bool fits = true;
      for (int t = 0; t < problem_.points; ++t) {
        if (held[t] <= problem_.byte_limit) continue;
        fits = false;
        more[t] += rise * (best_prices_[t] + usual);
      }
      if (fits) {
        offer(assignment);
        return;
      }
      if (++rises > kMostRises) return;
      rise *= kRiseGrowth;
      sum_prices(1.0, more);
      stale = kStaleForests - kStaleAfterRise;
    }
  }

  bool is_forbidden(int edge, const std::vector<int> &assignment) const {
    const int u = problem_.first[edge];
    return problem_.entry(edge, u, assignment[u], assignment[problem_.second[edge]]) >= problem_.big;
  }

  // Makes moves around forbidden pairs until there are none; false if some remain.
  bool repair(std::vector<int> &assignment) {
    std::vector<int> wrong;
    for (int e = 0; e < problem_.edges; ++e)
      if (is_forbidden(e, assignment)) wrong.push_back(e);
    for (int move = 0; move < kRepairs && !wrong.empty() && !over(); ++move) {
      const int e = wrong[random_() % wrong.size()];
      const int seed = random_() % 2 == 0 ? problem_.first[e] : problem_.second[e];
      forest_.grow_around(seed, forest_size(), random_() % 2 == 0, random_);
      if (!forest_.solve(assignment, price_sums_)) continue;
      take(assignment);
      for (const int v : forest_.nodes())
        wrong.insert(wrong.end(), problem_.incident.begin() + problem_.incident_begin[v],
                     problem_.incident.begin() + problem_.incident_begin[v + 1]);
      std::sort(wrong.begin(), wrong.end());
      wrong.erase(std::unique(wrong.begin(), wrong.end()), wrong.end());
      wrong.erase(std::remove_if(wrong.begin(), wrong.end(), [&](int edge) { return !is_forbidden(edge, assignment); }),
                  wrong.end());
    }
    return wrong.empty();
  }

  int forest_size() { return kLeastForest << (random_() % kForestDoublings); }

  void polish() {
    if (problem_.nodes == 0) return;
    Memory memory(problem_, best_);
    std::vector<int> assignment(best_);
    double cost = best_cost_;
    const int moves = std::max(kLeastMoves, problem_.nodes / kNodesPerMove);
    for (int move = 0; move < moves; ++move) {
      if (move % kMovesPerPrice == 0) {
        if (over()) break;
        sum_prices(kPriceScales[random_() % std::size(kPriceScales)], {});
      }
      if (random_() % kForestsPerTrade == 0) {
        cost += trade_.attempt(assignment, memory, random_);
        continue;
      }
      const int seed = static_cast<int>(random_() % static_cast<std::uint64_t>(problem_.nodes));
      forest_.grow_around(seed, forest_size(), random_() % 2 == 0, random_);
      if (!forest_.solve(assignment, price_sums_)) continue;
      const double change = forest_.change(assignment);
      if (change > 0) continue;
      change_bytes(memory, assignment, false);
      if (memory.peak() > problem_.byte_limit) {
        change_bytes(memory, assignment, true);
        continue;
      }
      take(assignment);
      cost += change;
    }
    offer(assignment);  // computes its cost and memory from scratch
  }

  void change_bytes(Memory &memory, const std::vector<int> &assignment, bool back) const {
    for (std::size_t k = 0; k < forest_.nodes().size(); ++k) {
      const int v = forest_.nodes()[k], s = forest_.strategy(static_cast<int>(k));
      if (s != assignment[v]) memory.change(problem_, v, back ? s : assignment[v], back ? assignment[v] : s);
    }
  }

  const Problem &problem_;
  const hidet_dist_pairwise_options options_;
  const double forbidden_;
  const hidet_dist_pairwise_progress progress_;
  void *const context_;
  const Clock &clock_;
  std::mt19937_64 random_;
  Bounds bounds_;
  Forest forest_;
  Trade trade_;
  std::vector<double> direction_, best_prices_, price_sums_;
  double step_ = kFirstStep;
  int without_better_ = 0, passes_ = 0;
  std::vector<int> best_;
  double best_cost_ = 0, bound_ = 0;
  bool has_best_ = false, stopped_ = false;
  std::int64_t rounds_ = 0;
};

}  // namespace

}  // namespace hidet_dist::pairwise

extern "C" int32_t hidet_dist_pairwise_solve(const hidet_dist_pairwise_problem *given,
                                             const hidet_dist_pairwise_options *options,
                                             hidet_dist_pairwise_progress progress, void *context, int32_t *strategies,
                                             hidet_dist_pairwise_result *result) {
  using namespace hidet_dist::pairwise;
  try {
    if (options->seconds <= 0 && options->rounds <= 0)
      throw std::invalid_argument("the options limit neither seconds nor rounds");
    const Clock clock(*options);
    Problem problem;
    *result = {given->forbidden, 0.0, 0.0, 0};
    if (!reduce(*given, true, problem)) {
      result->seconds = clock.seconds();
      return reduce(*given, false, problem) ? 3 : 2;
    }

    Solver solver(problem, *options, given->forbidden, progress, context, clock);
    solver.run();
    result->bound = solver.bound();
    result->rounds = solver.rounds();
    result->seconds = clock.seconds();
    if (!solver.has_best()) return 1;
    result->cost = solver.cost();
    for (std::int64_t g = 0; g < given->nodes; ++g) {
      const int part = problem.part_of[static_cast<std::size_t>(g)];
      const int *choices =
          &problem.choices[static_cast<std::size_t>(problem.choice_begin[static_cast<std::size_t>(g)])];
      strategies[g] = choices[part < 0 ? 0 : solver.best()[part]];
    }
    return 0;
  } catch (const std::exception &error) {
    hidet_dist::set_last_error(error.what());
    return -1;
  }
}
