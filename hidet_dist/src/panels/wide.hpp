// What the levels with AVX2 share.
#pragma once

#include <immintrin.h>

#include "product.hpp"

namespace {

HIDET_DIST_INLINE __m256 load_eight(const float *at) { return _mm256_loadu_ps(at); }

// Writes eight columns of eight rows as eight rows of eight; rows from `rows` on are zeros.
HIDET_DIST_INLINE void transpose_eight(const float *source, int64_t step, int64_t rows, float *target,
                                       int64_t target_step) {
  __m256 r[8];
  for (int64_t i = 0; i < 8; ++i) r[i] = i < rows ? load_eight(source + i * step) : _mm256_setzero_ps();
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
HIDET_DIST_INLINE void interleave_rows(const float *source, int64_t step, int64_t rows, int64_t depth, float *target,
                                       int64_t target_step) {
  int64_t k = 0;
  if (rows > 2) {
    // A column's vector reaches into the next column, which is written after it.
    for (; k + 8 <= depth; k += 8) {
      float *const to = target + k * target_step;
      if (rows > 8) transpose_eight(source + 8 * step + k, step, rows - 8, to + 8, target_step);
      transpose_eight(source + k, step, least(rows, 8), to, target_step);
    }
  }
  for (; k < depth; ++k) {
    for (int64_t r = 0; r < rows; ++r) target[k * target_step + r] = source[r * step + k];
  }
}

// What their operations on single elements and on rows have in common.
struct Wide {
  static HIDET_DIST_INLINE float one(const float *at) { return *at; }
  static HIDET_DIST_INLINE float one(const Half *at) { return _cvtsh_ss(at->bits); }
  static HIDET_DIST_INLINE float one(const Brain *at) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(static_cast<uint32_t>(at->bits) << 16))));
  }
  static HIDET_DIST_INLINE void interleave(const float *source, int64_t step, int64_t rows, int64_t depth,
                                           float *target, int64_t target_step) {
    interleave_rows(source, step, rows, depth, target, target_step);
  }
};

}  // namespace
