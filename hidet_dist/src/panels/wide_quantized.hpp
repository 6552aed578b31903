// Products by panels of few bits with AVX2.
#pragma once

#include <immintrin.h>

#include "quantized.hpp"

namespace {

HIDET_DIST_INLINE int32_t sum_of_eight(__m256i v) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

HIDET_DIST_INLINE int32_t most_of_eight(__m256i v) {
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// Rounds a group to multiples of its largest magnitude / 127, halves to even, and returns its scale.
HIDET_DIST_INLINE float round_wide(const float *values, int64_t group, int8_t *rounded, int32_t *sum) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = 0; i < group; i += 8) {
    most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(values + i)), magnitude));
  }
  const Scale scale(most_of_eight(most));
  const __m256 factor = _mm256_set1_ps(scale.factor);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i total = _mm256_setzero_si256();
  for (int64_t i = 0; i < group; i += 32) {
    __m256i integers[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256 multiples = _mm256_mul_ps(_mm256_loadu_ps(values + i + 8 * j), factor);
      integers[j] = scale.factor > 0.0f ? _mm256_cvtps_epi32(multiples) : _mm256_setzero_si256();
      total = _mm256_add_epi32(total, integers[j]);
    }
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(integers[0], integers[1]), _mm256_packs_epi32(integers[2], integers[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(rounded + i), _mm256_permutevar8x32_epi32(bytes, order));
  }
  *sum = sum_of_eight(total);
  return scale.scale;
}

template <int64_t Width>
struct WideQuantized {
  static constexpr int64_t kWidth = Width, kRows = 4;

  static constexpr int32_t added(int bits, int scales) { return bits == 4 && scales == HIDET_DIST_SYMMETRIC ? 8 : 0; }

  static float round(const float *values, int64_t group, int8_t *rounded, int32_t *sum) {
    return round_wide(values, group, rounded, sum);
  }

  template <int Bits, int Scales, int Rows>
  static void run(int64_t groups, int64_t group, const QuantizedRows &left, const char *panel, float *totals) {
    constexpr int64_t kScales = Width * scale_bytes(Scales);
    for (int64_t g = 0; g < groups; ++g, panel += kScales + group * Width * Bits / 8) {
      const QuantizedRows of_group = left.from(g, group, Rows);
#pragma GCC unroll 2
      for (int64_t column = 0; column < Width; column += 16) {
        columns<Bits, Scales, Rows>(group, of_group, panel + column * number_bytes(Scales),
                                    panel + kScales + column * 4, totals + column);
      }
    }
  }

 private:
  static constexpr int64_t kAhead = 8192;  // bytes from those that are multiplied to those that are fetched

  // Adds the products of a group of 16 columns.
  template <int Bits, int Scales, int Rows>
  static HIDET_DIST_INLINE void columns(int64_t group, const QuantizedRows &left, const char *scales, const char *panel,
                                        float *totals) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    const int8_t *elements = left.elements;
    __m256i sums[Rows][2];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      sums[r][0] = sums[r][1] = _mm256_set1_epi32(left.begins[r]);
    }
    constexpr int64_t kStep = Scales == HIDET_DIST_WIDE ? 16 : 32;
    for (int64_t k = 0; k < group; k += kStep) {
      if constexpr (Bits == 4) {
        __m256i halves[Rows][2];  // sums of at most 16 products of at most 15 * 127, in 16 bits
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) halves[r][0] = halves[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, panel += Width * 4, elements += 8 * Rows) {
          _mm_prefetch(panel + kAhead, _MM_HINT_T0);
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) {
            const __m256i both = load(panel + v * 32);
            const __m256i first = _mm256_and_si256(both, low);
            const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
              const __m256i one = _mm256_maddubs_epi16(first, four(elements + 4 * r));
              const __m256i two = _mm256_maddubs_epi16(second, four(elements + 4 * Rows + 4 * r));
              halves[r][v] = _mm256_add_epi16(halves[r][v], _mm256_add_epi16(one, two));
            }
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) {
            sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(halves[r][v], ones));
          }
        }
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < kStep / 4; ++i, panel += Width * 4, elements += 4 * Rows) {
          _mm_prefetch(panel + kAhead, _MM_HINT_T0);
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) {
            const __m256i weights = load(panel + v * 32);
            const __m256i magnitudes = _mm256_abs_epi8(weights);
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
              const __m256i signed_ones = _mm256_sign_epi8(four(elements + 4 * r), weights);
              const __m256i pairs = _mm256_maddubs_epi16(magnitudes, signed_ones);
              sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(pairs, ones));
            }
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m256 scale = numbers<Scales>(scales, v);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        float *const at = totals + r * Width + v * 8;
        const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(left.scales[r]));
        __m256 total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][v]), both, _mm256_loadu_ps(at));
        if (is_affine(Scales)) {
          const __m256 minimum = numbers<Scales>(scales + Width * number_bytes(Scales), v);
          total = _mm256_fmadd_ps(minimum, _mm256_set1_ps(left.sums[r]), total);
        }
        _mm256_storeu_ps(at, total);
      }
    }
  }

  // Loads the scales, or the minimums, of eight columns.
  template <int Scales>
  static HIDET_DIST_INLINE __m256 numbers(const char *at, int eighth) {
    at += 8 * eighth * number_bytes(Scales);
    if constexpr (is_wide(Scales)) return _mm256_loadu_ps(reinterpret_cast<const float *>(at));
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
  }

  static HIDET_DIST_INLINE __m256i load(const char *at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
  }

  static HIDET_DIST_INLINE __m256i four(const int8_t *elements) {
    int32_t bits;
    __builtin_memcpy(&bits, elements, 4);
    return _mm256_set1_epi32(bits);
  }
};

}  // namespace
