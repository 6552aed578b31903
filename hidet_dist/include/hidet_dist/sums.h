/*
 * Least sums of tables, for the search by variable elimination.
 */
#ifndef HIDET_DIST_SUMS_H
#define HIDET_DIST_SUMS_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Minimizes the sum of strided tables over some of their dims.
 *
 * `shape` has `dims` sizes. Table p begins at the address addresses[p], with strides[p * dims + d] elements from one index of dim d to
 * the next; a stride of 0 repeats the table. The strides of `result` are those of `result_strides`; where one is 0, the
 * minimum over that dim is taken. `result` must be filled with infinity, or with other upper bounds. No entry may be
 * NaN. Returns 0, or -1 if memory runs out.
 */
HIDET_DIST_API int32_t hidet_dist_least_sums(int32_t dims, const int64_t *shape, int32_t tables,
                                             const int64_t *addresses, const int64_t *strides,
                                             const int64_t *result_strides, double *result);

#ifdef __cplusplus
}
#endif

#endif
