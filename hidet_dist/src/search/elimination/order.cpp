// The order of elimination. See elimination.h.
#include <algorithm>
#include <iterator>
#include <limits>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

#include "network.hpp"

namespace {

using hidet_dist::elimination::Order;
using hidet_dist::elimination::Stopped;
using hidet_dist::elimination::Variable;
using hidet_dist::elimination::Variables;

constexpr size_t kMostDims = 64;   // of an array in NumPy
constexpr size_t kCheckSteps = 256;  // from one call of the callback to the next

}  // namespace

Order hidet_dist_network::order(const uint8_t *kept, bool by_table, double work_limit,
                                hidet_dist_elimination_stop stop) const {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  const size_t count = sizes_.size();
  std::vector<Variables> adjacent(count);
  for (size_t f = 0; f < given; ++f) {
    const Variables &variables = factors_[f].variables;
    for (const Variable v : variables) {
      for (const Variable u : variables) {
        if (u != v) adjacent[static_cast<size_t>(v)].push_back(u);
      }
    }
  }
  for (Variables &around : adjacent) {
    std::sort(around.begin(), around.end());
    around.erase(std::unique(around.begin(), around.end()), around.end());
  }

  // Work first, or the size of the table that is left, and the work.
  using Priority = std::pair<double, double>;
  const auto priority = [&](size_t v) -> Priority {
    double table = 1.0;
    for (const Variable u : adjacent[v]) table *= static_cast<double>(sizes_[static_cast<size_t>(u)]);
    if (adjacent[v].size() >= kMostDims) table = kInfinite;
    const double work = table * static_cast<double>(sizes_[v]);
    return by_table ? Priority{table, work} : Priority{work, 0.0};
  };
  using Entry = std::pair<Priority, Variable>;
  std::vector<Priority> priorities(count);
  std::vector<Entry> entries;
  std::vector<uint8_t> waiting(count);
  for (size_t v = 0; v < count; ++v) {
    priorities[v] = priority(v);
    waiting[v] = kept == nullptr || !kept[v];
    if (waiting[v]) entries.emplace_back(priorities[v], static_cast<Variable>(v));
  }
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue(std::greater<Entry>(), std::move(entries));

  Order result{{}, 0.0, 0.0};
  std::set<double> works;
  Variables merged;
  while (!queue.empty()) {
    const auto [key, variable] = queue.top();
    queue.pop();
    const auto v = static_cast<size_t>(variable);
    if (!waiting[v] || key != priorities[v]) continue;
    const double work = by_table ? key.second : key.first;
    works.insert(work);
    if (work > work_limit) return {std::move(result.variables), kInfinite, kInfinite};
    if (result.variables.size() % kCheckSteps == 0 && stop()) throw Stopped();
    waiting[v] = 0;
    result.variables.push_back(variable);
    const Variables around = std::move(adjacent[v]);
    for (const Variable u : around) {
      Variables &own = adjacent[static_cast<size_t>(u)];
      merged.clear();
      std::set_union(own.begin(), own.end(), around.begin(), around.end(), std::back_inserter(merged));
      merged.erase(std::remove_if(merged.begin(), merged.end(), [&](Variable w) { return w == u || w == variable; }),
                   merged.end());
      own = merged;
    }
    for (const Variable u : around) {
      const auto other = static_cast<size_t>(u);
      priorities[other] = priority(other);
      if (waiting[other]) queue.emplace(priorities[other], u);
    }
  }
  for (const double work : works) {
    result.work += work;
    result.largest = work;
  }
  return result;
}
