/*
 * Dominance among the partial plans of a search: lines of numbers of which less is better.
 */
#ifndef HIDET_DIST_LABELS_H
#define HIDET_DIST_LABELS_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Marks the lines that no other line of the same group equals or undercuts in every column; of equal lines the first.
 *
 * `values` has `count` lines of `columns` numbers. Lines of a group are adjacent and in lexicographic order, so that a
 * line can only be dominated by one before it. keep[i] becomes 1 for a line to keep, else 0. At most `comparisons` pairs
 * of lines are compared. Returns how many of them are left, or -1 if more are needed; `keep` is incomplete then.
 */
HIDET_DIST_API int64_t hidet_dist_undominated(int64_t count, int64_t columns, const int64_t *group,
                                              const double *values, int64_t comparisons, uint8_t *keep);

#ifdef __cplusplus
}
#endif

#endif
