// Merging of nodes. Where each strategy of a node allows only one of a neighbour, the neighbour has no choice of its own
// and becomes a part of the node: its costs, bytes and edges are those of the node's strategies. What remains has fewer
// nodes and hardly any forbidden pairs, so that messages converge sooner and to better bounds.
#pragma once

#include "problem.hpp"

namespace hidet_dist::pairwise {

// Merges nodes and removes strategies that others forbid or dominate until nothing changes; if `within_limit`, those
// too that take more bytes than there are. False if a node has no strategy left, so that there is no assignment.
bool merge(Problem &problem, bool within_limit);

// Makes the problem without some strategies, merged. False if none is left of a node.
bool without(const Problem &problem, const std::vector<char> &removed, Problem &made);

}  // namespace hidet_dist::pairwise
