// Products by panels of few bits with AVX-512 and its dot products of bytes (VNNI).
#include <immintrin.h>

#include "levels.hpp"
#include "quantized.hpp"

namespace {

struct Vnni {
  static constexpr int64_t kWidth = 32, kRows = 6;

  template <int Bits, int Rows>
  static void run(int64_t groups, int64_t group, const QuantizedRow *rows, const char *panel, float *result) {
    __m512 totals[Rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
    const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(-128);
    for (int64_t g = 0; g < groups; ++g) {
      const char *const scales = panel;
      panel += kWidth * 2;
      __m512i sums[Rows][2];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        // The instruction takes unsigned weights: 8 is added to those of 4 bits, 128 to those of 8.
        sums[r][0] = sums[r][1] = _mm512_set1_epi32((Bits == 4 ? -8 : -128) * rows[r].sums[g]);
      }
      const int64_t first = g * group;
      for (int64_t k = 0; k < group; k += Bits == 4 ? 8 : 4) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v, panel += 64) {
          _mm_prefetch(panel + kAhead, _MM_HINT_T0);
          const __m512i stored = _mm512_loadu_si512(panel);
          if constexpr (Bits == 4) {
            const __m512i one = _mm512_and_si512(stored, low);
            const __m512i two = _mm512_and_si512(_mm512_maskz_srli_epi16(0xffffffffu, stored, 4), low);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
              sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], one, four(rows[r].elements + first + k));
              sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], two, four(rows[r].elements + first + k + 4));
            }
          } else {
            const __m512i weights = _mm512_xor_si512(stored, offset);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
              sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], weights, four(rows[r].elements + first + k));
            }
          }
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(scales + v * 32));
        const __m512 scale = _mm512_maskz_cvtph_ps(0xffff, halves);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows[r].scales[g]));
          totals[r][v] = _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(0xffff, sums[r][v]), both, totals[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      _mm512_storeu_ps(result + r * kWidth, totals[r][0]);
      _mm512_storeu_ps(result + r * kWidth + 16, totals[r][1]);
    }
  }

 private:
  static constexpr int64_t kAhead = 2048;  // bytes from those that are multiplied to those that are fetched

  static HIDET_DIST_INLINE __m512i four(const int8_t *elements) {
    int32_t bits;
    __builtin_memcpy(&bits, elements, 4);
    return _mm512_set1_epi32(bits);
  }
};

}  // namespace

const hidet_dist::panels::Quantized hidet_dist::panels::kVnni = {quantized_row_bytes<Vnni>, multiply_quantized<Vnni>};
