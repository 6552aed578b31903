// Products of bfloat16 rows by bfloat16 panels with AVX-512's dot products of pairs (AVX512_BF16).
//
// An element's sum has a pair of depths in each step: the product of the second is added to the sum, then that of the
// first, each rounded to float32. So its order is its own, but like that of panels.h the same for any number of rows,
// columns and threads. Subnormal numbers count as 0, as these instructions have it.
#include <immintrin.h>
#include <string.h>

#include "levels.hpp"
#include "wide.hpp"

namespace {

constexpr int64_t kWidth = 32;      // columns of a panel
constexpr int64_t kBlockRows = 14;  // rows whose sums registers hold
constexpr int64_t kBlocks = 13;  // blocks of rows that are packed at once: their depth stays in the second-level cache
constexpr int64_t kPairs = kBlockRows * kDepth / 2;  // of a block

// Rows of bfloat16, in pairs of depths, which are as long as floats.
class Pairs {
 public:
  Pairs(const uint16_t *first, int64_t step) : first_(first), step_(step) {}
  HIDET_DIST_INLINE const float *operator[](int64_t row) const {
    return reinterpret_cast<const float *>(first_ + row * step_);
  }

 private:
  const uint16_t *const first_;
  const int64_t step_;
};

class Dots {
 public:
  explicit Dots(const hidet_dist_panel_product &product)
      : p_(product), result_(static_cast<float *>(product.result)), pairs_(static_cast<uint32_t *>(product.scratch)) {}

  void run() {
    const Blocks blocks(p_.rows, kBlockRows);
    if (blocks.count() == 1 && p_.depth <= kBlocks * kDepth) return one_block();
    for (int64_t start = 0; start < p_.depth; start += kDepth) {
      const int64_t depth = least(kDepth, p_.depth - start);
      for (int64_t first = 0; first < blocks.count(); first += kBlocks) {
        const int64_t count = least(kBlocks, blocks.count() - first);
        for (int64_t block = 0; block < count; ++block) {
          pack(blocks.row_of(first + block), blocks.rows_of(first + block), start, depth, pairs_ + block * kPairs);
        }
        for (int64_t column = 0; column < p_.columns; column += kWidth) {
          for (int64_t block = 0; block < count; ++block) {
            multiply(blocks.row_of(first + block), blocks.rows_of(first + block), start, depth, column,
                     pairs_ + block * kPairs);
          }
        }
      }
    }
  }

 private:
  // Few rows: each panel is read from its beginning to its end.
  void one_block() {
    for (int64_t start = 0; start < p_.depth; start += kDepth) {
      pack(0, p_.rows, start, least(kDepth, p_.depth - start), pairs_ + start / kDepth * kPairs);
    }
    for (int64_t column = 0; column < p_.columns; column += kWidth) {
      for (int64_t start = 0; start < p_.depth; start += kDepth) {
        multiply(0, p_.rows, start, least(kDepth, p_.depth - start), column, pairs_ + start / kDepth * kPairs);
      }
    }
  }

  // Packs pairs of depths of a block of rows, those of all rows one after the other; behind an odd depth stands a zero.
  void pack(int64_t row, int64_t rows, int64_t start, int64_t depth, uint32_t *target) const {
    const auto *const left = static_cast<const uint16_t *>(p_.left) + row * p_.row_step + start * p_.depth_step;
    int64_t packed = 0;
    if (p_.runs == nullptr && p_.depth_step == 1) {
      packed = depth / 2 * 2;
      interleave_rows(Pairs(left, p_.row_step), rows, packed / 2, reinterpret_cast<float *>(target), rows);
    } else if (p_.runs != nullptr && p_.run % 2 == 0) {
      for (; packed < depth;) {
        const int64_t at = start + packed, within = at % p_.run, count = least(p_.run - within, depth - packed);
        const Runs runs(p_.runs + at / p_.run * p_.rows + row, within / 2);
        interleave_rows(runs, rows, count / 2, reinterpret_cast<float *>(target) + packed / 2 * rows, rows);
        packed += count;
      }
    }
    for (; packed < depth; packed += 2) {
      for (int64_t r = 0; r < rows; ++r) {
        const uint32_t next = packed + 1 < depth ? element(row + r, start + packed + 1) : 0;
        target[packed / 2 * rows + r] = element(row + r, start + packed) | next << 16;
      }
    }
  }

  uint32_t element(int64_t row, int64_t depth) const {
    if (p_.runs == nullptr) {
      return static_cast<const uint16_t *>(p_.left)[row * p_.row_step + depth * p_.depth_step];
    }
    return static_cast<const uint16_t *>(p_.runs[depth / p_.run * p_.rows + row])[depth % p_.run];
  }

  // Adds the product of packed rows by a block of a panel to the result, or writes the first block's there.
  void multiply(int64_t row, int64_t rows, int64_t start, int64_t depth, int64_t column, const uint32_t *left) const {
    const int64_t width = least(kWidth, p_.columns - column);
    const uint16_t *const panel = static_cast<const uint16_t *>(p_.right) + column * p_.depth + start * width;
    dispatch<kBlockRows>(rows, depth, left, panel, width, result_ + row * p_.result_step + column, start > 0);
  }

  template <int Rows>
  void dispatch(int64_t rows, int64_t depth, const uint32_t *left, const uint16_t *panel, int64_t width, float *target,
                bool add) const {
    if constexpr (Rows > 1) {
      if (rows < Rows) return dispatch<Rows - 1>(rows, depth, left, panel, width, target, add);
    }
    if (width == kWidth) {
      kernel<Rows, true>(depth, left, panel, width, target, add);
    } else {
      kernel<Rows, false>(depth, left, panel, width, target, add);
    }
  }

  template <bool Whole>
  static __m512i load(const uint16_t *at, __mmask32 columns) {
    return Whole ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi16(columns, at);
  }

  template <int Rows, bool Whole>
  __attribute__((noinline)) void kernel(int64_t depth, const uint32_t *left, const uint16_t *panel, int64_t width,
                                        float *target, bool add) const {
    const auto columns = static_cast<__mmask32>((UINT64_C(1) << width) - 1);
    __m512 sums[Rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += 2, panel += 2 * width, left += Rows) {
      const __m512i one = load<Whole>(panel, columns);
      const __m512i two = k + 1 < depth ? load<Whole>(panel + width, columns) : _mm512_setzero_si512();
      // Of each eight columns the first four, then the other four.
      const auto low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(one, two));
      const auto high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(one, two));
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const auto pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(left[r])));
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], pair, low);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], pair, high);
      }
    }
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      float *const at = target + r * p_.result_step;
      store(at, _mm512_permutex2var_ps(sums[r][0], first, sums[r][1]), static_cast<__mmask16>(columns), add);
      store(at + 16, _mm512_permutex2var_ps(sums[r][0], second, sums[r][1]), static_cast<__mmask16>(columns >> 16),
            add);
    }
  }

  static void store(float *at, __m512 sums, __mmask16 columns, bool add) {
    if (add) sums = _mm512_add_ps(_mm512_maskz_loadu_ps(columns, at), sums);
    _mm512_mask_storeu_ps(at, columns, sums);
  }

  const hidet_dist_panel_product &p_;
  float *const result_;
  uint32_t *const pairs_;
};

}  // namespace

void hidet_dist::panels::multiply_by_dots(const hidet_dist_panel_product &product) { Dots(product).run(); }
