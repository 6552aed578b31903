#include "bounds.hpp"

#include <algorithm>
#include <numeric>

#include "../clones.hpp"

namespace hidet_dist::pairwise {

namespace {

// For each row the least of the row's entries plus those of `added`.
HIDET_DIST_CLONES("arch=x86-64-v4", "arch=x86-64-v3")
void least_of_rows(const double *__restrict matrix, const double *__restrict added, int rows, int columns,
                   double *__restrict least) {
  for (int i = 0; i < rows; ++i) {
    const double *__restrict row = matrix + static_cast<std::int64_t>(i) * columns;
    double best = row[0] + added[0];
    for (int j = 1; j < columns; ++j) {
      const double sum = row[j] + added[j];
      best = sum < best ? sum : best;
    }
    least[i] = best;
  }
}

// For each column the least of the column's entries plus those of `added`.
HIDET_DIST_CLONES("arch=x86-64-v4", "arch=x86-64-v3")
void least_of_columns(const double *__restrict matrix, const double *__restrict added, int rows, int columns,
                      double *__restrict least) {
  for (int j = 0; j < columns; ++j) least[j] = matrix[j] + added[0];
  for (int i = 1; i < rows; ++i) {
    const double *__restrict row = matrix + static_cast<std::int64_t>(i) * columns;
    const double add = added[i];
    for (int j = 0; j < columns; ++j) {
      const double sum = row[j] + add;
      least[j] = sum < least[j] ? sum : least[j];
    }
  }
}

}  // namespace

Bounds::Bounds(const Problem &problem, const Duals &duals) : problem_(problem), node_(problem.cost) {
  to_first_.assign(1, 0);
  to_second_.assign(1, 0);
  for (int e = 0; e < problem.edges; ++e) {
    to_first_.push_back(to_first_.back() + problem.size(problem.first[e]));
    to_second_.push_back(to_second_.back() + problem.size(problem.second[e]));
  }
  first_ = duals.first;
  second_ = duals.second;
  first_.resize(to_first_.back(), 0.0);
  second_.resize(to_second_.back(), 0.0);
  for (int e = 0; e < problem.edges; ++e)
    for (const bool of_first : {true, false}) {
      const int v = of_first ? problem.first[e] : problem.second[e];
      const double *moved = of_first ? &first_[to_first_[e]] : &second_[to_second_[e]];
      for (int s = 0; s < problem.size(v); ++s) node_[problem.strategy_begin[v] + s] -= moved[s];
    }
  prices_.assign(problem.points, 0.0);
  constant_ = problem.base_cost;
  rounded_.assign(problem.nodes, 0);
  removed_.assign(problem.cost.size(), 0);
  surplus_.assign(problem.cost.size(), 0.0);
  best_.assign(problem.nodes, 0);
  stayed_.assign(problem.nodes, 1.0);
  part_.assign(problem.nodes, 0.0);
  int most = 0;
  for (int v = 0; v < problem.nodes; ++v) most = std::max(most, problem.size(v));
  set_prices(duals.prices.empty() ? prices_ : duals.prices);
  least_.resize(most);
  conditioned_.resize(most);
}

void Bounds::least_of_edge(int edge, bool to_first, double *least) const {
  const double *matrix = &problem_.entries[problem_.matrix[edge]];
  const int rows = problem_.size(problem_.first[edge]), columns = problem_.size(problem_.second[edge]);
  if (to_first)
    least_of_rows(matrix, &second_[to_second_[edge]], rows, columns, least);
  else
    least_of_columns(matrix, &first_[to_first_[edge]], rows, columns, least);
}

double Bounds::pass(bool forward) {
  double bound = 0;
  for (int k = 0; k < problem_.nodes; ++k) {
    const int v = forward ? k : problem_.nodes - 1 - k;
    const int size = problem_.size(v);
    double *cost = &node_[problem_.strategy_begin[v]];
    if (forward) std::copy(cost, cost + size, conditioned_.begin());
    int later_edges = 0, earlier_edges = 0;
    // Move the least cost of each edge for each strategy from the edge to the node.
    for (int a = problem_.incident_begin[v]; a < problem_.incident_begin[v + 1]; ++a) {
      const int e = problem_.incident[a], other = problem_.other(e, v);
      const bool is_first = problem_.first[e] == v, later = forward == (other > v);
      ++(later ? later_edges : earlier_edges);
      double *moved = is_first ? &first_[to_first_[e]] : &second_[to_second_[e]];
      least_of_edge(e, is_first, least_.data());
      if (forward) {
        if (later) {
          for (int s = 0; s < size; ++s) conditioned_[s] += least_[s] + moved[s];
        } else {
          const int taken = rounded_[other];
          const double of_other = is_first ? second_[to_second_[e] + taken] : first_[to_first_[e] + taken];
          for (int s = 0; s < size; ++s) conditioned_[s] += problem_.entry(e, v, s, taken) + of_other + moved[s];
        }
      }
      for (int s = 0; s < size; ++s) {
        const double taken_out = least_[s] + moved[s];
        cost[s] += taken_out;
        moved[s] -= taken_out;
      }
    }
    if (forward)
      rounded_[v] =
          static_cast<int>(std::min_element(conditioned_.begin(), conditioned_.begin() + size) - conditioned_.begin());
    // Move equal parts of it into the edges to later nodes; the least remainder is added to the bound.
    const double part = 1.0 / std::max(1, std::max(later_edges, earlier_edges));
    const double stays = 1.0 - part * later_edges;
    const double *least_cost = std::min_element(cost, cost + size);
    bound += stays * *least_cost;
    for (int s = 0; s < size; ++s) {
      const int strategy = problem_.strategy_begin[v] + s;
      surplus_[strategy] = cost[s] - *least_cost;
      if (surplus_[strategy] <= slack_ || removed_[strategy]) continue;
      cost[s] += problem_.big;
      removed_[strategy] = 1;
      ++removals_;
    }
    if (forward) {
      best_[v] = static_cast<int>(least_cost - cost);
      stayed_[v] = stays;
      part_[v] = part;
    }
    if (later_edges == 0) continue;
    for (int a = problem_.incident_begin[v]; a < problem_.incident_begin[v + 1]; ++a) {
      const int e = problem_.incident[a];
      if (forward != (problem_.other(e, v) > v)) continue;
      double *moved = problem_.first[e] == v ? &first_[to_first_[e]] : &second_[to_second_[e]];
      for (int s = 0; s < size; ++s) moved[s] += part * cost[s];
    }
    for (int s = 0; s < size; ++s) cost[s] *= stays;
  }
  slack_ = std::numeric_limits<double>::max();
  return bound + constant_;
}

// A pass is a composition of sums and minima, so its supergradient follows from the minima's arguments, backwards.
std::vector<double> Bounds::fractional_profile() {
  weight_.assign(problem_.cost.size(), 0.0);
  std::vector<double> held(static_cast<std::size_t>(problem_.points) + 1, 0.0);
  for (int v = problem_.nodes - 1; v >= 0; --v) {
    const int size = problem_.size(v);
    double *weight = &weight_[problem_.strategy_begin[v]];
    weight[best_[v]] += stayed_[v];
    for (int a = problem_.incident_begin[v]; a < problem_.incident_begin[v + 1]; ++a) {
      const int e = problem_.incident[a], earlier = problem_.other(e, v);
      if (earlier > v) continue;
      const double *moved = problem_.first[e] == v ? &second_[to_second_[e]] : &first_[to_first_[e]];
      for (int s = 0; s < size; ++s) {
        if (weight[s] == 0) continue;
        std::copy_n(moved, problem_.size(earlier), least_.begin());
        problem_.add_entries(e, earlier, s, least_.data());
        const auto from = std::min_element(least_.begin(), least_.begin() + problem_.size(earlier)) - least_.begin();
        weight_[problem_.strategy_begin[earlier] + static_cast<int>(from)] += weight[s] * part_[earlier];
      }
    }
    for (int h = problem_.hold_begin[v]; h < problem_.hold_begin[v + 1]; ++h) {
      double bytes = 0;
      for (int s = 0; s < size; ++s) bytes += weight[s] * problem_.bytes[problem_.held[h] + s];
      held[problem_.begin[h]] += bytes;
      held[problem_.end[h]] -= bytes;
    }
  }
  for (int t = 1; t < problem_.points; ++t) held[t] += held[t - 1];
  held.resize(static_cast<std::size_t>(problem_.points));
  for (int t = 0; t < problem_.points; ++t) held[t] += problem_.base_bytes[t];
  return held;
}

void Bounds::set_prices(const std::vector<double> &prices) {
  std::vector<double> more(static_cast<std::size_t>(problem_.points) + 1, 0.0);  // the sum of the rises before a point
  for (int t = 0; t < problem_.points; ++t) more[t + 1] = more[t] + (prices[t] - prices_[t]);
  for (int v = 0; v < problem_.nodes; ++v) problem_.add_priced(v, more, &node_[problem_.strategy_begin[v]]);
  prices_ = prices;
  constant_ = problem_.base_cost;
  for (int t = 0; t < problem_.points; ++t) constant_ += prices[t] * (problem_.base_bytes[t] - problem_.byte_limit);
}

}  // namespace hidet_dist::pairwise
