#include "search.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace hidet_dist::pairwise {

namespace {

// All of these are counts and ratios of the search, tuned on the contest's instances; no cost depends on them.
constexpr int kStaleForests = 10;  // without an improvement until a descent ends, or raises prices
constexpr int kStaleAfterRise = 3;  // forests tried after each rise
constexpr int kMostRises = 200;
constexpr double kRise = 0.05, kRiseGrowth = 1.1;  // of the prices of memory that does not fit
constexpr double kNoImprovement = 1e-5;  // less, relative to the bound, does not count
constexpr int kNodesPerMove = 8;  // a round tries a move for so many nodes
constexpr int kLeastMoves = 500;
constexpr int kMovesPerPrice = 200;
constexpr int kForestsPerTrade = 3;  // one move in so many is a trade
constexpr double kDescentScales[] = {0.25, 0.5, 0.8, 1.0, 1.25, 2.0};
constexpr double kPriceScales[] = {0.0, 0.5, 0.8, 1.0, 1.25, 2.0};
constexpr int kLeastForest = 5, kForestDoublings = 8;  // sizes of forests of few nodes: 5, 10, ... 640
constexpr int kRepairs = 2000;  // moves around forbidden pairs, in one descent

}  // namespace

Search::Search(const Problem &problem, std::uint64_t seed, std::function<bool()> over, std::function<void()> improved)
    : problem_(problem),
      over_(std::move(over)),
      improved_(std::move(improved)),
      random_(seed),
      forest_(problem),
      trade_(problem),
      price_sums_(static_cast<std::size_t>(problem.points) + 1, 0.0) {}

// Computes the cost and the memory from scratch.
void Search::offer(const std::vector<int> &assignment) {
  const double cost = problem_.cost_of(assignment);
  if (cost >= problem_.big || (has_best_ && cost >= best_cost_)) return;
  const std::vector<double> held = profile(problem_, assignment);
  if (!held.empty() && *std::max_element(held.begin(), held.end()) > problem_.byte_limit) return;
  has_best_ = true;
  best_ = assignment;
  best_cost_ = cost;
  improved_();
}

void Search::sum_prices(double scale, const std::vector<double> &prices, const std::vector<double> &more) {
  for (int t = 0; t < problem_.points; ++t)
    price_sums_[t + 1] = price_sums_[t] + scale * prices[t] + (more.empty() ? 0.0 : more[t]);
}

// The change of the cost with priced bytes by the forest's strategies.
double Search::priced(double change, const std::vector<int> &assignment) const {
  for (std::size_t k = 0; k < forest_.nodes().size(); ++k) {
    const int v = forest_.nodes()[k], s = forest_.strategy(static_cast<int>(k));
    if (s != assignment[v]) change += problem_.priced_change(v, assignment[v], s, price_sums_);
  }
  return change;
}

void Search::take(std::vector<int> &assignment) const {
  for (std::size_t k = 0; k < forest_.nodes().size(); ++k)
    assignment[forest_.nodes()[k]] = forest_.strategy(static_cast<int>(k));
}

void Search::descend(std::vector<int> assignment, const std::vector<double> &prices, double scale) {
  std::vector<double> more(problem_.points, 0.0);
  // Once an assignment is known, descents differ in how dear memory is.
  const double price_scale = has_best_ ? kDescentScales[random_() % std::size(kDescentScales)] : 1.0;
  sum_prices(price_scale, prices, more);
  // The price of a byte where none is known: the bound, divided by the memory at all points.
  double usual = scale / (problem_.byte_limit * std::max(1, problem_.points) + 1.0);
  const auto priced_points = std::count_if(prices.begin(), prices.end(), [](double x) { return x > 0; });
  if (priced_points > 0)
    usual = std::max(usual, std::accumulate(prices.begin(), prices.end(), 0.0) / static_cast<double>(priced_points));
  int stale = 0, rises = 0;
  double rise = kRise;
  for (int count = 0; !over_(); ++count) {
    if (count == most_forests_ && !has_best_) {  // better prices may help more than more forests
      most_forests_ *= 2;
      return;
    }
    forest_.grow_all(random_);
    double better = 0;
    if (forest_.solve(assignment, price_sums_)) {
      better = -priced(forest_.change(assignment), assignment);
      take(assignment);
    }
    stale = better > kNoImprovement * scale ? 0 : stale + 1;
    if (stale < kStaleForests) continue;
    if (problem_.cost_of(assignment) >= problem_.big && !repair(assignment)) return;
    const std::vector<double> held = profile(problem_, assignment);
    bool fits = true;
    for (int t = 0; t < problem_.points; ++t) {
      if (held[t] <= problem_.byte_limit) continue;
      fits = false;
      more[t] += rise * (prices[t] + usual);
    }
    if (fits) {
      offer(assignment);
      return;
    }
    if (++rises > kMostRises) return;
    rise *= kRiseGrowth;
    sum_prices(price_scale, prices, more);
    stale = kStaleForests - kStaleAfterRise;
  }
}

bool Search::is_forbidden(int edge, const std::vector<int> &assignment) const {
  const int u = problem_.first[edge];
  return problem_.entry(edge, u, assignment[u], assignment[problem_.second[edge]]) >= problem_.big;
}

// Makes moves around forbidden pairs until there are none; false if some remain.
bool Search::repair(std::vector<int> &assignment) {
  std::vector<int> wrong;
  for (int e = 0; e < problem_.edges; ++e)
    if (is_forbidden(e, assignment)) wrong.push_back(e);
  for (int move = 0; move < kRepairs && !wrong.empty() && !over_(); ++move) {
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

int Search::forest_size() { return kLeastForest << (random_() % kForestDoublings); }

void Search::polish(const std::vector<double> &prices) {
  if (problem_.nodes == 0) return;
  Memory memory(problem_, best_);
  std::vector<int> assignment(best_);
  double cost = best_cost_;
  const int moves = std::max(kLeastMoves, problem_.nodes / kNodesPerMove);
  for (int move = 0; move < moves; ++move) {
    if (move % kMovesPerPrice == 0) {
      if (over_()) break;
      sum_prices(kPriceScales[random_() % std::size(kPriceScales)], prices, {});
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
  offer(assignment);
}

void Search::change_bytes(Memory &memory, const std::vector<int> &assignment, bool back) const {
  for (std::size_t k = 0; k < forest_.nodes().size(); ++k) {
    const int v = forest_.nodes()[k], s = forest_.strategy(static_cast<int>(k));
    if (s != assignment[v]) memory.change(problem_, v, back ? s : assignment[v], back ? assignment[v] : s);
  }
}

}  // namespace hidet_dist::pairwise
