// The reduced form of a pairwise problem: without forbidden strategies and parallel edges, with nodes whose strategies
// follow from those of another merged into it, and with only those program points at which memory can peak.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "hidet_dist/search/pairwise.h"

namespace hidet_dist::pairwise {

// The best strategy of an eliminated node for those of its neighbours, of which there are two at most.
struct Elimination {
  std::size_t first, second;  // the neighbours, as entries of Problem::part_of, of one strategy where there are fewer
  int columns;  // strategies of the second one
  std::vector<int> best;
};

// Multipliers: any values give a lower bound. The reductions of a problem translate them.
struct Duals {
  std::vector<double> prices;  // of a byte at each program point; none: 0
  std::vector<double> first, second;  // the costs moved into each edge from the strategies of its nodes; none: 0
};

// The entries of a problem take more than the memory that is allowed.
struct TooLarge : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The time was over before the problem was reduced.
struct OutOfTime : std::exception {};

// What the reduction of a problem as given may take.
struct ReductionLimits {
  std::int64_t entries;  // of matrices; see Problem::most_entries
  std::function<bool()> over;  // whether the time is

  void check() const {
    if (over()) throw OutOfTime();
  }
};

struct Problem {
  int nodes = 0;
  int edges = 0;
  int points = 0;  // program points
  double byte_limit = 0;
  std::int64_t most_entries = 0;  // of matrices; those of eliminations count half
  double big = 0;  // the cost of a forbidden pair: above that of any assignment without one

  double base_cost = 0;  // of what has no choice
  std::vector<double> base_bytes;  // held at each program point, whatever is chosen
  std::vector<int> strategy_begin;  // nodes + 1
  std::vector<double> cost;  // of each strategy
  std::vector<int> hold_begin;  // nodes + 1: the holds of each node
  std::vector<int> begin, end;  // of each hold, its program points
  std::vector<std::int64_t> held;  // of each hold, where its bytes begin in `bytes`
  std::vector<double> bytes;  // one per strategy of the hold's node; the least is 0
  std::vector<int> first, second;  // of each edge, its nodes
  std::vector<std::int64_t> matrix;  // of each edge, where its matrix begins in `entries`
  std::vector<double> entries;  // matrices, rows of `first` by columns of `second`; equal ones once
  std::vector<int> incident_begin, incident;  // of each node, its edges

  // The nodes as given, and after them those on which eliminated ones depend: the node here that each is part of, -1 if
  // it has no choice, or -2 - k if it is part of the node of elimination k; and its strategy for each strategy of that
  // node.
  std::vector<int> part_of;
  std::vector<std::int64_t> choice_begin;
  std::vector<int> choices;
  std::vector<std::shared_ptr<const Elimination>> eliminations;  // each depends on nodes here and on later ones
  std::int64_t eliminated = 0;  // entries of these
  std::size_t given_nodes = 0;

  // How many more entries there may be.
  std::int64_t entries_left() const {
    return most_entries - static_cast<std::int64_t>(entries.size()) - (eliminated + 1) / 2;
  }

  int size(int node) const { return strategy_begin[node + 1] - strategy_begin[node]; }
  int degree(int node) const { return incident_begin[node + 1] - incident_begin[node]; }
  int other(int edge, int node) const { return first[edge] == node ? second[edge] : first[edge]; }

  // Entry of an edge for the strategies of `node` and of its other end.
  double entry(int edge, int node, int of_node, int of_other) const {
    const std::int64_t columns = size(second[edge]);
    return entries[first[edge] == node ? matrix[edge] + of_node * columns + of_other
                                       : matrix[edge] + of_other * columns + of_node];
  }

  // Adds the entries of an edge for each strategy of `node`, at a strategy of its other end.
  void add_entries(int edge, int node, int of_other, double *sums) const {
    const std::int64_t rows = size(first[edge]), columns = size(second[edge]);
    const double *from = &entries[matrix[edge]];
    if (first[edge] == node)
      for (std::int64_t s = 0; s < rows; ++s) sums[s] += from[s * columns + of_other];
    else
      for (std::int64_t s = 0; s < columns; ++s) sums[s] += from[of_other * columns + s];
  }

  // Adds the priced bytes of a node to a value for each of its strategies. `price_sums[t]` is the sum of the prices of
  // the program points before t.
  void add_priced(int node, const std::vector<double> &price_sums, double *sums) const {
    const int strategies = size(node);
    for (int h = hold_begin[node]; h < hold_begin[node + 1]; ++h) {
      const double price = price_sums[end[h]] - price_sums[begin[h]];
      if (price == 0) continue;
      const double *of_hold = &bytes[held[h]];
      for (int s = 0; s < strategies; ++s) sums[s] += price * of_hold[s];
    }
  }

  // The priced bytes that a node holds with one strategy more than with another.
  double priced_change(int node, int from, int to, const std::vector<double> &price_sums) const {
    double sum = 0;
    for (int h = hold_begin[node]; h < hold_begin[node + 1]; ++h)
      sum += (price_sums[end[h]] - price_sums[begin[h]]) * (bytes[held[h] + to] - bytes[held[h] + from]);
    return sum;
  }

  // The strategies of the nodes as given for an assignment.
  std::vector<int> given_strategies(const std::vector<int> &assignment) const;
  // The assignment for strategies of the nodes as given; empty if some of them have been removed.
  std::vector<int> assignment_of(const std::vector<int> &given) const;

  double cost_of(const std::vector<int> &assignment) const;

  // The same problem, with its nodes as those given.
  Problem rebased() const;

  // Sets `incident` from the edges' nodes.
  void set_incident();
};

// Checks the arguments, with std::invalid_argument for wrong ones, and reduces the problem. False if a node has no
// strategy left, so that there is no assignment: none that is allowed, or, if `within_limit`, none that is and fits.
// Throws TooLarge or OutOfTime where that takes more than the limits.
bool reduce(const hidet_dist_pairwise_problem &given, const ReductionLimits &limits, bool within_limit,
            Problem &problem);

}  // namespace hidet_dist::pairwise
