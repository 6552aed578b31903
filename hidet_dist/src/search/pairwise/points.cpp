#include "points.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace hidet_dist::pairwise {

namespace {

constexpr int kMostReferences = 64;    // points to which all others are compared
constexpr int kMostFruitless = 8;      // references in a row that leave nearly all points
constexpr int kMostSweeps = 20;        // over neighbouring points
constexpr double kFewRemoved = 0.01;  // of the points, by one reference or sweep

// The differences between the bytes at the point of a sweep over all points and those at a reference point. A hold that
// begins or ends changes one node's differences only, so that a sweep takes time linear in the bytes of all holds.
class Comparison {
 public:
  explicit Comparison(const Problem &problem)
      : p_(problem),
        active_(problem.begin.size(), 0),
        change_(problem.cost.size(), 0.0),
        least_(static_cast<std::size_t>(problem.nodes), 0.0),
        greatest_(least_),
        changed_(least_.size(), 0),
        events_begin_(static_cast<std::size_t>(problem.points) + 2, 0) {
    for (int v = 0; v < p_.nodes; ++v)
      for (int h = p_.hold_begin[v]; h < p_.hold_begin[v + 1]; ++h) {
        node_of_.push_back(v);
        ++events_begin_[p_.begin[h] + 1], ++events_begin_[p_.end[h] + 1];
      }
    std::partial_sum(events_begin_.begin(), events_begin_.end(), events_begin_.begin());
    events_.resize(2 * node_of_.size());
    std::vector<int> next(events_begin_.begin(), events_begin_.end() - 1);
    for (int h = 0; h < static_cast<int>(node_of_.size()); ++h) {
      events_[next[p_.begin[h]]++] = h;
      events_[next[p_.end[h]]++] = h;
    }
  }

  // Compares with a point from now on.
  void refer_to(int point) {
    forget();
    reference_ = point;
    for (std::size_t h = 0; h < active_.size(); ++h) {
      const bool there = p_.begin[h] <= point && point < p_.end[h];
      if (there != (active_[h] != 0)) add(static_cast<int>(h), there ? -1.0 : 1.0);
    }
    for (const int v : touched_) set_range(v);
  }

  // Compares with the point at which the sweep is.
  void refer_here() {
    forget();
    reference_ = point_;
  }

  // Goes to the next point of a sweep; the first is that after -1, forwards, or the number of points, backwards.
  void start(bool forward) {
    forget();
    std::fill(active_.begin(), active_.end(), 0);
    point_ = forward ? -1 : p_.points;
    forward_ = forward;
  }
  void go() {
    // Holds begin and end at the begin of a point: backwards, at that of the point that is left.
    const int at = forward_ ? point_ + 1 : point_;
    point_ += forward_ ? 1 : -1;
    for (int k = events_begin_[at]; k < events_begin_[at + 1]; ++k) {
      const int h = events_[k];
      active_[h] = active_[h] ? 0 : 1;
      add(h, active_[h] ? 1.0 : -1.0);
      set_range(node_of_[h]);
    }
  }

  int point() const { return point_; }
  int reference() const { return reference_; }
  // The least and the greatest excess of the bytes at the point over those at the reference, over all assignments.
  double least() const { return p_.base_bytes[point_] - p_.base_bytes[reference_] + least_sum_; }
  double greatest() const { return p_.base_bytes[point_] - p_.base_bytes[reference_] + greatest_sum_; }

 private:
  void add(int hold, double times) {
    const int v = node_of_[hold], size = p_.size(v);
    if (!changed_[v]) {
      changed_[v] = 1;
      touched_.push_back(v);
    }
    double *change = &change_[p_.strategy_begin[v]];
    const double *bytes = &p_.bytes[p_.held[hold]];
    for (int s = 0; s < size; ++s) change[s] += times * bytes[s];
  }

  void set_range(int v) {
    const auto begin = change_.begin() + p_.strategy_begin[v];
    const auto [least, greatest] = std::minmax_element(begin, begin + p_.size(v));
    least_sum_ += *least - least_[v];
    greatest_sum_ += *greatest - greatest_[v];
    least_[v] = *least;
    greatest_[v] = *greatest;
  }

  void forget() {
    for (const int v : touched_) {
      std::fill_n(change_.begin() + p_.strategy_begin[v], p_.size(v), 0.0);
      least_[v] = greatest_[v] = 0;
      changed_[v] = 0;
    }
    touched_.clear();
    least_sum_ = greatest_sum_ = 0;
  }

