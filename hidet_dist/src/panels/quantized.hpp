// The product of rows by panels of few bits (see panels.h), in terms of the vectors of a level; see product.hpp.
#pragma once

#include <stdint.h>

#include "hidet_dist/kernels/scales.h"
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

// The scale of a group of which `bits` are those of its largest magnitude, and the factor that makes multiples of it.
// A group with an infinity or a NaN has the scale NaN.
struct Scale {
  float scale, factor;

  explicit Scale(int32_t bits) {
    float most;
    __builtin_memcpy(&most, &bits, 4);
    const bool finite = bits < 0x7f800000, zero = bits < 0x0d000000;  // where 127 / most may be infinite
    scale = finite ? (zero ? 0.0f : most / 127.0f) : __builtin_nanf("");
    factor = finite && !zero ? 127.0f / most : 0.0f;
  }
};

using hidet_dist::kernels::is_affine;
using hidet_dist::kernels::is_wide;
using hidet_dist::kernels::number_bytes;
using hidet_dist::kernels::scale_bytes;

// A block of rows of the left operand in 8 bits. `elements` are four of each row, then the next four of each row. For
// each group, `scales` has a scale of each row, `begins` where the sums of each row's products begin, which make up for
// what is added to weights, and `sums` the sum of each row's multiples of its scale.
struct QuantizedRows {
  const int8_t *elements;
  const float *scales;
  const int32_t *begins;
  const float *sums;

  QuantizedRows from(int64_t number, int64_t group, int64_t rows) const {
    return {elements + number * group * rows, scales + number * rows, begins + number * rows, sums + number * rows};
  }
};

// Level has: kWidth, the columns of a panel; kRows, the most rows of a block; added(bits, scales), what is added to
// weights; round(values, group, elements, sum), which rounds a group of at least 32 elements and returns its scale; and
// template <int Bits, int Scales, int Rows> run(groups, group, left, panel, totals), which adds the products of some
// groups to totals of Rows x kWidth floats.
template <class Level>
class QuantizedProduct {
  static constexpr int64_t kWidth = Level::kWidth;
  static constexpr int64_t kMost = Level::kRows;
  static constexpr int64_t kChunkBytes = 8192;  // of a panel that all rows read in turn, from the first-level cache
  static constexpr int64_t kMostGroup = 128, kLeastRounded = 32;

 public:
  static int64_t row_bytes(int64_t depth, int64_t group) {
    const int64_t groups = (depth + group - 1) / group;
    return (groups * (group + 12) + 63) / 64 * 64 + kWidth * 4;
  }

  explicit QuantizedProduct(const hidet_dist_quantized_product &product)
      : p_(product),
        groups_((product.depth + product.group - 1) / product.group),
        blocks_(product.rows, kMost),
        step_((groups_ * (product.group + 12) + 63) / 64 * 64),
        totals_(reinterpret_cast<float *>(static_cast<char *>(product.scratch) + product.rows * step_)) {}

  template <int Bits, int Scales>
  void run() {
    constexpr int32_t kAdded = Level::added(Bits, Scales);
    for (int64_t block = 0; block < blocks_.count(); ++block) {
      p_.depth_step == 1 ? quantize<true>(block, kAdded) : quantize<false>(block, kAdded);
    }
    const int64_t group_bytes = kWidth * scale_bytes(Scales) + p_.group * kWidth * Bits / 8;
    const int64_t at_once = kChunkBytes > group_bytes ? kChunkBytes / group_bytes : 1;
    const char *panel = static_cast<const char *>(p_.panels);
    for (int64_t column = 0; column < p_.columns; column += kWidth) {
      for (int64_t i = 0; i < p_.rows * kWidth; ++i) totals_[i] = 0.0f;
      const int64_t step = blocks_.count() == 1 ? groups_ : at_once;
      for (int64_t g = 0; g < groups_; g += step) {
        const int64_t count = least(step, groups_ - g);
        for (int64_t block = 0; block < blocks_.count(); ++block) {
          const int64_t rows = blocks_.rows_of(block);
          const QuantizedRows left = block_at(block).from(g, p_.group, rows);
          dispatch<Bits, Scales, kMost>(rows, count, left, panel, totals_ + blocks_.row_of(block) * kWidth);
        }
        panel += count * group_bytes;
      }
      const int64_t columns = least(kWidth, p_.columns - column);
      for (int64_t r = 0; r < p_.rows; ++r) {
        float *const target = p_.result + r * p_.result_step + column;
        for (int64_t j = 0; j < columns; ++j) target[j] = totals_[r * kWidth + j];
      }
    }
  }

