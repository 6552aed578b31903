#include "forest.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace hidet_dist::pairwise {

namespace {

constexpr int kMostHeads = 200;  // random first nodes of a forest over all nodes, drawn by their numbers of edges
constexpr int kManyEdges = 200;  // the search around a node does not continue through nodes with more edges
constexpr int kNoParent = -1, kUnvisited = -2;

}  // namespace

Forest::Forest(const Problem &problem) : problem_(problem) {
  const auto nodes = static_cast<std::size_t>(problem.nodes);
  member_.assign(nodes, 0);
  seen_.assign(nodes, 0);
  counted_.assign(nodes, 0);
  tree_.assign(nodes, 0);
  parent_.assign(nodes, kNoParent);
  parent_edge_.assign(nodes, -1);
  place_.assign(nodes, 0);
}

int Forest::root(int node) {
  while (tree_[node] != node) node = tree_[node] = tree_[tree_[node]];
  return node;
}

// Adds a node unless that would close a cycle: its neighbours in the forest must be of different trees.
bool Forest::join(int node) {
  if (member_[node] == stamp_) return false;
  roots_.clear();
  ++counting_;
  for (int a = problem_.incident_begin[node]; a < problem_.incident_begin[node + 1]; ++a) {
    const int other = problem_.other(problem_.incident[a], node);
    if (member_[other] != stamp_) continue;
    const int top = root(other);
    if (counted_[top] == counting_) return false;
    counted_[top] = counting_;
    roots_.push_back(top);
  }
  member_[node] = stamp_;
  tree_[node] = node;
  for (const int top : roots_) tree_[top] = node;
  members_.push_back(node);
  return true;
}

void Forest::grow_all(std::mt19937_64 &random) {
  members_.clear();
  ++stamp_;
  if (problem_.edges > 0) {
    for (auto heads = random() % kMostHeads; heads > 0; --heads) {
      const int e = static_cast<int>(random() % static_cast<std::uint64_t>(problem_.edges));
      join(random() % 2 == 0 ? problem_.first[e] : problem_.second[e]);
    }
  }
  queue_.resize(static_cast<std::size_t>(problem_.nodes));
  std::iota(queue_.begin(), queue_.end(), 0);
  for (std::size_t k = queue_.size(); k > 1; --k) std::swap(queue_[k - 1], queue_[random() % k]);
  for (const int node : queue_) join(node);
}

void Forest::grow_around(int seed, int most, bool at_random, std::mt19937_64 &random) {
  members_.clear();
  ++stamp_;
  queue_.assign(1, seed);
  seen_[seed] = stamp_;
  for (std::size_t head = 0; head < queue_.size() && static_cast<int>(members_.size()) < most; ++head) {
    if (at_random) std::swap(queue_[head], queue_[head + random() % (queue_.size() - head)]);
    const int node = queue_[head];
    join(node);
    if (head > 0 && problem_.incident_begin[node + 1] - problem_.incident_begin[node] > kManyEdges) continue;
    for (int a = problem_.incident_begin[node]; a < problem_.incident_begin[node + 1]; ++a) {
      const int other = problem_.other(problem_.incident[a], node);
      if (seen_[other] == stamp_) continue;
      seen_[other] = stamp_;
      queue_.push_back(other);
    }
  }
}

void Forest::set_order() {
  order_.clear();
  for (const int node : members_) parent_[node] = kUnvisited;
  for (const int top : members_) {
    if (parent_[top] != kUnvisited) continue;
    parent_[top] = kNoParent;
    std::size_t head = order_.size();
    order_.push_back(top);
    for (; head < order_.size(); ++head) {
      const int node = order_[head];
      for (int a = problem_.incident_begin[node]; a < problem_.incident_begin[node + 1]; ++a) {
        const int e = problem_.incident[a], other = problem_.other(e, node);
        if (member_[other] != stamp_ || parent_[other] != kUnvisited) continue;
        parent_[other] = node;
        parent_edge_[other] = e;
        order_.push_back(other);
      }
    }
  }
  std::size_t values = 0, choices = 0;
  value_begin_.resize(order_.size());
  choice_begin_.resize(order_.size());
  for (std::size_t k = 0; k < order_.size(); ++k) {
    const int node = order_[k];
    place_[node] = static_cast<int>(k);
    value_begin_[k] = values;
    choice_begin_[k] = choices;
    values += static_cast<std::size_t>(problem_.size(node));
    if (parent_[node] != kNoParent) choices += static_cast<std::size_t>(problem_.size(parent_[node]));
  }
  values_.resize(values);
  choices_.resize(choices);
  best_.resize(order_.size());
}

