// The reduced form of a pairwise problem: without forbidden strategies and parallel edges, and with only those program
// points at which memory can peak.
#pragma once

#include <cstdint>
#include <vector>

#include "hidet_dist/pairwise.h"

namespace hidet_dist::pairwise {

struct Problem {
  int nodes = 0;
  int edges = 0;
  int points = 0;        // program points
  double byte_limit = 0;
  double big = 0;        // the cost of a forbidden pair: above that of any assignment without one

  std::vector<int> strategy_begin;    // nodes + 1
  std::vector<double> cost, bytes;    // of each strategy
  std::vector<int> strategy;          // its number in the problem as given
  std::vector<int> begin, end;        // of each node, the program points at which it holds its bytes
  std::vector<int> first, second;     // of each edge, its nodes
  std::vector<std::int64_t> matrix;   // of each edge, where its matrix begins in `entries`
  std::vector<double> entries;        // matrices, rows of `first` by columns of `second`; equal ones once
  std::vector<int> incident_begin, incident;  // of each node, its edges
  std::vector<int> open;              // the nodes with more than one strategy

  int size(int node) const { return strategy_begin[node + 1] - strategy_begin[node]; }
  int other(int edge, int node) const { return first[edge] == node ? second[edge] : first[edge]; }

  // Entry of an edge for the strategies of `node` and of its other end.
  double entry(int edge, int node, int of_node, int of_other) const {
    const std::int64_t columns = size(second[edge]);
    return entries[first[edge] == node ? matrix[edge] + of_node * columns + of_other
                                       : matrix[edge] + of_other * columns + of_node];
  }

  double cost_of(const std::vector<int> &assignment) const;
};

// Checks the arguments, with std::invalid_argument for wrong ones, and reduces the problem. False if a node has no
// strategy left, so that no assignment is allowed.
bool reduce(const hidet_dist_pairwise_problem &given, Problem &problem);

}  // namespace hidet_dist::pairwise
