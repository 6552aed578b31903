#include "merge.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "eliminate.hpp"
#include "memory.hpp"
#include "points.hpp"

namespace hidet_dist::pairwise {

namespace {

constexpr double kMostComparisons = 1e8;  // of entries, to find the strategies of one node that others dominate

// Where the messages of each edge to one of its nodes begin; `nodes` has that node of each edge.
std::vector<std::size_t> offsets(const Problem &problem, const std::vector<int> &nodes) {
  std::vector<std::size_t> begin;
  std::size_t sum = 0;
  for (const int node : nodes) {
    begin.push_back(sum);
    sum += static_cast<std::size_t>(problem.size(node));
  }
  return begin;
}

class Merge {
 public:
  // With limits, throws OutOfTime, and TooLarge where the problem after the changes would have too many entries.
  Merge(const Problem &problem, const ReductionLimits *limits)
      : p_(problem), limits_(limits), left_(problem.cost.size(), 1), into_(static_cast<std::size_t>(problem.nodes)) {
    for (std::size_t s = 0; s < left_.size(); ++s) left_[s] = problem.cost[s] < problem.big;
    std::iota(into_.begin(), into_.end(), 0);
    from_.resize(static_cast<std::size_t>(problem.nodes));
  }

  // Finds what to remove and merge. False if there is nothing.
  bool find(bool dominated, bool within_limit) {
    bool changes = within_limit && remove_too_large();
    changes = propagate() || changes;
    if (dominated) changes = remove_dominated() || changes;
    changes = find_merges() || changes;
    for (int v = 0; v < p_.nodes && !changes; ++v) changes = p_.size(v) == 1;
    return changes;
  }

  // Makes the problem after the changes; false if a node has no strategy left.
  bool apply(Problem &made, Duals &duals);

 private:
  void check() const {
    if (limits_ != nullptr) limits_->check();
  }
  bool is_left(int node, int s) const { return left_[static_cast<std::size_t>(p_.strategy_begin[node] + s)] != 0; }
  void remove(int node, int s) { left_[static_cast<std::size_t>(p_.strategy_begin[node] + s)] = 0; }

  // Arc consistency (AC-3, Mackworth 1977).
  bool propagate() {
    bool any = false;
    std::vector<char> queued(static_cast<std::size_t>(p_.nodes), 1);
    std::vector<int> queue(static_cast<std::size_t>(p_.nodes));
    std::iota(queue.begin(), queue.end(), 0);
    while (!queue.empty()) {
      const int changed = queue.back();
      queue.pop_back();
      queued[changed] = 0;
      for (int a = p_.incident_begin[changed]; a < p_.incident_begin[changed + 1]; ++a) {
        check();
        const int e = p_.incident[a], node = p_.other(e, changed);
        bool fewer = false;
        for (int i = 0; i < p_.size(node); ++i) {
          if (!is_left(node, i)) continue;
          bool supported = false;
          for (int j = 0; j < p_.size(changed) && !supported; ++j)
            supported = is_left(changed, j) && p_.entry(e, node, i, j) < p_.big;
          if (supported) continue;
          remove(node, i);
          fewer = any = true;
        }
        if (fewer && !queued[node]) {
          queued[node] = 1;
          queue.push_back(node);
        }
      }
    }
    return any;
  }

  // Removes strategies that do not fit even if all other nodes take their least bytes.
  bool remove_too_large() {
    bool any = false;
    Memory memory(p_, p_.base_bytes);
    for (int v = 0; v < p_.nodes; ++v)
      for (int s = 0; s < p_.size(v); ++s) {
        if (!is_left(v, s)) continue;
        memory.add(p_, v, s, 1.0);
        if (memory.peak() > p_.byte_limit) {
          remove(v, s);
          any = true;
        }
        memory.add(p_, v, s, -1.0);
      }
    return any;
  }

  // Removes strategies that never pay: another one of the node costs no more with any strategies of the neighbours, and
  // holds no more bytes (dead-end elimination; R. F. Goldstein, Biophysical Journal 66, 1994).
  bool remove_dominated() {
    bool any = false;
    for (int v = 0; v < p_.nodes; ++v) {
      const int size = p_.size(v);
      double comparisons = 0;
      for (int a = p_.incident_begin[v]; a < p_.incident_begin[v + 1]; ++a)
        comparisons += static_cast<double>(p_.size(p_.other(p_.incident[a], v))) * size * size;
      if (comparisons > kMostComparisons) continue;
      check();
      for (int worse = 0; worse < size; ++worse) {
        bool gone = !is_left(v, worse);
        for (int better = 0; better < size && !gone; ++better)
          gone = better != worse && is_left(v, better) && dominates(v, better, worse);
        if (!gone || !is_left(v, worse)) continue;
        remove(v, worse);
        any = true;
      }
    }
    return any;
  }