bool Forest::solve(const std::vector<int> &assignment, const std::vector<double> &price_sums) {
  set_order();
  for (std::size_t k = 0; k < order_.size(); ++k) {
    const int node = order_[k], size = problem_.size(node), begin = problem_.strategy_begin[node];
    double *value = &values_[value_begin_[k]];
    std::copy_n(problem_.cost.begin() + begin, size, value);
    problem_.add_priced(node, price_sums, value);
    for (int a = problem_.incident_begin[node]; a < problem_.incident_begin[node + 1]; ++a) {
      const int e = problem_.incident[a], other = problem_.other(e, node);
      if (member_[other] == stamp_) continue;
      problem_.add_entries(e, node, assignment[other], value);
    }
  }
  for (std::size_t k = order_.size(); k-- > 0;) {
    const int node = order_[k], above = parent_[node];
    if (above == kNoParent) continue;
    const int edge = parent_edge_[node], size = problem_.size(node);
    const double *value = &values_[value_begin_[k]];
    double *of_parent = &values_[value_begin_[place_[above]]];
    // Steps in the matrix for the next strategy of the parent, and of the node.
    const double *matrix = &problem_.entries[problem_.matrix[edge]];
    const std::int64_t columns = problem_.size(problem_.second[edge]);
    const bool parent_first = problem_.first[edge] == above;
    const std::int64_t parent_step = parent_first ? columns : 1, step = parent_first ? 1 : columns;
    for (int i = 0; i < problem_.size(above); ++i) {
      const double *entry = matrix + i * parent_step;
      double least = entry[0] + value[0];
      int best = 0;
      for (int s = 1; s < size; ++s) {
        const double sum = entry[s * step] + value[s];
        if (sum < least) least = sum, best = s;
      }
      of_parent[i] += least;
      choices_[choice_begin_[k] + static_cast<std::size_t>(i)] = best;
    }
  }
  bool differs = false;
  for (std::size_t k = 0; k < order_.size(); ++k) {
    const int node = order_[k];
    if (parent_[node] == kNoParent) {
      const double *value = &values_[value_begin_[k]];
      int best = assignment[node];
      for (int s = 0; s < problem_.size(node); ++s)
        if (value[s] < value[best]) best = s;
      best_[k] = best;
    } else {
      best_[k] = choices_[choice_begin_[k] + static_cast<std::size_t>(best_[place_[parent_[node]]])];
    }
    differs = differs || best_[k] != assignment[node];
  }
  return differs;
}

double Forest::change(const std::vector<int> &assignment) const {
  double sum = 0;
  for (std::size_t k = 0; k < order_.size(); ++k) {
    const int node = order_[k], begin = problem_.strategy_begin[node];
    if (best_[k] == assignment[node]) continue;
    sum += problem_.cost[begin + best_[k]] - problem_.cost[begin + assignment[node]];
    for (int a = problem_.incident_begin[node]; a < problem_.incident_begin[node + 1]; ++a) {
      const int e = problem_.incident[a], other = problem_.other(e, node);
      const int others = member_[other] == stamp_ ? best_[place_[other]] : assignment[other];
      if (others != assignment[other] && other < node) continue;  // an edge whose ends both change counts once
      sum += problem_.entry(e, node, best_[k], others) - problem_.entry(e, node, assignment[node], assignment[other]);
    }
  }
  return sum;
}

}  // namespace hidet_dist::pairwise