  const Problem &p_;
  std::vector<char> active_;
  std::vector<double> change_, least_, greatest_;  // of each strategy, and of each node
  std::vector<char> changed_;
  std::vector<int> touched_, node_of_, events_begin_, events_;
  double least_sum_ = 0, greatest_sum_ = 0;
  int point_ = 0, reference_ = 0;
  bool forward_ = true;
};

// The most bytes at each point, if each hold takes its greatest.
std::vector<double> most_bytes(const Problem &problem) {
  std::vector<double> most(static_cast<std::size_t>(problem.points) + 1, 0.0);
  for (int v = 0; v < problem.nodes; ++v)
    for (int h = problem.hold_begin[v]; h < problem.hold_begin[v + 1]; ++h) {
      const auto begin = problem.bytes.begin() + static_cast<std::ptrdiff_t>(problem.held[h]);
      const double greatest = *std::max_element(begin, begin + problem.size(v));
      most[problem.begin[h]] += greatest;
      most[problem.end[h]] -= greatest;
    }
  for (int t = 0; t < problem.points; ++t) {
    if (t > 0) most[t] += most[t - 1];
  }
  most.pop_back();
  for (int t = 0; t < problem.points; ++t) most[t] += problem.base_bytes[t];
  return most;
}

// The point that stands for each one: itself if it stays, -1 if none is needed.
std::vector<int> find_points(const Problem &problem) {
  const std::vector<double> most = most_bytes(problem);
  std::vector<int> stands(most.size()), by_bytes;
  int left = 0;
  for (int t = 0; t < problem.points; ++t) {
    stands[t] = most[t] > problem.byte_limit ? t : -1;
    if (stands[t] == t) by_bytes.push_back(t), ++left;
  }
  if (left < 2) return stands;
  Comparison comparison(problem);
  for (int sweep = 0, before = 0; sweep < kMostSweeps; ++sweep) {
    before = left;
    bool any = false;
    comparison.start(sweep % 2 == 0);
    for (int count = 0; count < problem.points; ++count) {
      comparison.go();
      const int t = comparison.point();
      if (stands[t] != t) continue;
      if (any && comparison.greatest() <= 0) {
        stands[t] = comparison.reference();
        --left;
        continue;
      }
      if (any && comparison.least() >= 0) {
        stands[comparison.reference()] = t;
        --left;
      }
      comparison.refer_here();
      any = true;
    }
    if (sweep > 0 && before - left <= kFewRemoved * before) break;
  }
  std::stable_sort(by_bytes.begin(), by_bytes.end(), [&](int a, int b) { return most[a] > most[b]; });
  int references = 0, fruitless = 0;
  for (const int reference : by_bytes) {
    if (stands[reference] != reference) continue;
    if (left < 2 || references++ == kMostReferences || fruitless == kMostFruitless) break;
    const int before = left;
    comparison.start(true);
    comparison.refer_to(reference);
    for (int count = 0; count < problem.points; ++count) {
      comparison.go();
      const int t = comparison.point();
      if (stands[t] != t || t == reference) continue;
      if (comparison.greatest() <= 0) {
        stands[t] = reference;
        --left;
      } else if (comparison.least() >= 0) {
        stands[reference] = t;
        --left;
        break;
      }
    }
    fruitless = before - left <= kFewRemoved * before ? fruitless + 1 : 0;
  }
  return stands;
}

}  // namespace

void set_holds(Problem &problem, std::vector<std::vector<Hold>> holds) {
  problem.begin.clear();
  problem.end.clear();
  problem.held.clear();
  problem.bytes.clear();
  problem.hold_begin.assign(1, 0);
  for (std::vector<Hold> &of_node : holds) {
    std::stable_sort(of_node.begin(), of_node.end(),
                     [](const Hold &a, const Hold &b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
    std::vector<Hold> joined;
    for (Hold &hold : of_node) {
      if (!joined.empty() && joined.back().begin == hold.begin && joined.back().end == hold.end) {
        for (std::size_t s = 0; s < hold.bytes.size(); ++s) joined.back().bytes[s] += hold.bytes[s];
      } else if (!joined.empty() && joined.back().end == hold.begin && joined.back().bytes == hold.bytes) {
        joined.back().end = hold.end;
      } else {
        joined.push_back(std::move(hold));
      }
    }
    for (Hold &hold : joined) {
      const double least = *std::min_element(hold.bytes.begin(), hold.bytes.end());
      if (least > 0)
        for (int t = hold.begin; t < hold.end; ++t) problem.base_bytes[t] += least;
      bool differ = false;
      for (double &bytes : hold.bytes) differ = (bytes -= least) > 0 || differ;
      if (!differ) continue;
      problem.begin.push_back(hold.begin);
      problem.end.push_back(hold.end);
      problem.held.push_back(static_cast<std::int64_t>(problem.bytes.size()));
      problem.bytes.insert(problem.bytes.end(), hold.bytes.begin(), hold.bytes.end());
    }
    problem.hold_begin.push_back(static_cast<int>(problem.begin.size()));
  }
}

bool remove_points(Problem &problem, std::vector<double> &prices) {
  if (problem.points == 0) return false;
  const std::vector<int> stands = find_points(problem);
  std::vector<int> number(stands.size() + 1, 0);  // of the points that stay before each one
  for (int t = 0; t < problem.points; ++t) number[t + 1] = number[t] + (stands[t] == t ? 1 : 0);
  if (number.back() == problem.points) return false;
  std::vector<double> base, kept_prices;
  for (int t = 0; t < problem.points; ++t)
    if (stands[t] == t) base.push_back(problem.base_bytes[t]);
  if (!prices.empty()) {
    kept_prices.assign(base.size(), 0.0);
    for (int t = 0; t < problem.points; ++t) {
      int stand = t;
      while (stand >= 0 && stands[stand] != stand) stand = stands[stand];
      if (stand >= 0) kept_prices[number[stand]] += prices[t];
    }
    prices = std::move(kept_prices);
  }
  std::vector<std::vector<Hold>> holds(static_cast<std::size_t>(problem.nodes));
  for (int v = 0; v < problem.nodes; ++v)
    for (int h = problem.hold_begin[v]; h < problem.hold_begin[v + 1]; ++h) {
      const int begin = number[problem.begin[h]], end = number[problem.end[h]];
      if (begin == end) continue;
      const auto bytes = problem.bytes.begin() + static_cast<std::ptrdiff_t>(problem.held[h]);
      holds[v].push_back({begin, end, std::vector<double>(bytes, bytes + problem.size(v))});
    }
  problem.points = static_cast<int>(base.size());
  problem.base_bytes = std::move(base);
  set_holds(problem, std::move(holds));
  return true;
}

}  // namespace hidet_dist::pairwise
