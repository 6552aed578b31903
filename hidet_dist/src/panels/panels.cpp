// The choice of a level's products by panels. See panels.h.
#include "hidet_dist/panels.h"

#include "levels.hpp"

namespace {

const hidet_dist::panels::Level *level_of(int32_t level) {
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

}  // namespace

extern "C" int64_t hidet_dist_panel_width(int32_t level) {
  const auto *found = level_of(level);
  return found == nullptr ? 0 : found->width;
}

extern "C" int64_t hidet_dist_panels_scratch(int32_t level) {
  const auto *found = level_of(level);
  return found == nullptr ? 0 : found->scratch;
}

extern "C" int32_t hidet_dist_multiply_panels(int32_t level, const hidet_dist_panel_product *product) {
  const auto *found = level_of(level);
  if (found == nullptr || product == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
  return found->multiply(*product);
}
