// Products by panels of few bits with AVX-512 and its dot products of bytes (VNNI).
#include <immintrin.h>

#include "levels.hpp"
#include "wide_quantized.hpp"

namespace {

struct Vnni {
  static constexpr int64_t kWidth = 32, kRows = 6;

  // The instruction takes unsigned weights.
  static constexpr int32_t added(int bits, int scales) { return bits == 8 ? 128 : is_affine(scales) ? 0 : 8; }

  static float round(const float *values, int64_t group, int8_t *rounded, int32_t *sum) {
    return round_wide(values, group, rounded, sum);
  }

  template <int Bits, int Scales, int Rows>
  static void run(int64_t groups, int64_t group, const QuantizedRows &left, const char *panel, float *totals) {
    const int8_t *elements = left.elements;
    const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(-128);
    for (int64_t g = 0; g < groups; ++g) {
      const char *const scales = panel;
      panel += kWidth * scale_bytes(Scales);
      __m512i dots[Rows][2];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        dots[r][0] = dots[r][1] = _mm512_set1_epi32(left.begins[g * Rows + r]);
      }
      for (int64_t k = 0; k < group; k += 16) {
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += Bits == 4 ? 8 : 4) {
          _mm_prefetch(panel + kAhead, _MM_HINT_T0);
          _mm_prefetch(panel + kAhead + 64, _MM_HINT_T0);
          const __m512i first = _mm512_loadu_si512(panel), second = _mm512_loadu_si512(panel + 64);
          panel += 128;
          if constexpr (Bits == 4) {
            add_dots<Rows>(dots, _mm512_and_si512(first, low), _mm512_and_si512(second, low), elements + i * Rows);
            add_dots<Rows>(dots, _mm512_and_si512(_mm512_maskz_srli_epi16(0xffffffffu, first, 4), low),
                           _mm512_and_si512(_mm512_maskz_srli_epi16(0xffffffffu, second, 4), low),
                           elements + (i + 4) * Rows);
          } else {
            add_dots<Rows>(dots, _mm512_xor_si512(first, offset), _mm512_xor_si512(second, offset),
                           elements + i * Rows);
          }
        }
        elements += 16 * Rows;
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const __m512 scale = numbers<Scales>(scales, v);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(left.scales[g * Rows + r]));
          const __m512 sums = _mm512_maskz_cvtepi32_ps(0xffff, dots[r][v]);
          float *const at = totals + r * kWidth + v * 16;
          __m512 total = _mm512_fmadd_ps(sums, both, _mm512_loadu_ps(at));
          if (is_affine(Scales)) {
            const __m512 minimum = numbers<Scales>(scales + kWidth * number_bytes(Scales), v);
            total = _mm512_fmadd_ps(minimum, _mm512_set1_ps(left.sums[g * Rows + r]), total);
          }
          _mm512_storeu_ps(at, total);
        }
      }
    }
  }

 private:
  static constexpr int64_t kAhead = 8192;  // bytes from those that are multiplied to those that are fetched

  // Loads the scales, or the minimums, of a half of the columns.
  template <int Scales>
  static HIDET_DIST_INLINE __m512 numbers(const char *at, int half) {
    at += 16 * half * number_bytes(Scales);
    if constexpr (is_wide(Scales)) return _mm512_loadu_ps(reinterpret_cast<const float *>(at));
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
  }

  // Adds the dot products of four weights each and four elements of each row.
  template <int Rows>
  static HIDET_DIST_INLINE void add_dots(__m512i (&sums)[Rows][2], __m512i first, __m512i second,
                                         const int8_t *elements) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      int32_t bits;
      __builtin_memcpy(&bits, elements + 4 * r, 4);
      const __m512i four = _mm512_set1_epi32(bits);
      // GCC 12 copies a sum before and after each of the intrinsic functions.
      asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][0]) : "v"(first), "v"(four));
      asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][1]) : "v"(second), "v"(four));
    }
  }
};

}  // namespace

const hidet_dist::panels::Quantized hidet_dist::panels::kVnni = {quantized_row_bytes<Vnni>, multiply_quantized<Vnni>};
