// Updates of states in place, in the host's memory.
#pragma once
#include <stdint.h>
#include <string.h>

#include "hidet_dist/kernels/slots.h"

namespace hd {

// Copies `count` rows to the places that the slots give. Each row consists of pieces of `inner` contiguous bytes, in
// the order of the outer dims. Rows with an index out of range are left out, and of equal ones the last is left.
static inline void write_rows(void *state, const void *rows, int64_t count, int64_t inner, const Slots *slots,
                              int indexed, const OuterDim *outer, int outer_dims) {
  int64_t pieces = 1;
  for (int d = 0; d < outer_dims; ++d) pieces *= outer[d].extent;
  const char *from = static_cast<const char *>(rows);
  for (int64_t row = 0; row < count; ++row, from += pieces * inner) {
    char *base = static_cast<char *>(state);
    bool inside = true;
    for (int s = 0; s < indexed && inside; ++s) {
      const int64_t index = slots[s].wide ? static_cast<const int64_t *>(slots[s].at)[row]
                                          : int64_t(static_cast<const int32_t *>(slots[s].at)[row]);
      inside = index >= 0 && index < slots[s].size;
      if (inside) base += index * slots[s].stride;
    }
    for (int64_t piece = 0; inside && piece < pieces; ++piece) {
      int64_t rest = piece, offset = 0;
      for (int d = outer_dims - 1; d >= 0; --d) {
        offset += rest % outer[d].extent * outer[d].stride;
        rest /= outer[d].extent;
      }
      memcpy(base + offset, from + piece * inner, inner);
    }
  }
}

// Copies all elements of a state.
static inline void replace(void *state, const void *values, int64_t bytes) { memcpy(state, values, bytes); }

// Moves each of `windows` of `size` bytes by `added` bytes, and puts as many new bytes behind them. Of more new bytes
// than a window has, the last ones are left.
static inline void shift(void *state, const void *values, int64_t windows, int64_t size, int64_t added) {
  char *to = static_cast<char *>(state);
  const char *from = static_cast<const char *>(values);
  const int64_t kept = size > added ? size - added : 0;
  for (int64_t window = 0; window < windows; ++window, to += size, from += added) {
    memmove(to, to + (size - kept), kept);
    memcpy(to + kept, from + (added - (size - kept)), size - kept);
  }
}

}  // namespace hd
