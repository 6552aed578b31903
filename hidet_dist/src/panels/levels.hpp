// The products of each level; see product.hpp.
#pragma once

#include "hidet_dist/panels.h"

namespace hidet_dist {
namespace panels {

struct Level {
  int64_t width;
  int64_t scratch; /* bytes */
  int32_t (*multiply)(const hidet_dist_panel_product &product);
};

extern const Level kBaseline, kThird, kFourth;

}  // namespace panels
}  // namespace hidet_dist