  bool dominates(int v, int better, int worse) const {
    for (int h = p_.hold_begin[v]; h < p_.hold_begin[v + 1]; ++h)
      if (p_.bytes[p_.held[h] + better] > p_.bytes[p_.held[h] + worse]) return false;
    const int begin = p_.strategy_begin[v];
    double change = p_.cost[begin + better] - p_.cost[begin + worse];
    for (int a = p_.incident_begin[v]; a < p_.incident_begin[v + 1]; ++a) {
      const int e = p_.incident[a], other = p_.other(e, v);
      double most = -p_.big;
      for (int s = 0; s < p_.size(other); ++s) {
        const double now = p_.entry(e, v, worse, s);
        if (!is_left(other, s) || now >= p_.big) continue;
        most = std::max(most, p_.entry(e, v, better, s) - now);
      }
      change += most;
    }
    return change <= 0;
  }

  // The only strategy of `other` that each strategy of `node` allows; empty if some allow more.
  std::vector<int> follows(int edge, int node, int other) const {
    std::vector<int> only(static_cast<std::size_t>(p_.size(node)), 0);
    for (int s = 0; s < p_.size(node); ++s) {
      if (!is_left(node, s)) continue;
      int count = 0;
      for (int t = 0; t < p_.size(other); ++t) {
        if (!is_left(other, t) || p_.entry(edge, node, s, t) >= p_.big) continue;
        if (++count > 1) return {};
        only[s] = t;
      }
    }
    return only;
  }

  int root(int node) const {
    while (into_[node] != node) node = into_[node];
    return node;
  }

  // Merges change the matrices of a node's other edges, and equal ones may become different. So there are only as many
  // as fit the limit of entries even then.
  bool find_merges() {
    bool any = false;
    std::int64_t left = p_.entries_left();
    for (int e = 0; e < p_.edges; ++e) {
      check();
      const int ends[] = {p_.first[e], p_.second[e]};
      for (const int side : {0, 1}) {
        const int node = ends[side], other = ends[1 - side];
        if (into_[other] != other || root(node) == other) continue;
        std::vector<int> only = follows(e, node, other);
        if (only.empty()) continue;
        std::int64_t changed = 0;
        for (int a = p_.incident_begin[other]; a < p_.incident_begin[other + 1]; ++a)
          if (p_.incident[a] != e)
            changed += static_cast<std::int64_t>(p_.size(root(node))) * p_.size(root(p_.other(p_.incident[a], other)));
        if (changed > left) continue;
        left -= changed;
        into_[other] = node;
        from_[other] = std::move(only);
        any = true;
        break;
      }
    }
    return any;
  }

  // The strategy of each node for each strategy of its root.
  void set_maps();
  bool keep_strategies();
  int number_of(const std::vector<int> &map) {
    return numbers_.emplace(map, static_cast<int>(numbers_.size())).first->second;
  }
  void add_holds(Problem &made);
  void add_edges(Problem &made, Duals &duals);
  void set_choices(Problem &made) const;