 private:
  QuantizedRows block_at(int64_t block) const {
    const int64_t rows = blocks_.rows_of(block);
    const char *const memory = static_cast<const char *>(p_.scratch) + blocks_.row_of(block) * step_;
    const float *const scales = reinterpret_cast<const float *>(memory + groups_ * p_.group * rows);
    const int32_t *const begins = reinterpret_cast<const int32_t *>(scales + groups_ * rows);
    return {reinterpret_cast<const int8_t *>(memory), scales, begins,
            reinterpret_cast<const float *>(begins + groups_ * rows)};
  }

  template <bool Contiguous>
  void quantize(int64_t block, int32_t added) const {
    const QuantizedRows left = block_at(block);
    const int64_t rows = blocks_.rows_of(block), first_row = blocks_.row_of(block);
    const int64_t group = least(p_.group, kMostGroup); // no group is longer, which compilers do not see
    const int64_t at_once = group > kLeastRounded ? group : kLeastRounded;
    int32_t *const elements = reinterpret_cast<int32_t *>(const_cast<int8_t *>(left.elements));
    float *const scales = const_cast<float *>(left.scales);
    int32_t *const begins = const_cast<int32_t *>(left.begins);
    float *const sums = const_cast<float *>(left.sums);
    for (int64_t r = 0; r < rows; ++r) {
      const float *const source = p_.left + (first_row + r) * p_.row_step;
      for (int64_t g = 0; g < groups_; ++g) {
        const int64_t first = g * group, count = least(group, p_.depth - first);
        alignas(64) float copied[kMostGroup];
        const float *values = source + first;
        if (!Contiguous || count < at_once) {
          for (int64_t i = 0; i < count; ++i) copied[i] = source[(first + i) * (Contiguous ? 1 : p_.depth_step)];
          for (int64_t i = count; i < at_once; ++i) copied[i] = 0.0f;
          values = copied;
        }
        alignas(64) int8_t rounded[kMostGroup];
        int32_t sum;
        scales[g * rows + r] = Level::round(values, at_once, rounded, &sum);
        begins[g * rows + r] = -added * sum;
        sums[g * rows + r] = static_cast<float>(sum) * scales[g * rows + r];
        for (int64_t k = 0; k < group / 4; ++k) {
          __builtin_memcpy(elements + (first / 4 + k) * rows + r, rounded + k * 4, 4);
        }
      }
    }
  }

  template <int Bits, int Scales, int Rows>
  void dispatch(int64_t rows, int64_t groups, const QuantizedRows &left, const char *panel, float *totals) const {
    if constexpr (Rows == 1) {
      Level::template run<Bits, Scales, 1>(groups, p_.group, left, panel, totals);
    } else if (rows == Rows) {
      Level::template run<Bits, Scales, Rows>(groups, p_.group, left, panel, totals);
    } else {
      dispatch<Bits, Scales, Rows - 1>(rows, groups, left, panel, totals);
    }
  }

  const hidet_dist_quantized_product &p_;
  const int64_t groups_;
  const Blocks blocks_;
  const int64_t step_;
  float *const totals_;
};

template <class Level>
int32_t multiply_quantized(const hidet_dist_quantized_product &product) {
  const bool has_group = product.scales == HIDET_DIST_WIDE
                             ? product.group == 16
                             : product.group == 32 || product.group == 64 || product.group == 128;
  if (!has_group) return HIDET_DIST_INVALID_ARGUMENT;
  QuantizedProduct<Level> part(product);
  if (product.bits == 8 && product.scales == HIDET_DIST_SYMMETRIC) {
    part.template run<8, HIDET_DIST_SYMMETRIC>();
  } else if (product.bits == 8 && product.scales == HIDET_DIST_WIDE) {
    part.template run<8, HIDET_DIST_WIDE>();
  } else if (product.bits == 4 && product.scales == HIDET_DIST_SYMMETRIC) {
    part.template run<4, HIDET_DIST_SYMMETRIC>();
  } else if (product.bits == 4 && product.scales == HIDET_DIST_AFFINE) {
    part.template run<4, HIDET_DIST_AFFINE>();
  } else if (product.bits == 4 && product.scales == HIDET_DIST_WIDE_AFFINE) {
    part.template run<4, HIDET_DIST_WIDE_AFFINE>();
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
