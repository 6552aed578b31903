// Elimination of nodes without bytes that have at most two neighbours: their least cost, for each pair of the
// neighbours' strategies, becomes an edge between these (U. Bertele, F. Brioschi, Nonserial Dynamic Programming, 1972).
// That is exact, and makes bounds of messages better where the neighbours have an edge already.
#pragma once

#include "problem.hpp"

namespace hidet_dist::pairwise {

// Eliminates nodes of which none is a neighbour of another, where that leaves no more entries, and translates the
// messages. The edges made may be parallel to others. Returns whether any was eliminated. Throws OutOfTime if there are
// `limits`.
bool eliminate(Problem &problem, Duals &duals, const ReductionLimits *limits);

}  // namespace hidet_dist::pairwise
