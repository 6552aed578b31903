/*
 * Checks of indices in a call's inputs, before a program uses them.
 */
#ifndef HIDET_DIST_INDICES_H
#define HIDET_DIST_INDICES_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Finds the first integer that is less than `least` or greater than `greatest`.
 *
 * The integers have `bytes` bytes each (1, 2, 4 or 8). They are a strided view of `dims` dims from `data` on, with
 * strides in elements. Returns 1 if there is such an integer: outside[0] is its offset in elements from `data`,
 * outside[1] its value modulo 2^64. Returns 0 if there is none, -1 for integers of other sizes.
 */
HIDET_DIST_API int32_t hidet_dist_find_outside(const void *data, int32_t bytes, int32_t is_signed, int32_t dims,
                                               const int64_t *shape, const int64_t *strides, int64_t least,
                                               int64_t greatest, int64_t *outside);

#ifdef __cplusplus
}
#endif

#endif
