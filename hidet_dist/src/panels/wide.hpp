// What the levels with AVX2 share.
#pragma once

#include <immintrin.h>

#include "product.hpp"

namespace {

HIDET_DIST_INLINE __m256 load_eight(const float *at) { return _mm256_loadu_ps(at); }

// Writes eight columns, from column `k` on, of eight rows, from row `first` on, as eight rows of eight; rows from `rows`
// on are zeros.
template <class Rows>
HIDET_DIST_INLINE void transpose_eight(const Rows &source, int64_t first, int64_t k, int64_t rows, float *target,
                                       int64_t target_step) {
  __m256 r[8];
  for (int64_t i = 0; i < 8; ++i) r[i] = first + i < rows ? load_eight(source[first + i] + k) : _mm256_setzero_ps();
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  __m256 u[8];
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(target + i * target_step, _mm256_permute2f128_ps(u[i], u[i + 4], 0x20));
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(target + (i + 4) * target_step, _mm256_permute2f128_ps(u[i], u[i + 4], 0x31));
  }
}

// Writes `depth` columns of at most 16 rows one after the other; up to six floats behind each may be overwritten.
template <class Rows>
HIDET_DIST_INLINE void interleave_rows(const Rows &source, int64_t rows, int64_t depth, float *target,
                                       int64_t target_step) {
  int64_t k = 0;
  if (rows > 2) {
    // A column's vector reaches into the next column, which is written after it.
    for (; k + 8 <= depth; k += 8) {
      float *const to = target + k * target_step;
      if (rows > 8) transpose_eight(source, 8, k, rows, to + 8, target_step);
      transpose_eight(source, 0, k, rows, to, target_step);
    }
  }
  for (; k < depth; ++k) {
    for (int64_t r = 0; r < rows; ++r) target[k * target_step + r] = source[r][k];
  }
}

HIDET_DIST_INLINE __m256 load_eight(const Brain *at) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
HIDET_DIST_INLINE __m256 load_eight(const Half *at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}

// Two rows of four elements, as the halves of a vector.
HIDET_DIST_INLINE __m256 load_fours(const float *low, const float *high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}
HIDET_DIST_INLINE __m256 load_fours(const Brain *low, const Brain *high) {
  const __m128i a = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(low));
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(high));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_unpacklo_epi64(a, b)), 16));
}
HIDET_DIST_INLINE __m256 load_fours(const Half *low, const Half *high) {
  const __m128i a = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(low));
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(high));
  return _mm256_cvtph_ps(_mm_unpacklo_epi64(a, b));
}

// Four elements of eight rows, as four vectors of a column each.
template <class T>
HIDET_DIST_INLINE void four_columns(const T *source, int64_t step, __m256 *columns) {
  const __m256 a = load_fours(source, source + 4 * step);
  const __m256 b = load_fours(source + step, source + 5 * step);
  const __m256 c = load_fours(source + 2 * step, source + 6 * step);
  const __m256 d = load_fours(source + 3 * step, source + 7 * step);
  const __m256 low_ab = _mm256_unpacklo_ps(a, b), high_ab = _mm256_unpackhi_ps(a, b);
  const __m256 low_cd = _mm256_unpacklo_ps(c, d), high_cd = _mm256_unpackhi_ps(c, d);
  columns[0] = _mm256_shuffle_ps(low_ab, low_cd, 0x44);
  columns[1] = _mm256_shuffle_ps(low_ab, low_cd, 0xee);
  columns[2] = _mm256_shuffle_ps(high_ab, high_cd, 0x44);
  columns[3] = _mm256_shuffle_ps(high_ab, high_cd, 0xee);
}

// What their operations on single elements and on rows have in common.
struct Wide {
  static constexpr int kInColumns = 8;  // rows that are multiplied by a weight in columns as it lies

  // The product of `Rows` packed rows by 16 columns, whose elements lie one after the other. Sums are those of the
  // product by panels, in the same order. What lies behind the columns, as many bytes, is fetched meanwhile: into the
  // second-level cache, because the first has no room for both.
  template <class T, int Rows>
  __attribute__((noinline)) static void by_columns(int64_t depth, const float *left, const T *right, int64_t step,
                                                   float *target, int64_t target_step) {
    constexpr int kAtOnce = Rows > 4 ? 1 : 2;  // vectors of columns whose sums registers hold
    constexpr int64_t kColumns = 8 * kAtOnce;
    const char *ahead = reinterpret_cast<const char *>(right + 16 * step);
    for (int64_t column = 0; column < 16; column += kColumns) {
      const T *const from = right + column * step;
      __m256 totals[Rows][kAtOnce];
#pragma GCC unroll 16
      for (int r = 0; r < Rows * kAtOnce; ++r) totals[r / kAtOnce][r % kAtOnce] = _mm256_setzero_ps();
      for (int64_t start = 0; start < depth; start += kDepth) {
        const int64_t end = least(depth, start + kDepth);
        __m256 sums[Rows][kAtOnce];
#pragma GCC unroll 16
        for (int r = 0; r < Rows * kAtOnce; ++r) sums[r / kAtOnce][r % kAtOnce] = _mm256_setzero_ps();
        int64_t k = start;
        for (; k + 4 <= end; k += 4) {
          constexpr int64_t kBytes = 4 * kColumns * static_cast<int64_t>(sizeof(T));
#pragma GCC unroll 4
          for (int64_t at = 0; at < kBytes; at += kLine) _mm_prefetch(ahead + at, _MM_HINT_T1);
          ahead += kBytes;
#pragma GCC unroll 2
          for (int v = 0; v < kAtOnce; ++v) {
            __m256 columns[4];
            four_columns(from + v * 8 * step + k, step, columns);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 8
              for (int r = 0; r < Rows; ++r) {
                sums[r][v] = _mm256_fmadd_ps(_mm256_broadcast_ss(left + (k + i) * Rows + r), columns[i], sums[r][v]);
              }
            }
          }
        }
        for (; k < end; ++k) {
          for (int v = 0; v < kAtOnce; ++v) {
            float elements[8];
            for (int64_t j = 0; j < 8; ++j) elements[j] = one(from + (v * 8 + j) * step + k);
            const __m256 values = _mm256_loadu_ps(elements);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
              sums[r][v] = _mm256_fmadd_ps(_mm256_broadcast_ss(left + k * Rows + r), values, sums[r][v]);
            }
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < kAtOnce; ++v) {
            totals[r][v] = start > 0 ? _mm256_add_ps(totals[r][v], sums[r][v]) : sums[r][v];
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kAtOnce; ++v) _mm256_storeu_ps(target + r * target_step + column + v * 8, totals[r][v]);
      }
    }
  }

  static HIDET_DIST_INLINE float one(const float *at) { return *at; }
  static HIDET_DIST_INLINE float one(const Half *at) { return _cvtsh_ss(at->bits); }
  static HIDET_DIST_INLINE float one(const Brain *at) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(static_cast<uint32_t>(at->bits) << 16))));
  }
  template <class Rows>
  static HIDET_DIST_INLINE void interleave(const Rows &source, int64_t rows, int64_t depth, float *target,
                                           int64_t target_step) {
    interleave_rows(source, rows, depth, target, target_step);
  }
};

}  // namespace
