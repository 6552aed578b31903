/* What the scales of weights of few bits are, and their bytes: see hidet_dist/panels.h. */
#ifndef HIDET_DIST_KERNELS_SCALES_H
#define HIDET_DIST_KERNELS_SCALES_H

#include "hidet_dist/panels.h"

namespace hidet_dist {
namespace kernels {

constexpr bool is_affine(int scales) { return (scales & HIDET_DIST_AFFINE) != 0; }
constexpr bool is_wide(int scales) { return (scales & HIDET_DIST_WIDE) != 0; }

/* The bytes of a scale, or a minimum; and of those of a group of one column. */
constexpr int64_t number_bytes(int scales) { return is_wide(scales) ? 4 : 2; }
constexpr int64_t scale_bytes(int scales) { return number_bytes(scales) * (is_affine(scales) ? 2 : 1); }

}  // namespace kernels
}  // namespace hidet_dist

#endif
