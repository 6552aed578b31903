// Products by panels at the level x86-64-v3: AVX2, FMA and F16C.
#include "depthwise.hpp"
#include "levels.hpp"
#include "wide.hpp"
#include "wide_quantized.hpp"
#include "winograd.hpp"

namespace {

struct Third : Wide {
  using Vector = __m256;
  static constexpr int64_t kLanes = 8, kWidth = 16, kRows = 6, kTwoPanels = 2;
  static constexpr int kPixels = 4;

  static HIDET_DIST_INLINE Vector zero() { return _mm256_setzero_ps(); }
  static HIDET_DIST_INLINE __m256i first(int64_t lanes) {
    const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)), numbers);
  }
  static HIDET_DIST_INLINE Vector load_first(const float *at, int64_t lanes) {
    return _mm256_maskload_ps(at, first(lanes));
  }
  static HIDET_DIST_INLINE Vector load(const float *at) { return _mm256_loadu_ps(at); }
  static HIDET_DIST_INLINE Vector load(const Brain *at) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static HIDET_DIST_INLINE Vector load(const Half *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
  }
  static HIDET_DIST_INLINE Vector broadcast(const float *at) { return _mm256_broadcast_ss(at); }
  static HIDET_DIST_INLINE Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static HIDET_DIST_INLINE Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static HIDET_DIST_INLINE Vector add_product(Vector a, Vector b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
  static HIDET_DIST_INLINE void store(float *at, Vector v) { _mm256_storeu_ps(at, v); }
  static HIDET_DIST_INLINE void store_first(float *at, Vector v, int64_t lanes) {
    _mm256_maskstore_ps(at, first(lanes), v);
  }
};

}  // namespace

const hidet_dist::panels::Level hidet_dist::panels::kThird = {Third::kWidth,     PanelProduct<Third>::kScratch,
                                                              multiply<Third>,   convolve_depthwise<Third>,
                                                              read_tiles<Third>, write_tiles<Third>};
const hidet_dist::panels::Quantized hidet_dist::panels::kQuantizedThird = {quantized_row_bytes<WideQuantized<16>>,
                                                                           multiply_quantized<WideQuantized<16>>};
