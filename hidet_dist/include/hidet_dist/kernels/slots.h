// Places of rows in a state. All extents and strides are in bytes, except those of slots, which are in elements.
#pragma once
#include <stdint.h>

namespace hd {

// The indices of rows along one dim of a state: `size` is the dim's extent, `stride` the bytes between its elements.
struct Slots {
  const void *at;
  bool wide;  // int64, else int32
  int64_t size, stride;
};

// A dim of a state that slots do not index, and that lies before one that they do.
struct OuterDim {
  int64_t extent, stride;
};

}  // namespace hd