  const Problem &p_;
  const ReductionLimits *const limits_;
  std::vector<char> left_;
  std::vector<int> into_;                // the node that each is merged into; itself if it is not
  std::vector<std::vector<int>> from_;   // its strategy for each strategy of that node
  std::vector<int> roots_;
  std::vector<std::vector<int>> maps_;   // its strategy for each strategy kept of its root
  std::vector<int> map_number_;          // equal for equal maps
  std::map<std::vector<int>, int> numbers_;
  std::vector<int> made_;                // of each root, its node in the problem made, or -1 if it has one strategy
};

void Merge::set_maps() {
  roots_.resize(into_.size());
  maps_.resize(into_.size());
  for (int v = 0; v < p_.nodes; ++v) {
    const int top = roots_[v] = root(v);
    std::vector<int> path;
    for (int node = v; node != top; node = into_[node]) path.push_back(node);
    for (int s = 0; s < p_.size(top); ++s) {
      int strategy = s;
      bool there = is_left(top, s);
      for (auto node = path.rbegin(); node != path.rend() && there; ++node) {
        strategy = from_[*node][strategy];
        there = is_left(*node, strategy);
      }
      maps_[v].push_back(there ? strategy : -1);
    }
  }
}

// Removes the strategies of roots that a part of theirs forbids, and numbers the nodes.
bool Merge::keep_strategies() {
  std::vector<std::vector<char>> kept(into_.size());
  for (int v = 0; v < p_.nodes; ++v)
    if (roots_[v] == v) kept[v].assign(static_cast<std::size_t>(p_.size(v)), 1);
  for (int v = 0; v < p_.nodes; ++v)
    for (std::size_t s = 0; s < maps_[v].size(); ++s)
      if (maps_[v][s] < 0) kept[roots_[v]][s] = 0;
  for (int e = 0; e < p_.edges; ++e) {
    const int u = p_.first[e], v = p_.second[e];
    if (roots_[u] != roots_[v]) continue;
    std::vector<char> &of_root = kept[roots_[u]];
    for (std::size_t s = 0; s < of_root.size(); ++s)
      if (of_root[s] && p_.entry(e, u, maps_[u][s], maps_[v][s]) >= p_.big) of_root[s] = 0;
  }
  map_number_.resize(into_.size());
  for (int v = 0; v < p_.nodes; ++v) {
    const std::vector<char> &of_root = kept[roots_[v]];
    std::size_t count = 0;
    for (std::size_t s = 0; s < of_root.size(); ++s)
      if (of_root[s]) maps_[v][count++] = maps_[v][s];
    if (count == 0) return false;
    maps_[v].resize(count);
    map_number_[v] = number_of(maps_[v]);
  }
  return true;
}

void Merge::add_holds(Problem &made) {
  std::vector<std::vector<Hold>> holds(static_cast<std::size_t>(made.nodes));
  std::vector<double> base(static_cast<std::size_t>(made.points) + 1, 0.0);
  for (int v = 0; v < p_.nodes; ++v)
    for (int h = p_.hold_begin[v]; h < p_.hold_begin[v + 1]; ++h) {
      std::vector<double> bytes;
      for (const int s : maps_[v]) bytes.push_back(p_.bytes[p_.held[h] + s]);
      const double least = *std::min_element(bytes.begin(), bytes.end());
      base[p_.begin[h]] += least;
      base[p_.end[h]] -= least;
      bool differ = false;
      for (double &one : bytes) differ = (one -= least) > 0 || differ;
      if (differ) holds[made_[roots_[v]]].push_back({p_.begin[h], p_.end[h], std::move(bytes)});
    }
  for (int t = 0; t < made.points; ++t) {
    if (t > 0) base[t] += base[t - 1];
    made.base_bytes[t] += base[t];
  }
  set_holds(made, std::move(holds));
}

void Merge::add_edges(Problem &made, Duals &duals) {
  struct Term {
    int edge;
    bool turned;  // whether its second node is part of the first of the edge made
  };
  std::map<std::pair<int, int>, std::vector<Term>> parallel;
  for (int e = 0; e < p_.edges; ++e) {
    const int u = p_.first[e], v = p_.second[e];
    const int a = made_[roots_[u]], b = made_[roots_[v]];
    if (a < 0 && b < 0) {
      made.base_cost += p_.entry(e, u, maps_[u][0], maps_[v][0]);
    } else if (a < 0 || b < 0 || a == b) {
      const int node = std::max(a, b);
      for (int s = 0; s < made.size(node); ++s)
        made.cost[made.strategy_begin[node] + s] += p_.entry(e, u, maps_[u][a < 0 ? 0 : s], maps_[v][b < 0 ? 0 : s]);
    } else {
      parallel[{std::min(a, b), std::max(a, b)}].push_back({e, a > b});
    }
  }
  std::map<std::vector<std::int64_t>, std::int64_t> matrices;  // where each begins
  for (const auto &[ends, terms] : parallel) {
    std::vector<std::int64_t> key;
    for (const auto &[e, turned] : terms) {
      key.push_back(2 * p_.matrix[e] + (turned ? 1 : 0));
      key.push_back(map_number_[p_.first[e]]);
      key.push_back(map_number_[p_.second[e]]);
    }
    const auto [known, is_new] = matrices.emplace(std::move(key), static_cast<std::int64_t>(made.entries.size()));
    if (is_new) {
      const int rows = made.size(ends.first), columns = made.size(ends.second);
      check();
      if (limits_ != nullptr && static_cast<std::int64_t>(rows) * columns > made.entries_left())
        throw TooLarge("its matrices take more memory than allowed while it is reduced");
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) {
          double sum = 0;
          for (const auto &[e, turned] : terms)
            sum += p_.entry(e, p_.first[e], maps_[p_.first[e]][turned ? j : i], maps_[p_.second[e]][turned ? i : j]);
          made.entries.push_back(std::min(sum, made.big));
        }
    }
    made.first.push_back(ends.first);
    made.second.push_back(ends.second);
    made.matrix.push_back(known->second);
  }
  made.edges = static_cast<int>(made.first.size());
  made.set_incident();
  if (duals.first.empty()) return;
  const std::vector<std::size_t> to_first = offsets(p_, p_.first), to_second = offsets(p_, p_.second);
  Duals moved{std::move(duals.prices), {}, {}};
  for (const auto &[ends, terms] : parallel)
    for (const bool of_first : {true, false}) {
      std::vector<double> &sums = of_first ? moved.first : moved.second;
      const int node = of_first ? ends.first : ends.second;
      const std::size_t begin = sums.size();
      sums.resize(begin + static_cast<std::size_t>(made.size(node)), 0.0);
      for (const auto &[e, turned] : terms) {
        const bool from_first = of_first != turned;
        const double *from = from_first ? &duals.first[to_first[e]] : &duals.second[to_second[e]];
        const std::vector<int> &map = maps_[from_first ? p_.first[e] : p_.second[e]];
        for (std::size_t s = 0; s < map.size(); ++s) sums[begin + s] += from[map[s]];
      }
    }
  duals = std::move(moved);
}

void Merge::set_choices(Problem &made) const {
  made.choice_begin.assign(1, 0);
  for (std::size_t g = 0; g < p_.part_of.size(); ++g) {
    const int v = p_.part_of[g];
    const int *of_node = &p_.choices[static_cast<std::size_t>(p_.choice_begin[g])];
    if (v < 0) {
      made.part_of.push_back(v);
      made.choices.insert(made.choices.end(), of_node, of_node + (p_.choice_begin[g + 1] - p_.choice_begin[g]));
    } else {
      made.part_of.push_back(made_[roots_[v]]);
      for (const int s : maps_[v]) made.choices.push_back(of_node[s]);
    }
    made.choice_begin.push_back(static_cast<std::int64_t>(made.choices.size()));
  }
}

bool Merge::apply(Problem &made, Duals &duals) {
  set_maps();
  if (!keep_strategies()) return false;
  made.points = p_.points;
  made.given_nodes = p_.given_nodes;
  made.eliminations = p_.eliminations;
  made.eliminated = p_.eliminated;
  made.most_entries = p_.most_entries;
  made.byte_limit = p_.byte_limit;
  made.big = p_.big;
  made.base_cost = p_.base_cost;
  made.base_bytes = p_.base_bytes;
  made.strategy_begin.assign(1, 0);
  made_.assign(into_.size(), -1);
  for (int v = 0; v < p_.nodes; ++v) {
    if (roots_[v] != v) continue;
    const int strategies = static_cast<int>(maps_[v].size());
    if (strategies == 1) continue;
    made_[v] = made.nodes++;
    made.strategy_begin.push_back(made.strategy_begin.back() + strategies);
  }
  made.cost.assign(static_cast<std::size_t>(made.strategy_begin.back()), 0.0);
  for (int v = 0; v < p_.nodes; ++v) {
    const int node = made_[roots_[v]];
    for (std::size_t s = 0; s < maps_[v].size(); ++s) {
      const double cost = p_.cost[p_.strategy_begin[v] + maps_[v][s]];
      if (node < 0)
        made.base_cost += cost;
      else
        made.cost[made.strategy_begin[node] + static_cast<int>(s)] += cost;
    }
  }
  add_holds(made);
  add_edges(made, duals);
  set_choices(made);
  return made.base_cost < made.big;
}

}  // namespace

