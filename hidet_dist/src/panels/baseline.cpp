// Products by panels with the instructions that every x86-64 processor has.
#include <emmintrin.h>

#include "depthwise.hpp"
#include "levels.hpp"
#include "product.hpp"
#include "quantized.hpp"
#include "winograd.hpp"

namespace {

struct Baseline {
  using Vector = __m128;
  static constexpr int64_t kLanes = 4, kWidth = 8, kRows = 4, kTwoPanels = 2, kInColumns = 0;
  static constexpr int kPixels = 4;

  static HIDET_DIST_INLINE Vector zero() { return _mm_setzero_ps(); }
  static HIDET_DIST_INLINE Vector load_first(const float *at, int64_t lanes) {
    float values[kLanes] = {};
    for (int64_t i = 0; i < lanes; ++i) values[i] = at[i];
    return load(values);
  }
  static HIDET_DIST_INLINE Vector load(const float *at) { return _mm_loadu_ps(at); }
  static HIDET_DIST_INLINE Vector load(const Brain *at) {
    const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(at));
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), bits));
  }
  static HIDET_DIST_INLINE Vector load(const Half *at) {
    const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(at));
    const __m128i wide = _mm_unpacklo_epi16(bits, _mm_setzero_si128());
    const __m128i sign = _mm_slli_epi32(_mm_and_si128(wide, _mm_set1_epi32(0x8000)), 16);
    const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi32(0x7fff));
    // Zeros and subnormals are multiples of 2^-24. The exponent's bias is 15, and 127 in binary32; all ones stay.
    const __m128i small = _mm_castps_si128(_mm_mul_ps(_mm_cvtepi32_ps(magnitude), _mm_set1_ps(5.9604644775390625e-8f)));
    const __m128i special = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7bff));
    const __m128i bias = _mm_add_epi32(_mm_set1_epi32(0x38000000), _mm_and_si128(special, _mm_set1_epi32(0x38000000)));
    const __m128i normal = _mm_add_epi32(_mm_slli_epi32(magnitude, 13), bias);
    const __m128i is_small = _mm_cmplt_epi32(magnitude, _mm_set1_epi32(0x400));
    const __m128i value = _mm_or_si128(_mm_and_si128(is_small, small), _mm_andnot_si128(is_small, normal));
    return _mm_castsi128_ps(_mm_or_si128(value, sign));
  }
  template <class T>
  static HIDET_DIST_INLINE float one(const T *at) {
    T several[kLanes] = {*at};
    return _mm_cvtss_f32(load(several));
  }
  static HIDET_DIST_INLINE float one(const float *at) { return *at; }
  static HIDET_DIST_INLINE Vector broadcast(const float *at) { return _mm_set1_ps(*at); }
  static HIDET_DIST_INLINE Vector add(Vector a, Vector b) { return _mm_add_ps(a, b); }
  static HIDET_DIST_INLINE Vector subtract(Vector a, Vector b) { return _mm_sub_ps(a, b); }
  static HIDET_DIST_INLINE Vector add_product(Vector a, Vector b, Vector sum) {
    return _mm_add_ps(sum, _mm_mul_ps(a, b));
  }
  static HIDET_DIST_INLINE void store(float *at, Vector v) { _mm_storeu_ps(at, v); }
  static HIDET_DIST_INLINE void store_first(float *at, Vector v, int64_t lanes) {
    float values[kLanes];
    store(values, v);
    for (int64_t i = 0; i < lanes; ++i) at[i] = values[i];
  }

  template <class Rows>
  static HIDET_DIST_INLINE void interleave(const Rows &source, int64_t rows, int64_t depth, float *target,
                                           int64_t target_step) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      int64_t k = 0;
      for (; k + 4 <= depth; k += 4) {
        __m128 a = load(source[r] + k), b = load(source[r + 1] + k), c = load(source[r + 2] + k),
               d = load(source[r + 3] + k);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        float *const to = target + k * target_step + r;
        store(to, a);
        store(to + target_step, b);
        store(to + 2 * target_step, c);
        store(to + 3 * target_step, d);
      }
      for (; k < depth; ++k) {
        for (int64_t i = 0; i < 4; ++i) target[k * target_step + r + i] = source[r + i][k];
      }
    }
    for (; r < rows; ++r) {
      for (int64_t k = 0; k < depth; ++k) target[k * target_step + r] = source[r][k];
    }
  }
};

struct BaselineQuantized {
  static constexpr int64_t kWidth = 8, kRows = 2;

  static constexpr int32_t added(int bits, int scales) { return bits == 4 && scales == HIDET_DIST_SYMMETRIC ? 8 : 0; }

  static float round(const float *values, int64_t group, int8_t *rounded, int32_t *sum) {
    int32_t bits = 0;
    for (int64_t i = 0; i < group; ++i) {
      int32_t magnitude;
      __builtin_memcpy(&magnitude, values + i, 4);
      magnitude &= 0x7fffffff;
      bits = magnitude > bits ? magnitude : bits;
    }
    const Scale scale(bits);
    *sum = 0;
    for (int64_t i = 0; i < group; ++i) {
      // Adding and subtracting 1.5 * 2^23 rounds to an integer, halves to even.
      const float value = scale.factor > 0.0f ? values[i] * scale.factor : 0.0f;
      rounded[i] = static_cast<int8_t>((value + 12582912.0f) - 12582912.0f);
      *sum += rounded[i];
    }
    return scale.scale;
  }

  template <int Bits, int Scales, int Rows>
  static void run(int64_t groups, int64_t group, const QuantizedRows &left, const char *panel, float *totals) {
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t *const stored = reinterpret_cast<const uint8_t *>(panel + kWidth * scale_bytes(Scales));
      for (int r = 0; r < Rows; ++r) {
        const int8_t *const row = left.elements + g * group * Rows + r * 4;
        for (int64_t j = 0; j < kWidth; ++j) {
          int32_t sum = left.begins[g * Rows + r];
          for (int64_t k = 0; k < group; ++k) {
            const int64_t at = (Bits == 4 ? k / 8 : k / 4) * kWidth * 4 + j * 4 + k % 4;
            const int32_t weight = Bits == 4 ? (stored[at] >> (k % 8 / 4 * 4)) & 15 : static_cast<int8_t>(stored[at]);
            sum += row[k / 4 * 4 * Rows + k % 4] * weight;
          }
          const float scale = number<Scales>(panel, j);
          float &total = totals[r * kWidth + j];
          total += static_cast<float>(sum) * (scale * left.scales[g * Rows + r]);
          if (is_affine(Scales)) total += number<Scales>(panel, kWidth + j) * left.sums[g * Rows + r];
        }
      }
      panel += kWidth * scale_bytes(Scales) + group * kWidth * Bits / 8;
    }
  }

 private:
  template <int Scales>
  static HIDET_DIST_INLINE float number(const char *scales, int64_t index) {
    if constexpr (is_wide(Scales)) return reinterpret_cast<const float *>(scales)[index];
    return float_of_half(reinterpret_cast<const uint16_t *>(scales)[index]);
  }
};

}  // namespace

const hidet_dist::panels::Level hidet_dist::panels::kBaseline = {Baseline::kWidth,     PanelProduct<Baseline>::kScratch,
                                                                 multiply<Baseline>,   convolve_depthwise<Baseline>,
                                                                 read_tiles<Baseline>, write_tiles<Baseline>};
const hidet_dist::panels::Quantized hidet_dist::panels::kQuantizedBaseline = {quantized_row_bytes<BaselineQuantized>,
                                                                              multiply_quantized<BaselineQuantized>};
