// The product of rows by panels of few bits (see panels.h), in terms of the vectors of a level; see product.hpp.
#pragma once

#include <stdint.h>

#include "hidet_dist/panels.h"
#include "product.hpp"

namespace {

HIDET_DIST_INLINE float float_of_half(uint16_t bits) {
  union {
    uint32_t integer;
    float value;
  } normal, small;
  const uint32_t magnitude = bits & 0x7fffu;
  normal.integer = (magnitude << 13) + (magnitude > 0x7bffu ? 0x70000000u : 0x38000000u);
  small.value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
  normal.integer = (magnitude < 0x400u ? small.integer : normal.integer) | (bits & 0x8000u) << 16;
  return normal.value;
}

// A row of the left operand in 8 bits: the elements of each group, and for each group the scale and the sum.
struct QuantizedRow {
  const int8_t *elements;
  const float *scales;
  const int32_t *sums;
};

// Level has: kWidth, the columns of a panel; kRows, the most rows of a call; and
// template <int Bits, int Rows> run(groups, group, rows, panel, result), with result of Rows x kWidth floats.
template <class Level>
class QuantizedProduct {
  static constexpr int64_t kWidth = Level::kWidth;
  static constexpr int64_t kMost = Level::kRows;

 public:
  static int64_t row_bytes(int64_t depth, int64_t group) {
    const int64_t groups = (depth + group - 1) / group;
    return (groups * (group + 8) + 63) / 64 * 64;
  }

  explicit QuantizedProduct(const hidet_dist_quantized_product &product)
      : p_(product), groups_((product.depth + product.group - 1) / product.group) {}

  template <int Bits>
  void run() {
    char *const scratch = static_cast<char *>(p_.scratch);
    const int64_t step = row_bytes(p_.depth, p_.group);
    for (int64_t r = 0; r < p_.rows; ++r) quantize(p_.left + r * p_.row_step, scratch + r * step);
    const int64_t panel_bytes = groups_ * (kWidth * 2 + p_.group * kWidth * Bits / 8);
    const char *panel = static_cast<const char *>(p_.panels);
    const int64_t blocks = (p_.rows + kMost - 1) / kMost;
    for (int64_t column = 0; column < p_.columns; column += kWidth, panel += panel_bytes) {
      const int64_t columns = least(kWidth, p_.columns - column);
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t rows = p_.rows / blocks + (block < p_.rows % blocks);
        const int64_t row = block * (p_.rows / blocks) + least(block, p_.rows % blocks);
        QuantizedRow left[kMost];
        for (int64_t r = 0; r < rows; ++r) left[r] = row_at(scratch + (row + r) * step);
        float sums[kMost * kWidth];
        dispatch<Bits, kMost>(rows, left, panel, sums);
        for (int64_t r = 0; r < rows; ++r) {
          float *const target = p_.result + (row + r) * p_.result_step + column;
          for (int64_t j = 0; j < columns; ++j) target[j] = sums[r * kWidth + j];
        }
      }
    }
  }

 private:
  QuantizedRow row_at(const char *memory) const {
    const float *const scales = reinterpret_cast<const float *>(memory + groups_ * p_.group);
    return {reinterpret_cast<const int8_t *>(memory), scales, reinterpret_cast<const int32_t *>(scales + groups_)};
  }

  // Rounds each group to multiples of its largest magnitude / 127. A group with an infinity or a NaN has the scale NaN.
  void quantize(const float *source, char *memory) const {
    int8_t *const elements = reinterpret_cast<int8_t *>(memory);
    float *const scales = reinterpret_cast<float *>(memory + groups_ * p_.group);
    int32_t *const sums = reinterpret_cast<int32_t *>(scales + groups_);
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t first = g * p_.group, count = least(p_.group, p_.depth - first);
      int8_t *const target = elements + first;
      int32_t bits = 0;
      for (int64_t i = 0; i < count; ++i) {
        union {
          float value;
          int32_t integer;
        } element;
        element.value = source[(first + i) * p_.depth_step];
        const int32_t magnitude = element.integer & 0x7fffffff;
        bits = magnitude > bits ? magnitude : bits;
      }
      union {
        int32_t integer;
        float value;
      } most;
      most.integer = bits;
      const bool finite = bits < 0x7f800000, zero = bits < 0x0d000000;  // where 127 / most may be infinite
      const float factor = finite && !zero ? 127.0f / most.value : 0.0f;
      int32_t sum = 0;
      for (int64_t i = 0; i < count; ++i) {
        // Adding and subtracting 1.5 * 2^23 rounds to an integer, halves to even.
        const float value = finite ? source[(first + i) * p_.depth_step] * factor : 0.0f;
        const int32_t rounded = static_cast<int32_t>((value + 12582912.0f) - 12582912.0f);
        target[i] = static_cast<int8_t>(rounded);
        sum += rounded;
      }
      for (int64_t i = count; i < p_.group; ++i) target[i] = 0;
      scales[g] = finite ? (zero ? 0.0f : most.value / 127.0f) : __builtin_nanf("");
      sums[g] = sum;
    }
  }

  template <int Bits, int Rows>
  void dispatch(int64_t rows, const QuantizedRow *left, const char *panel, float *sums) const {
    if constexpr (Rows == 1) {
      Level::template run<Bits, 1>(groups_, p_.group, left, panel, sums);
    } else if (rows == Rows) {
      Level::template run<Bits, Rows>(groups_, p_.group, left, panel, sums);
    } else {
      dispatch<Bits, Rows - 1>(rows, left, panel, sums);
    }
  }

  const hidet_dist_quantized_product &p_;
  const int64_t groups_;
};

template <class Level>
int32_t multiply_quantized(const hidet_dist_quantized_product &product) {
  if (product.group <= 0 || product.group % 32 != 0) return HIDET_DIST_INVALID_ARGUMENT;
  QuantizedProduct<Level> part(product);
  if (product.bits == 8) {
    part.template run<8>();
  } else if (product.bits == 4) {
    part.template run<4>();
  } else {
    return HIDET_DIST_INVALID_ARGUMENT;
  }
  return HIDET_DIST_OK;
}

template <class Level>
int64_t quantized_row_bytes(int64_t depth, int64_t group) {
  return QuantizedProduct<Level>::row_bytes(depth, group);
}

}  // namespace
