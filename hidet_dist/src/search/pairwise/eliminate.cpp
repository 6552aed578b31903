#include "eliminate.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

namespace hidet_dist::pairwise {

namespace {

class Step {
 public:
  Step(Problem &problem, Duals &duals, const ReductionLimits *limits) : p_(problem), duals_(duals), limits_(limits) {}

  bool run() {
    choose();
    if (count_ == 0) return false;
    number_.assign(static_cast<std::size_t>(p_.nodes), -1);
    for (int v = 0; v < p_.nodes; ++v)
      if (!chosen_[v]) number_[v] = nodes_++;
    set_offsets();
    keep_edges();
    for (int v = 0; v < p_.nodes; ++v) {
      if (!chosen_[v]) continue;
      if (limits_ != nullptr) limits_->check();
      eliminate(v);
    }
    finish();
    return true;
  }

 private:
  void choose() {
    std::map<std::pair<int, int>, bool> joined;
    for (int e = 0; e < p_.edges; ++e) joined[std::minmax(p_.first[e], p_.second[e])] = true;
    chosen_.assign(static_cast<std::size_t>(p_.nodes), 0);
    std::vector<char> barred(chosen_.size(), 0);
    std::int64_t left = p_.entries_left();
    for (int v = 0; v < p_.nodes; ++v) {
      if (barred[v] || p_.degree(v) > 2 || p_.hold_begin[v] < p_.hold_begin[v + 1]) continue;
      if (p_.degree(v) == 2) {
        const int a = neighbour(v, 0), b = neighbour(v, 1);
        if (a == b) continue;  // parallel edges have not been added yet
        const std::int64_t made = static_cast<std::int64_t>(p_.size(a)) * p_.size(b);
        const std::int64_t gone = static_cast<std::int64_t>(p_.size(v)) * (p_.size(a) + p_.size(b));
        if (made > gone && joined.count(std::minmax(a, b)) == 0) continue;
        const std::int64_t taken = made + (made + 1) / 2;  // a matrix, and the best strategies
        if (taken > left) continue;
        left -= taken;
      }
      chosen_[v] = 1;
      ++count_;
      for (int k = 0; k < p_.degree(v); ++k) barred[neighbour(v, k)] = 1;
    }
  }

  int edge(int v, int k) const { return p_.incident[p_.incident_begin[v] + k]; }
  int neighbour(int v, int k) const { return p_.other(edge(v, k), v); }

  void set_offsets() {
    std::size_t first = 0, second = 0;
    for (int e = 0; e < p_.edges; ++e) {
      to_first_.push_back(first);
      to_second_.push_back(second);
      first += static_cast<std::size_t>(p_.size(p_.first[e]));
      second += static_cast<std::size_t>(p_.size(p_.second[e]));
    }
  }

  // The messages of an edge to one of its nodes.
  const double *message(int e, int node) const {
    return p_.first[e] == node ? &duals_.first[to_first_[e]] : &duals_.second[to_second_[e]];
  }

  void add_edge(int a, int b, std::int64_t matrix, const double *to_a, const double *to_b) {
    first_.push_back(number_[a]);
    second_.push_back(number_[b]);
    matrix_.push_back(matrix);
    if (to_a == nullptr) return;
    moved_.first.insert(moved_.first.end(), to_a, to_a + p_.size(a));
    moved_.second.insert(moved_.second.end(), to_b, to_b + p_.size(b));
  }

  void keep_edges() {
    const bool messages = !duals_.first.empty();
    for (int e = 0; e < p_.edges; ++e) {
      const int a = p_.first[e], b = p_.second[e];
      if (chosen_[a] || chosen_[b]) continue;
      add_edge(a, b, p_.matrix[e], messages ? message(e, a) : nullptr, messages ? message(e, b) : nullptr);
    }
  }

  // An entry of part_of for a node with all of its strategies, on which eliminated ones depend; -1: one that has none.
  std::size_t entry_of(int node) {
    const auto [known, is_new] = entry_of_.emplace(node, p_.part_of.size());
    if (!is_new) return known->second;
    const int size = node < 0 ? 1 : p_.size(node);
    p_.part_of.push_back(node);
    for (int s = 0; s < size; ++s) p_.choices.push_back(s);
    p_.choice_begin.push_back(static_cast<std::int64_t>(p_.choices.size()));
    return known->second;
  }

