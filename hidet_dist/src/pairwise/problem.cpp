#include "problem.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

namespace hidet_dist::pairwise {

namespace {

constexpr std::int64_t kMost = 1 << 30;  // of nodes, edges and strategies: they are counted in int

void check(bool holds, const std::string &what) {
  if (!holds) throw std::invalid_argument("not a pairwise problem: " + what);
}

// The given problem, and which of its strategies remain.
struct Given {
  const hidet_dist_pairwise_problem &p;
  std::vector<std::vector<std::int64_t>> incident;
  std::vector<char> left;

  explicit Given(const hidet_dist_pairwise_problem &given) : p(given) {
    check(p.nodes >= 0 && p.nodes < kMost && p.edges >= 0 && p.edges < kMost, "the number of nodes or edges");
    check(p.strategy_begin[0] == 0 && p.strategy_begin[p.nodes] < kMost, "the number of strategies");
    check(p.byte_limit >= 0 && p.forbidden > 0, "the limit of bytes, or the cost of what is forbidden");
    incident.resize(static_cast<std::size_t>(p.nodes));
    left.assign(static_cast<std::size_t>(p.strategy_begin[p.nodes]), 1);
    for (std::int64_t v = 0; v < p.nodes; ++v) {
      check(size(v) > 0, "node " + std::to_string(v) + " has no strategy");
      for (std::int64_t s = p.strategy_begin[v]; s < p.strategy_begin[v + 1]; ++s) {
        check(p.cost[s] >= 0 && p.bytes[s] >= 0, "a negative cost, or bytes, of node " + std::to_string(v));
        if (p.cost[s] >= p.forbidden) left[static_cast<std::size_t>(s)] = 0;
      }
    }
    for (std::int64_t e = 0; e < p.edges; ++e) {
      const std::int64_t u = p.edge_nodes[2 * e], v = p.edge_nodes[2 * e + 1];
      check(u >= 0 && u < p.nodes && v >= 0 && v < p.nodes && u != v, "the nodes of edge " + std::to_string(e));
      incident[static_cast<std::size_t>(u)].push_back(e);
      incident[static_cast<std::size_t>(v)].push_back(e);
    }
  }

  std::int64_t size(std::int64_t node) const { return p.strategy_begin[node + 1] - p.strategy_begin[node]; }
  bool is_left(std::int64_t node, std::int64_t s) const {
    return left[static_cast<std::size_t>(p.strategy_begin[node] + s)] != 0;
  }
  double entry(std::int64_t edge, std::int64_t i, std::int64_t j) const {
    return p.entries[p.matrix_begin[p.edge_matrix[edge]] + i * size(p.edge_nodes[2 * edge + 1]) + j];
  }

