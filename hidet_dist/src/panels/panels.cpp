// The choice of a level's products by panels. See panels.h.
#include "hidet_dist/panels.h"

#include "levels.hpp"

using hidet_dist::panels::level_of;

const hidet_dist::panels::Level *hidet_dist::panels::level_of(int32_t level) {
  switch (level) {
    case HIDET_DIST_X86_64:
      return &hidet_dist::panels::kBaseline;
    case HIDET_DIST_X86_64_V3:
      return &hidet_dist::panels::kThird;
    case HIDET_DIST_X86_64_V4:
      return &hidet_dist::panels::kFourth;
    default:
      return nullptr;
  }
}

int32_t hidet_dist::panels::multiply_at(int32_t level, const hidet_dist_panel_product &product) {
  static const bool has_dots = __builtin_cpu_supports("avx512bf16") != 0;
  const auto *found = level_of(level);
  if (found == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
  const bool brains = product.left_dtype == HIDET_DIST_BF16 && product.right_dtype == HIDET_DIST_BF16;
  if (!has_dots || level != HIDET_DIST_X86_64_V4 || !brains || product.layout != HIDET_DIST_IN_PANELS) {
    return found->multiply(product);
  }
  multiply_by_dots(product);
  return HIDET_DIST_OK;
}

extern "C" int64_t hidet_dist_panel_width(int32_t level) {
  const auto *found = level_of(level);
  return found == nullptr ? 0 : found->width;
}

extern "C" int64_t hidet_dist_panels_scratch(int32_t level) {
  const auto *found = level_of(level);
  return found == nullptr ? 0 : found->scratch;
}

extern "C" int32_t hidet_dist_multiply_panels(int32_t level, const hidet_dist_panel_product *product) {
  return product == nullptr ? HIDET_DIST_INVALID_ARGUMENT : hidet_dist::panels::multiply_at(level, *product);
}

namespace {

const hidet_dist::panels::Quantized *quantized_of(int32_t level) {
  static const bool has_dots = __builtin_cpu_supports("avx512vnni") != 0;
  switch (level) {
    case HIDET_DIST_X86_64:
      return &hidet_dist::panels::kQuantizedBaseline;
    case HIDET_DIST_X86_64_V3:
      return &hidet_dist::panels::kQuantizedThird;
    case HIDET_DIST_X86_64_V4:
      return has_dots ? &hidet_dist::panels::kVnni : &hidet_dist::panels::kQuantizedFourth;
    default:
      return nullptr;
  }
}

}  // namespace

extern "C" int64_t hidet_dist_quantized_scratch(int32_t level, int64_t rows, int64_t depth, int64_t group) {
  const auto *found = quantized_of(level);
  return found == nullptr || group <= 0 ? 0 : rows * found->row_bytes(depth, group);
}

extern "C" int32_t hidet_dist_multiply_quantized(int32_t level, const hidet_dist_quantized_product *product) {
  const auto *found = quantized_of(level);
  if (found == nullptr || product == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
  return found->multiply(*product);
}
