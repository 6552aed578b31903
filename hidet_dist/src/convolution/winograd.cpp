// Convolutions by Winograd's minimal filtering. See winograd.h.
#include "hidet_dist/winograd.h"

#include "../panels/levels.hpp"

namespace {

bool is_served(const hidet_dist_convolution &v) {
  constexpr int64_t kKernel[] = {1, 3, 3};
  for (int dim = 0; dim < 3; ++dim) {
    if (v.kernel[dim] != kKernel[dim] || v.stride[dim] != 1 || v.dilation[dim] != 1) return false;
  }
  return v.groups == 1 && v.in[0] == 1 && v.out[0] == 1 && v.pad[0] == 0 && v.x_dtype == HIDET_DIST_F32 &&
         v.filters_dtype == HIDET_DIST_F32 && v.channels >= HIDET_DIST_WINOGRAD_LEAST_CHANNELS &&
         v.out_channels >= HIDET_DIST_WINOGRAD_LEAST_CHANNELS;
}

// The level of a part's transforms; null if it is unknown, or the convolution is not served.
const hidet_dist::panels::Level *level_for(int32_t level, const hidet_dist_convolution *v,
                                           const hidet_dist_winograd_part *part) {
  return v == nullptr || part == nullptr || !is_served(*v) ? nullptr : hidet_dist::panels::level_of(level);
}

}  // namespace

extern "C" int32_t hidet_dist_winograd_read(int32_t level, const hidet_dist_convolution *v,
                                            const hidet_dist_winograd_part *part) {
  const auto *const found = level_for(level, v, part);
  if (found == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
  found->read_tiles(*v, *part);
  return HIDET_DIST_OK;
}

extern "C" int32_t hidet_dist_winograd_write(int32_t level, const hidet_dist_convolution *v,
                                             const hidet_dist_winograd_part *part) {
  const auto *const found = level_for(level, v, part);
  if (found == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
  found->write_tiles(*v, *part);
  return HIDET_DIST_OK;
}
