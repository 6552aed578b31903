#include "trade.hpp"

#include <algorithm>

namespace hidet_dist::pairwise {

namespace {

constexpr int kMostNodes = 6;
constexpr std::int64_t kMostCombinations = 4096;
constexpr int kMostChecks = 16;   // of the memory of combinations that cost less
constexpr std::size_t kNear = 256;  // of the nodes that begin before a point, the last so many are looked at
constexpr double kNothing = 1e-12;  // relative: rounding is no improvement

}  // namespace

Trade::Trade(const Problem &problem) : problem_(problem) {
  for (int v = 0; v < problem.nodes; ++v)
    for (int h = problem.hold_begin[v]; h < problem.hold_begin[v + 1]; ++h) by_begin_.emplace_back(h, v);
  std::stable_sort(by_begin_.begin(), by_begin_.end(),
                   [&](const auto &a, const auto &b) { return problem.begin[a.first] < problem.begin[b.first]; });
}

// A neighbour of a node, or one that holds bytes at a point at which it does.
int Trade::beside(int node, std::mt19937_64 &random) const {
  const int first = problem_.incident_begin[node], edges = problem_.incident_begin[node + 1] - first;
  const int holds = problem_.hold_begin[node + 1] - problem_.hold_begin[node];
  if (edges > 0 && (holds == 0 || random() % 3 == 0))
    return problem_.other(problem_.incident[first + static_cast<int>(random() % static_cast<std::uint64_t>(edges))],
                          node);
  if (holds == 0) return node;
  const int hold = problem_.hold_begin[node] + static_cast<int>(random() % static_cast<std::uint64_t>(holds));
  const auto points = static_cast<std::uint64_t>(problem_.end[hold] - problem_.begin[hold]);
  const int point = problem_.begin[hold] + static_cast<int>(random() % points);
  const auto after = std::upper_bound(by_begin_.begin(), by_begin_.end(), point,
                                      [&](int t, const auto &one) { return t < problem_.begin[one.first]; });
  const auto before = static_cast<std::size_t>(after - by_begin_.begin());
  const std::size_t near = std::min(before, kNear);
  if (near == 0) return node;
  const auto [other_hold, other] = by_begin_[before - 1 - random() % near];
  return problem_.end[other_hold] > point ? other : node;
}

void Trade::choose(std::mt19937_64 &random) {
  chosen_.assign(1, static_cast<int>(random() % static_cast<std::uint64_t>(problem_.nodes)));
  std::int64_t combinations = problem_.size(chosen_[0]);
  const int wanted = 2 + static_cast<int>(random() % (kMostNodes - 1));
  for (int tries = 0; tries < 4 * wanted && static_cast<int>(chosen_.size()) < wanted; ++tries) {
    const int other = beside(chosen_[random() % chosen_.size()], random);
    if (std::find(chosen_.begin(), chosen_.end(), other) != chosen_.end()) continue;
    if (combinations * problem_.size(other) > kMostCombinations) continue;
    combinations *= problem_.size(other);
    chosen_.push_back(other);
  }
}

// The cost of each combination beside the assignment's. Its number has the strategy of the last node as its last digit.
void Trade::compare(const std::vector<int> &assignment) {
  sums_.assign(1, 0.0);
  std::int64_t current = 0;
  for (std::size_t k = 0; k < chosen_.size(); ++k) {
    const int node = chosen_[k], size = problem_.size(node), begin = problem_.strategy_begin[node];
    std::vector<double> alone(problem_.cost.begin() + begin, problem_.cost.begin() + begin + size);
    std::vector<std::pair<std::size_t, int>> inner;  // the chosen node before, and the edge to it
    for (int a = problem_.incident_begin[node]; a < problem_.incident_begin[node + 1]; ++a) {
      const int e = problem_.incident[a], other = problem_.other(e, node);
      const auto place = std::find(chosen_.begin(), chosen_.end(), other);
      if (place == chosen_.end()) {
        problem_.add_entries(e, node, assignment[other], alone.data());
      } else if (place < chosen_.begin() + static_cast<std::ptrdiff_t>(k)) {
        inner.emplace_back(static_cast<std::size_t>(place - chosen_.begin()), e);
      }
    }
    next_.resize(sums_.size() * static_cast<std::size_t>(size));
    for (std::size_t before = 0; before < sums_.size(); ++before) {
      for (int s = 0; s < size; ++s) {
        double sum = sums_[before] + alone[s];
        for (const auto &[j, e] : inner) {
          std::size_t rest = before;
          for (std::size_t digit = k; digit-- > j + 1;) rest /= static_cast<std::size_t>(problem_.size(chosen_[digit]));
          const int others = static_cast<int>(rest % static_cast<std::size_t>(problem_.size(chosen_[j])));
          sum += problem_.entry(e, node, s, others);
        }
        next_[before * static_cast<std::size_t>(size) + static_cast<std::size_t>(s)] = sum;
      }
    }
    std::swap(sums_, next_);
    current = current * size + assignment[node];
  }
  better_.clear();
  const double now = sums_[current];
  for (std::size_t c = 0; c < sums_.size(); ++c)
    if (sums_[c] < now - kNothing * now) better_.emplace_back(sums_[c] - now, static_cast<std::int64_t>(c));
}

void Trade::change_bytes(const std::vector<int> &assignment, std::int64_t combination, bool back,
                         Memory &memory) const {
  for (std::size_t k = chosen_.size(); k-- > 0;) {
    const int node = chosen_[k], size = problem_.size(node), now = assignment[node];
    const auto s = static_cast<int>(combination % size);
    combination /= size;
    memory.change(problem_, node, back ? s : now, back ? now : s);
  }
}

double Trade::attempt(std::vector<int> &assignment, Memory &memory, std::mt19937_64 &random) {
  choose(random);
  compare(assignment);
  const std::size_t checks = std::min<std::size_t>(better_.size(), kMostChecks);
  std::partial_sort(better_.begin(), better_.begin() + static_cast<std::ptrdiff_t>(checks), better_.end());
  for (std::size_t c = 0; c < checks; ++c) {
    std::int64_t combination = better_[c].second;
    change_bytes(assignment, combination, false, memory);
    if (memory.peak() > problem_.byte_limit) {
      change_bytes(assignment, combination, true, memory);
      continue;
    }
    for (std::size_t k = chosen_.size(); k-- > 0;) {
      assignment[chosen_[k]] = static_cast<int>(combination % problem_.size(chosen_[k]));
      combination /= problem_.size(chosen_[k]);
    }
    return better_[c].first;
  }
  return 0.0;
}

}  // namespace hidet_dist::pairwise