  // Arc consistency: removes strategies that no strategy of some neighbour is compatible with (AC-3, Mackworth 1977).
  void propagate() {
    std::vector<char> queued(static_cast<std::size_t>(p.nodes), 1);
    std::vector<std::int64_t> queue(static_cast<std::size_t>(p.nodes));
    std::iota(queue.begin(), queue.end(), 0);
    while (!queue.empty()) {
      const std::int64_t changed = queue.back();
      queue.pop_back();
      queued[static_cast<std::size_t>(changed)] = 0;
      for (const std::int64_t e : incident[static_cast<std::size_t>(changed)]) {
        const std::int64_t u = p.edge_nodes[2 * e], v = p.edge_nodes[2 * e + 1];
        const std::int64_t node = u == changed ? v : u;
        bool fewer = false;
        for (std::int64_t i = 0; i < size(node); ++i) {
          if (!is_left(node, i)) continue;
          bool supported = false;
          for (std::int64_t j = 0; j < size(changed) && !supported; ++j)
            supported = is_left(changed, j) && (node == u ? entry(e, i, j) : entry(e, j, i)) < p.forbidden;
          if (supported) continue;
          left[static_cast<std::size_t>(p.strategy_begin[node] + i)] = 0;
          fewer = true;
        }
        if (fewer && !queued[static_cast<std::size_t>(node)]) {
          queued[static_cast<std::size_t>(node)] = 1;
          queue.push_back(node);
        }
      }
    }
  }
};

// Memory can peak only at a point where a node begins and after which a node ends before another begins.
void set_points(const hidet_dist_pairwise_problem &given, Problem &problem) {
  std::vector<std::pair<std::int64_t, int>> events;
  for (int v = 0; v < problem.nodes; ++v) {
    if (given.interval_begin[v] >= given.interval_end[v]) continue;
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
  problem.begin.assign(static_cast<std::size_t>(problem.nodes), 0);
  problem.end.assign(static_cast<std::size_t>(problem.nodes), 0);
  for (int v = 0; v < problem.nodes; ++v) {
    if (given.interval_begin[v] >= given.interval_end[v]) continue;
    problem.begin[v] = number(given.interval_begin[v]);
    problem.end[v] = number(given.interval_end[v]);
  }
}

}  // namespace

double Problem::cost_of(const std::vector<int> &assignment) const {
  double sum = 0;
  for (int v = 0; v < nodes; ++v) sum += cost[strategy_begin[v] + assignment[v]];
  for (int e = 0; e < edges; ++e) sum += entry(e, first[e], assignment[first[e]], assignment[second[e]]);
  return sum;
}

bool reduce(const hidet_dist_pairwise_problem &p, Problem &problem) {
  Given given(p);
  given.propagate();
  problem.nodes = static_cast<int>(p.nodes);
  problem.byte_limit = p.byte_limit;
  problem.strategy_begin.assign(1, 0);
  std::vector<std::vector<int>> kept(static_cast<std::size_t>(p.nodes));
  std::map<std::vector<int>, int> kept_sets;
  std::vector<int> kept_set(static_cast<std::size_t>(p.nodes));
  double total = 1;  // more than any assignment without a forbidden pair costs
  for (int v = 0; v < problem.nodes; ++v) {
    double most = 0;
    for (int s = 0; s < given.size(v); ++s) {
      if (!given.is_left(v, s)) continue;
      kept[v].push_back(s);
      problem.strategy.push_back(s);
      problem.cost.push_back(p.cost[p.strategy_begin[v] + s]);
      problem.bytes.push_back(p.bytes[p.strategy_begin[v] + s]);
      most = std::max(most, problem.cost.back());
    }
    if (kept[v].empty()) return false;
    if (kept[v].size() > 1) problem.open.push_back(v);
    total += most;
    problem.strategy_begin.push_back(static_cast<int>(problem.cost.size()));
    kept_set[v] = kept_sets.emplace(kept[v], static_cast<int>(kept_sets.size())).first->second;
  }
  // Parallel edges are added. Edges of equal matrices and equal remaining strategies share one matrix.
  std::map<std::pair<int, int>, std::vector<std::pair<std::int64_t, bool>>> parallel;  // edge, and whether it is turned
  for (std::int64_t e = 0; e < p.edges; ++e) {
    const int u = static_cast<int>(p.edge_nodes[2 * e]), v = static_cast<int>(p.edge_nodes[2 * e + 1]);
    parallel[{std::min(u, v), std::max(u, v)}].emplace_back(e, u > v);
  }
  std::map<std::vector<std::int64_t>, std::pair<std::int64_t, double>> matrices;  // its place and greatest entry
  constexpr double kForbidden = -1;
  for (const auto &[ends, edges] : parallel) {
    const auto [u, v] = ends;
    std::vector<std::int64_t> key{kept_set[u], kept_set[v]};
    for (const auto &[e, turned] : edges) key.push_back(2 * p.edge_matrix[e] + (turned ? 1 : 0));
    auto known = matrices.find(key);
    if (known == matrices.end()) {
      const auto place = static_cast<std::int64_t>(problem.entries.size());
      double most = 0;
      for (const int i : kept[u])
        for (const int j : kept[v]) {
          double sum = 0;
          for (const auto &[e, turned] : edges) {
            const double entry = turned ? given.entry(e, j, i) : given.entry(e, i, j);
            check(entry >= 0, "a negative cost of edge " + std::to_string(e));
            if (entry >= p.forbidden || sum < 0)
              sum = kForbidden;
            else
              sum += entry;
          }
          most = std::max(most, sum);
          problem.entries.push_back(sum);
        }
      known = matrices.emplace(std::move(key), std::make_pair(place, most)).first;
    }
    problem.first.push_back(u);
    problem.second.push_back(v);
    problem.matrix.push_back(known->second.first);
    total += known->second.second;
  }
  problem.edges = static_cast<int>(problem.first.size());
  problem.big = 4 * total;
  for (double &entry : problem.entries)
    if (entry < 0) entry = problem.big;
  set_points(p, problem);
  problem.incident_begin.assign(static_cast<std::size_t>(problem.nodes) + 1, 0);
  for (int e = 0; e < problem.edges; ++e)
    ++problem.incident_begin[problem.first[e] + 1], ++problem.incident_begin[problem.second[e] + 1];
  std::partial_sum(problem.incident_begin.begin(), problem.incident_begin.end(), problem.incident_begin.begin());
  problem.incident.resize(2 * static_cast<std::size_t>(problem.edges));
  std::vector<int> next(problem.incident_begin.begin(), problem.incident_begin.end() - 1);
  for (int e = 0; e < problem.edges; ++e) {
    problem.incident[next[problem.first[e]]++] = e;
    problem.incident[next[problem.second[e]]++] = e;
  }
  return true;
}

}  // namespace hidet_dist::pairwise
