// The products of each level; see product.hpp.
#pragma once

#include "hidet_dist/convolution.h"
#include "hidet_dist/panels.h"
#include "hidet_dist/winograd.h"

namespace hidet_dist {
namespace panels {

struct Level {
  int64_t width;
  int64_t scratch; /* bytes */
  int32_t (*multiply)(const hidet_dist_panel_product &product);
  int32_t (*convolve_depthwise)(const hidet_dist_convolution &convolution, const hidet_dist_convolution_part &part);
  void (*read_tiles)(const hidet_dist_convolution &convolution, const hidet_dist_winograd_part &part);
  void (*write_tiles)(const hidet_dist_convolution &convolution, const hidet_dist_winograd_part &part);
};

/* Null for an unknown level. */
const Level *level_of(int32_t level);

/* Computes a part of a product; HIDET_DIST_INVALID_ARGUMENT for an unknown level, dtype or layout. */
int32_t multiply_at(int32_t level, const hidet_dist_panel_product &product);

/* Of bfloat16 rows by bfloat16 panels, where the processor has dot products of these. */
void multiply_by_dots(const hidet_dist_panel_product &product);

extern const Level kBaseline, kThird, kFourth;

/* Products by panels of few bits. */
struct Quantized {
  int64_t (*row_bytes)(int64_t depth, int64_t group); /* of scratch memory */
  int32_t (*multiply)(const hidet_dist_quantized_product &product);
};

/* The level of AVX-512 with dot products of bytes, and without. */
extern const Quantized kQuantizedBaseline, kQuantizedThird, kQuantizedFourth, kVnni;

}  // namespace panels
}  // namespace hidet_dist
