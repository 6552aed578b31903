/*
 * Shortest paths from nodes of a graph whose edges are given on demand (E. W. Dijkstra, Numerische Mathematik 1, 1959).
 *
 * The paths of a node are one tree, which grows until it has the nodes that are asked for. Of paths of equal seconds the
 * one with the fewest edges that communicate is the shortest, then the one with the fewest edges, then the one that is
 * found first: nodes are visited in the order of their paths, and edges in the order in which they were given.
 *
 * Seconds are added in ticks of 2**-100 s, in 128 bits: those of floats from 1e-14 s up are exact, so that sums are the
 * same in any order, and equal ones compare equal.
 */
#ifndef HIDET_DIST_SEARCH_PATHS_H
#define HIDET_DIST_SEARCH_PATHS_H

#include <stdint.h>

#include "hidet_dist/visibility.h"

#ifdef __cplusplus
extern "C" {
#endif

enum hidet_dist_paths_status {
  HIDET_DIST_PATHS_REACHED = -1, /* the tree has paths to all targets */
  HIDET_DIST_PATHS_NONE = -2,    /* no path leads to one of them */
  HIDET_DIST_PATHS_NO_MEMORY = -3
};

typedef struct hidet_dist_paths hidet_dist_paths;

/* Makes a graph without edges. Returns NULL if there is no memory. */
HIDET_DIST_API hidet_dist_paths *hidet_dist_paths_create(void);
HIDET_DIST_API void hidet_dist_paths_destroy(hidet_dist_paths *paths);

/* Gives all edges of a node, which has none yet: the nodes that they lead to, their seconds (from 0), and whether they
 * communicate. Returns PATHS_REACHED or PATHS_NO_MEMORY. */
HIDET_DIST_API int32_t hidet_dist_paths_expand(hidet_dist_paths *paths, int32_t node, int64_t count,
                                               const int32_t *after, const double *seconds,
                                               const uint8_t *communicates);

/* Grows the tree of a node until it has all targets. Returns the node whose edges it needs next, to be called again
 * once they are given, or a status. */
HIDET_DIST_API int32_t hidet_dist_paths_reach(hidet_dist_paths *paths, int32_t source, int64_t count,
                                              const int32_t *targets);

/* Writes the seconds of the paths to targets that the tree of a node has. */
HIDET_DIST_API void hidet_dist_paths_seconds(const hidet_dist_paths *paths, int32_t source, int64_t count,
                                             const int32_t *targets, double *seconds);

/* Writes how many of the edges of these paths communicate. */
HIDET_DIST_API void hidet_dist_paths_communicating(const hidet_dist_paths *paths, int32_t source, int64_t count,
                                                   const int32_t *targets, int32_t *edges);

/* Writes the last edge of the path to a target: the node that it begins at, and its number among that node's edges. The
 * target is not the source. */
HIDET_DIST_API void hidet_dist_paths_last_edge(const hidet_dist_paths *paths, int32_t source, int32_t target,
                                               int32_t *edge);

/* The number of edges, and of nodes in trees. */
HIDET_DIST_API int64_t hidet_dist_paths_size(const hidet_dist_paths *paths);

#ifdef __cplusplus
}
#endif

#endif
