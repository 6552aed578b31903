// Merging of nodes. Where each strategy of a node allows only one of a neighbour, the neighbour has no choice of its own
// and becomes a part of the node: its costs, bytes and edges are those of the node's strategies. What remains has fewer
// nodes and hardly any forbidden pairs, so that messages converge sooner and to better bounds.
#pragma once

#include "problem.hpp"

namespace hidet_dist::pairwise {

// Merges and eliminates nodes, and removes strategies that others forbid or dominate until nothing changes; if
// `within_limit`, strategies that take more bytes than there are, and program points that cannot bind, too. False if a
// node has no strategy left, so that there is no assignment. Throws TooLarge or OutOfTime.
bool simplify(Problem &problem, const ReductionLimits &limits, bool within_limit);

// Makes the problem without some strategies, simplified, and translates the duals. False if no strategy is left of a
// node.
bool without(const Problem &problem, const std::vector<char> &removed, Problem &made, Duals &duals);

}  // namespace hidet_dist::pairwise
