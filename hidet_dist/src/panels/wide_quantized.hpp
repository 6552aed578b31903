// Products by panels of few bits with AVX2.
#pragma once

#include <immintrin.h>

#include "quantized.hpp"

namespace {

template <int64_t Width>
struct WideQuantized {
  static constexpr int64_t kWidth = Width, kRows = 2;
  static constexpr int kVectors = static_cast<int>(Width / 8);

  template <int Bits, int Rows>
  static void run(int64_t groups, int64_t group, const QuantizedRow *rows, const char *panel, float *result) {
    __m256 totals[Rows][kVectors];
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVectors; ++v) totals[r][v] = _mm256_setzero_ps();
    }
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    for (int64_t g = 0; g < groups; ++g) {
      const char *const scales = panel;
      panel += Width * 2;
      __m256i sums[Rows][kVectors];
      for (int r = 0; r < Rows; ++r) {
        // Elements of 4 bits are stored with 8 added.
        for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm256_set1_epi32(Bits == 4 ? -8 * rows[r].sums[g] : 0);
      }
      for (int64_t k = 0; k < group; k += 32) {
        const int64_t at = g * group + k;
        if constexpr (Bits == 4) {
          __m256i halves[Rows][kVectors];  // sums of at most 16 products of at most 15 * 127, in 16 bits
          for (int r = 0; r < Rows; ++r) {
            for (int v = 0; v < kVectors; ++v) halves[r][v] = _mm256_setzero_si256();
          }
          for (int64_t i = 0; i < 32; i += 8) {
            for (int v = 0; v < kVectors; ++v, panel += 32) {
              _mm_prefetch(panel + kAhead, _MM_HINT_T0);
              const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(panel));
              const __m256i first = _mm256_and_si256(both, low);
              const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
              for (int r = 0; r < Rows; ++r) {
                halves[r][v] =
                    _mm256_add_epi16(halves[r][v], _mm256_maddubs_epi16(first, four(rows[r].elements + at + i)));
                halves[r][v] =
                    _mm256_add_epi16(halves[r][v], _mm256_maddubs_epi16(second, four(rows[r].elements + at + i + 4)));
              }
            }
          }
          for (int r = 0; r < Rows; ++r) {
            for (int v = 0; v < kVectors; ++v) {
              sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(halves[r][v], ones));
            }
          }
        } else {
          for (int64_t i = 0; i < 32; i += 4) {
            for (int v = 0; v < kVectors; ++v, panel += 32) {
              _mm_prefetch(panel + kAhead, _MM_HINT_T0);
              const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(panel));
              const __m256i magnitudes = _mm256_abs_epi8(weights);
              for (int r = 0; r < Rows; ++r) {
                const __m256i left = _mm256_sign_epi8(four(rows[r].elements + at + i), weights);
                const __m256i pairs = _mm256_maddubs_epi16(magnitudes, left);
                sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(pairs, ones));
              }
            }
          }
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(scales + v * 16)));
        for (int r = 0; r < Rows; ++r) {
          const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(rows[r].scales[g]));
          totals[r][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][v]), both, totals[r][v]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(result + r * Width + v * 8, totals[r][v]);
    }
  }

 private:
  static constexpr int64_t kAhead = 2048;  // bytes from those that are multiplied to those that are fetched

  static HIDET_DIST_INLINE __m256i four(const int8_t *elements) {
    int32_t bits;
    __builtin_memcpy(&bits, elements, 4);
    return _mm256_set1_epi32(bits);
  }
};

}  // namespace
