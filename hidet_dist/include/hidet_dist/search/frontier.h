/*
 * Frontiers: all partial assignments of a network's variables that can become one of less than a given sum and within a
 * given number of bytes, and that no other one beats (the label-setting method for shortest paths with a resource
 * constraint; Desrochers and Soumis, INFOR 26(3), 1988).
 *
 * A *label* is such an assignment of the variables behind a bucket of the elimination. It has the bytes that its
 * factors hold at chosen points: those that are held always, the most at any point all of whose factors it decides, and
 * those at each point that is open, of whose factors it decides some. A label replaces others with the same values of
 * the bucket's neighbours that hold no less in any of these columns and cost no less.
 */
#ifndef HIDET_DIST_SEARCH_FRONTIER_H
#define HIDET_DIST_SEARCH_FRONTIER_H

#include "hidet_dist/search/elimination.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The bytes of the factors that were given to a network. Tables have the dims of their factor; a missing one is -1. */
typedef struct hidet_dist_frontier_bytes {
  const hidet_dist_tables *tables; /* what the numbers below stand for */
  const int64_t *paid;             /* by factor: the priced bytes, a part of the factor's entries */
  const int64_t *always;           /* by factor: the bytes that are always held */
  int64_t points;                  /* without any, labels have no columns of bytes */
  const int64_t *begin; /* by point, and the end: which of the next two arrays' elements are of the point */
  const int64_t *factor; /* a factor that holds bytes at the point */
  const int64_t *table; /* these bytes */
  const double *least; /* by point: bytes that are held there besides */
  double floor; /* the most of `least` of points at which no factor holds bytes */
  double most; /* the most bytes that may be held at any point */
} hidet_dist_frontier_bytes;

typedef struct hidet_dist_frontier_limits {
  double below; /* sums that are not below this are of no interest */
  int64_t joined; /* labels of one step, before those are dropped that others dominate: the limit is halved above */
  int64_t left; /* labels of one step after that: where there are more, the limit is lowered to their bounds */
  int64_t comparisons; /* pairs of labels compared at one step, above which the limit is lowered, too */
  int64_t halvings; /* of what the limit is above the least sum, at one step, before it is too wide */
} hidet_dist_frontier_limits;

typedef struct hidet_dist_frontier hidet_dist_frontier;

/* Finds the labels of all buckets of a network, after its marginals, and those of whole assignments. Returns NULL if it
 * fails, and writes the status. The network must outlive the frontier; `bytes` must not. */
HIDET_DIST_API hidet_dist_frontier *hidet_dist_frontier_create(const hidet_dist_network *network,
                                                               const hidet_dist_frontier_bytes *bytes,
                                                               const hidet_dist_frontier_limits *limits,
                                                               hidet_dist_elimination_stop stop, int32_t *status);
HIDET_DIST_API void hidet_dist_frontier_destroy(hidet_dist_frontier *frontier);

/* Returns the sum below which all assignments were considered: limits.below, or less if there were too many labels. */
HIDET_DIST_API double hidet_dist_frontier_below(const hidet_dist_frontier *frontier);

/* Counts the labels of whole assignments. */
HIDET_DIST_API int64_t hidet_dist_frontier_count(const hidet_dist_frontier *frontier);

/* Writes the sum of each whole assignment, in increasing order, and the priced bytes in it. */
HIDET_DIST_API void hidet_dist_frontier_sums(const hidet_dist_frontier *frontier, double *sums, double *paid);

/* Writes the values of all variables in a whole assignment. */
HIDET_DIST_API void hidet_dist_frontier_values(const hidet_dist_frontier *frontier, int64_t number, int64_t *values);

#ifdef __cplusplus
}
#endif

#endif
