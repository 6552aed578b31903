#include "problem.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "merge.hpp"

namespace hidet_dist::pairwise {

namespace {

constexpr std::int64_t kMost = 1 << 30;  // of nodes, edges and strategies: they are counted in int

void check(bool holds, const std::string &what) {
  if (!holds) throw std::invalid_argument("not a pairwise problem: " + what);
}

// Memory can peak only at a point where a node begins and after which a node ends before another begins.
void set_points(const hidet_dist_pairwise_problem &given, Problem &problem) {
  const auto holds = [&](int v) {
    return given.interval_begin[v] < given.interval_end[v] &&
           std::any_of(
               given.bytes + given.strategy_begin[v], given.bytes + given.strategy_begin[v + 1],
               [](double bytes) { return bytes > 0; });
  };
  std::vector<std::pair<std::int64_t, int>> events;
  for (int v = 0; v < problem.nodes; ++v) {
    if (!holds(v)) continue;
    events.emplace_back(given.interval_begin[v], 1);
    events.emplace_back(given.interval_end[v], 0);  // ends come first at a point
  }
  std::sort(events.begin(), events.end());
  std::vector<std::int64_t> points;
  for (std::size_t k = 0; k < events.size(); ++k)
    if (events[k].second == 1 && (k + 1 == events.size() || events[k + 1].second == 0))
      points.push_back(events[k].first);
  problem.points = static_cast<int>(points.size());
  const auto number = [&](std::int64_t point) {
    return static_cast<int>(std::lower_bound(points.begin(), points.end(), point) - points.begin());
  };
  problem.base_bytes.assign(points.size(), 0.0);
  problem.hold_begin.assign(1, 0);
  for (int v = 0; v < problem.nodes; ++v) {
    if (holds(v)) {
      problem.begin.push_back(number(given.interval_begin[v]));
      problem.end.push_back(number(given.interval_end[v]));
      problem.held.push_back(given.strategy_begin[v]);
    }
    problem.hold_begin.push_back(static_cast<int>(problem.begin.size()));
  }
  problem.bytes.assign(given.bytes, given.bytes + given.strategy_begin[given.nodes]);
}

// Copies the nodes. Returns the sum of their greatest allowed costs.
double set_nodes(const hidet_dist_pairwise_problem &given, Problem &problem) {
  check(given.nodes >= 0 && given.nodes < kMost && given.edges >= 0 && given.edges < kMost,
        "the number of nodes or edges");
  check(given.strategy_begin[0] == 0 && given.strategy_begin[given.nodes] < kMost, "the number of strategies");
  check(given.byte_limit >= 0 && given.forbidden > 0, "the limit of bytes, or the cost of what is forbidden");
  problem.nodes = static_cast<int>(given.nodes);
  problem.given_nodes = static_cast<std::size_t>(given.nodes);
  problem.byte_limit = given.byte_limit;
  problem.strategy_begin.assign(1, 0);
  problem.choice_begin.assign(1, 0);
  double total = 0;
  for (int v = 0; v < problem.nodes; ++v) {
    const std::int64_t begin = given.strategy_begin[v], end = given.strategy_begin[v + 1];
    check(begin < end, "node " + std::to_string(v) + " has no strategy");
    double most = 0;
    for (std::int64_t s = begin; s < end; ++s) {
      check(given.cost[s] >= 0 && given.bytes[s] >= 0, "a negative cost, or bytes, of node " + std::to_string(v));
      if (given.cost[s] < given.forbidden) most = std::max(most, given.cost[s]);
      problem.cost.push_back(given.cost[s]);
      problem.choices.push_back(static_cast<int>(s - begin));
    }
    total += most;
    problem.strategy_begin.push_back(static_cast<int>(end));
    problem.part_of.push_back(v);
    problem.choice_begin.push_back(end);
  }
  return total;
}

// Copies the edges. Returns the sum of their greatest allowed entries.
double set_edges(const hidet_dist_pairwise_problem &given, Problem &problem) {
  problem.edges = static_cast<int>(given.edges);
  std::map<std::pair<std::int64_t, std::int64_t>, double> most_of;  // the greatest allowed entry of each matrix
  double total = 0;
  std::int64_t all = 0;  // entries
  for (std::int64_t e = 0; e < given.edges; ++e) {
    const std::int64_t u = given.edge_nodes[2 * e], v = given.edge_nodes[2 * e + 1];
    check(u >= 0 && u < given.nodes && v >= 0 && v < given.nodes && u != v, "the nodes of edge " + std::to_string(e));
    const std::int64_t begin = given.matrix_begin[given.edge_matrix[e]];
    const std::int64_t end =
        begin + static_cast<std::int64_t>(problem.size(static_cast<int>(u))) * problem.size(static_cast<int>(v));
    const auto [known, is_new] = most_of.emplace(std::make_pair(begin, end), 0.0);
    if (is_new) {
      all = std::max(all, end);
      for (std::int64_t k = begin; k < end; ++k) {
        check(given.entries[k] >= 0, "a negative cost of edge " + std::to_string(e));
        if (given.entries[k] < given.forbidden) known->second = std::max(known->second, given.entries[k]);
      }
    }
    total += known->second;
    problem.first.push_back(static_cast<int>(u));
    problem.second.push_back(static_cast<int>(v));
    problem.matrix.push_back(begin);
  }
  problem.entries.assign(given.entries, given.entries + all);
  problem.set_incident();
  return total;
}

}  // namespace

double Problem::cost_of(const std::vector<int> &assignment) const {
  double sum = base_cost;
  for (int v = 0; v < nodes; ++v) sum += cost[strategy_begin[v] + assignment[v]];
  for (int e = 0; e < edges; ++e) sum += entry(e, first[e], assignment[first[e]], assignment[second[e]]);
  return sum;
}

std::vector<int> Problem::given_strategies(const std::vector<int> &assignment) const {
  std::vector<int> eliminated(eliminations.size());
  const auto choice = [&](std::size_t g) {
    const int part = part_of[g];
    const int strategy = part >= 0    ? assignment[part]
                         : part == -1 ? 0
                                      : eliminated[static_cast<std::size_t>(-2 - part)];
    return choices[static_cast<std::size_t>(choice_begin[g] + strategy)];
  };
  for (std::size_t k = eliminations.size(); k-- > 0;) {
    const Elimination &one = *eliminations[k];
    eliminated[k] = one.best[static_cast<std::size_t>(choice(one.first) * one.columns + choice(one.second))];
  }
  std::vector<int> given(given_nodes);
  for (std::size_t g = 0; g < given.size(); ++g) given[g] = choice(g);
  return given;
}

std::vector<int> Problem::assignment_of(const std::vector<int> &given) const {
  std::vector<char> possible(cost.size(), 1);
  for (std::size_t g = 0; g < given.size(); ++g) {
    const int *chosen = &choices[static_cast<std::size_t>(choice_begin[g])];
    if (part_of[g] == -1 && chosen[0] != given[g]) return {};
    if (part_of[g] < 0) continue;
    const int begin = strategy_begin[part_of[g]];
    for (int s = 0; s < size(part_of[g]); ++s)
      if (chosen[s] != given[g]) possible[begin + s] = 0;
  }
  std::vector<int> assignment(static_cast<std::size_t>(nodes));
  for (int v = 0; v < nodes; ++v) {
    const auto begin = possible.begin() + strategy_begin[v], end = possible.begin() + strategy_begin[v + 1];
    const auto found = std::find(begin, end, 1);
    if (found == end) return {};
    assignment[v] = static_cast<int>(found - begin);
  }
  return assignment;
}

Problem Problem::rebased() const {
  Problem made(*this);
  made.eliminations.clear();
  made.eliminated = 0;
  made.part_of.resize(static_cast<std::size_t>(nodes));
  std::iota(made.part_of.begin(), made.part_of.end(), 0);
  made.choice_begin.assign(strategy_begin.begin(), strategy_begin.end());
  made.choices.clear();
  for (int v = 0; v < nodes; ++v)
    for (int s = 0; s < size(v); ++s) made.choices.push_back(s);
  made.given_nodes = made.part_of.size();
  return made;
}

void Problem::set_incident() {
  incident_begin.assign(static_cast<std::size_t>(nodes) + 1, 0);
  for (int e = 0; e < edges; ++e) ++incident_begin[first[e] + 1], ++incident_begin[second[e] + 1];
  std::partial_sum(incident_begin.begin(), incident_begin.end(), incident_begin.begin());
  incident.resize(2 * static_cast<std::size_t>(edges));
  std::vector<int> next(incident_begin.begin(), incident_begin.end() - 1);
  for (int e = 0; e < edges; ++e) {
    incident[next[first[e]]++] = e;
    incident[next[second[e]]++] = e;
  }
}

bool reduce(const hidet_dist_pairwise_problem &given, const ReductionLimits &limits, bool within_limit,
            Problem &problem) {
  problem = Problem();
  problem.most_entries = limits.entries;
  const double total = set_nodes(given, problem) + set_edges(given, problem);
  problem.big = 4 * (total + 1);
  for (double &cost : problem.cost)
    if (cost >= given.forbidden) cost = problem.big;
  for (double &entry : problem.entries)
    if (entry >= given.forbidden) entry = problem.big;
  set_points(given, problem);
  return simplify(problem, limits, within_limit);
}

}  // namespace hidet_dist::pairwise