  void eliminate(int v) {
    const int neighbours = p_.degree(v), size = p_.size(v);
    const int a = neighbours > 0 ? neighbour(v, 0) : -1, b = neighbours > 1 ? neighbour(v, 1) : -1;
    const int rows = a < 0 ? 1 : p_.size(a), columns = b < 0 ? 1 : p_.size(b);
    const auto count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
    const auto cost = p_.cost.begin() + p_.strategy_begin[v];
    auto one = std::make_shared<Elimination>();
    one->first = entry_of(a);
    one->second = entry_of(b);
    one->columns = columns;
    one->best.assign(count, 0);
    p_.eliminated += static_cast<std::int64_t>(count);
    std::vector<double> least(count, std::numeric_limits<double>::infinity());
    for (int s = 0; s < size; ++s) {
      std::vector<double> of_a(static_cast<std::size_t>(rows), cost[s]), of_b(static_cast<std::size_t>(columns), 0.0);
      if (a >= 0) p_.add_entries(edge(v, 0), a, s, of_a.data());
      if (b >= 0) p_.add_entries(edge(v, 1), b, s, of_b.data());
      for (std::size_t k = 0, i = 0; i < of_a.size(); ++i)
        for (std::size_t j = 0; j < of_b.size(); ++j, ++k)
          if (of_a[i] + of_b[j] < least[k]) {
            least[k] = of_a[i] + of_b[j];
            one->best[k] = s;
          }
    }
    for (double &entry : least) entry = std::min(entry, p_.big);
    p_.eliminations.push_back(std::move(one));
    eliminated_.emplace(v, static_cast<int>(p_.eliminations.size()) - 1);
    if (a < 0) {
      p_.base_cost += least[0];
    } else if (b < 0) {
      for (int s = 0; s < rows; ++s) added_.emplace_back(p_.strategy_begin[a] + s, least[static_cast<std::size_t>(s)]);
    } else {
      const auto [known, is_new] = matrices_.emplace(std::move(least), entries_);
      if (is_new) entries_ += static_cast<std::int64_t>(count);
      const bool messages = !duals_.first.empty();
      add_edge(a, b, static_cast<std::int64_t>(p_.entries.size()) + known->second,
               messages ? message(edge(v, 0), a) : nullptr, messages ? message(edge(v, 1), b) : nullptr);
    }
  }

  void finish() {
    std::vector<std::int64_t> begins;
    const std::size_t before = p_.entries.size();
    p_.entries.resize(before + static_cast<std::size_t>(entries_));
    for (const auto &[matrix, begin] : matrices_)
      std::copy(matrix.begin(), matrix.end(), p_.entries.begin() + static_cast<std::ptrdiff_t>(before) + begin);
    for (const auto &[strategy, cost] : added_) p_.cost[strategy] = std::min(p_.cost[strategy] + cost, p_.big);
    std::vector<double> cost;
    std::vector<int> strategy_begin{0}, hold_begin{0};
    for (int v = 0; v < p_.nodes; ++v) {
      if (chosen_[v]) continue;
      cost.insert(cost.end(), p_.cost.begin() + p_.strategy_begin[v], p_.cost.begin() + p_.strategy_begin[v + 1]);
      strategy_begin.push_back(static_cast<int>(cost.size()));
      hold_begin.push_back(p_.hold_begin[v + 1]);  // those eliminated have no holds
    }
    for (int &part : p_.part_of)
      if (part >= 0) part = chosen_[part] ? -2 - eliminated_.at(part) : number_[part];
    p_.cost = std::move(cost);
    p_.strategy_begin = std::move(strategy_begin);
    p_.hold_begin = std::move(hold_begin);
    p_.nodes = nodes_;
    p_.first = std::move(first_);
    p_.second = std::move(second_);
    p_.matrix = std::move(matrix_);
    p_.edges = static_cast<int>(p_.first.size());
    p_.set_incident();
    duals_.first = std::move(moved_.first);
    duals_.second = std::move(moved_.second);
  }

  Problem &p_;
  Duals &duals_;
  const ReductionLimits *limits_;
  int count_ = 0, nodes_ = 0;
  std::vector<char> chosen_;
  std::vector<int> number_;  // of each node that stays
  std::vector<std::size_t> to_first_, to_second_;
  std::map<int, std::size_t> entry_of_;
  std::map<int, int> eliminated_;  // the elimination of each node
  std::map<std::vector<double>, std::int64_t> matrices_;  // where each begins after the entries so far
  std::int64_t entries_ = 0;
  std::vector<std::pair<int, double>> added_;  // to the costs of strategies
  std::vector<int> first_, second_;
  std::vector<std::int64_t> matrix_;
  Duals moved_;
};

}  // namespace

bool eliminate(Problem &problem, Duals &duals, const ReductionLimits *limits) {
  return Step(problem, duals, limits).run();
}

}  // namespace hidet_dist::pairwise
