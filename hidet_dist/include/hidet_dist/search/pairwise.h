/*
 * Pairwise problems with a memory limit. Each node takes one of its strategies, which has a cost and a number of bytes
 * that it holds during an interval of program points. Each edge has a matrix of costs, by the strategies of its two
 * nodes. The sum of all costs is minimized, with at most `byte_limit` bytes held at every program point. This is the
 * problem of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism. The search for plans has the same form, if
 * tensors with several readers get additional nodes.
 *
 * Results are exact: the cost is that of the returned strategies, which fit the limit, and no assignment that fits
 * costs less than the bound. The gap between the two depends on heuristics.
 */
#ifndef HIDET_DIST_SEARCH_PAIRWISE_H
#define HIDET_DIST_SEARCH_PAIRWISE_H

#include <stdint.h>

#include "hidet_dist/visibility.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A problem as flat arrays. Costs and bytes are not negative. Strategy s of node v is the entry strategy_begin[v] + s
 * of `cost` and `bytes`. Edge e joins the nodes edge_nodes[2 e] and edge_nodes[2 e + 1], say u and v; strategies i of u
 * and j of v cost entries[matrix_begin[edge_matrix[e]] + i * |v| + j]. Costs of `forbidden` or more forbid a strategy,
 * or a pair of them; the sum of all other costs must be below it. */
typedef struct hidet_dist_pairwise_problem {
  int64_t nodes;
  int64_t edges;
  const int64_t *strategy_begin; /* nodes + 1 */
  const double *cost;
  const double *bytes;
  const int64_t *interval_begin; /* of each node; it holds its bytes from here */
  const int64_t *interval_end;   /* up to, not including, this program point */
  const int64_t *edge_nodes;     /* 2 edges */
  const int64_t *edge_matrix;    /* edges */
  const int64_t *matrix_begin;
  const double *entries;
  double byte_limit;
  double forbidden;
} hidet_dist_pairwise_problem;

/* The stopping criteria: `seconds`, `rounds` (each alternates bounding and searching; 0 for any number), or
 * cost - bound <= gap * cost. With rounds and no limit of seconds, the result depends on the arguments only, whatever the
 * number of threads. */
typedef struct hidet_dist_pairwise_options {
  double seconds;
  double gap;
  int64_t rounds;
  int64_t seed;
  int64_t threads;  /* 1, or 2 to bound and search at the same time */
  int64_t cpu_time; /* not 0: seconds are those of the process's CPU time, divided by the threads */
  int64_t entries;  /* how many doubles matrices may have while the problem is reduced; 0 for any number */
} hidet_dist_pairwise_options;

typedef struct hidet_dist_pairwise_result {
  double cost;  /* of the returned strategies; `forbidden` or more without an assignment */
  double bound; /* no assignment costs less */
  double seconds;
  int64_t rounds;
} hidet_dist_pairwise_result;

/* Called with the elapsed seconds at each better assignment or bound, and at least once per round; a result other than
 * 0 ends the search. `cost` is `forbidden` as long as no assignment is known. */
typedef int32_t (*hidet_dist_pairwise_progress)(void *context, double seconds, double cost, double bound);

/* Solves a problem. Returns 0 with an assignment, a strategy for each node; 1 if none is known when the time is over; 2
 * if none is allowed, 3 if none of those that are fits the limit, 4 if the matrices have too many entries; -1 if the
 * arguments are invalid (see hidet_dist_last_error). From any thread. */
HIDET_DIST_API int32_t hidet_dist_pairwise_solve(const hidet_dist_pairwise_problem *problem,
                                                 const hidet_dist_pairwise_options *options,
                                                 hidet_dist_pairwise_progress progress, void *context,
                                                 int32_t *strategies, hidet_dist_pairwise_result *result);

#ifdef __cplusplus
}
#endif

#endif