namespace {

bool merge(Problem &problem, bool within_limit, const ReductionLimits *limits, Duals &duals) {
  bool dominated = false;
  for (bool first = true;; first = false) {  // the first step always adds parallel edges
    Merge step(problem, limits);
    const bool changes = step.find(dominated, within_limit);
    if (!changes && !first) {
      if (dominated || limits == nullptr) return true;
      dominated = true;
      continue;
    }
    dominated = false;
    Problem made;
    if (!step.apply(made, duals)) return false;
    problem = std::move(made);
    if (within_limit && std::any_of(problem.base_bytes.begin(), problem.base_bytes.end(),
                                    [&](double bytes) { return bytes > problem.byte_limit; }))
      return false;
  }
}

// `limits` are those of a problem as given, whose strategies that others dominate go. Later, those of the best
// assignment must stay, though others may be as good; and parts of problems are smaller, and need no limits.
bool simplify(Problem &problem, bool within_limit, const ReductionLimits *limits, Duals &duals) {
  for (;;) {
    if (!merge(problem, within_limit, limits, duals)) return false;
    bool fewer = within_limit && remove_points(problem, duals.prices);
    fewer = eliminate(problem, duals, limits) || fewer;
    if (!fewer) return true;
  }
}

}  // namespace

bool simplify(Problem &problem, const ReductionLimits &limits, bool within_limit) {
  Duals none;
  return simplify(problem, within_limit, &limits, none);
}

bool without(const Problem &problem, const std::vector<char> &removed, Problem &made, Duals &duals) {
  made = problem;
  for (std::size_t s = 0; s < removed.size(); ++s)
    if (removed[s]) made.cost[s] = made.big;
  return simplify(made, true, nullptr, duals);
}

}  // namespace hidet_dist::pairwise
