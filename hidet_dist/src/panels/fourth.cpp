// Products by panels at the level x86-64-v4: AVX-512.
#include "depthwise.hpp"
#include "levels.hpp"
#include "wide.hpp"
#include "wide_quantized.hpp"
#include "winograd.hpp"

namespace {

struct Fourth : Wide {
  using Vector = __m512;
  static constexpr int64_t kLanes = 16, kWidth = 32, kRows = 14, kTwoPanels = 6;
  static constexpr int kPixels = 8;
  // With masks, because GCC 12 warns of undefined values in the functions without.
  static constexpr __mmask16 kAll = 0xffff;

  static HIDET_DIST_INLINE Vector zero() { return _mm512_setzero_ps(); }
  static HIDET_DIST_INLINE Vector load_first(const float *at, int64_t lanes) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << lanes) - 1), at);
  }
  static HIDET_DIST_INLINE Vector load(const float *at) { return _mm512_loadu_ps(at); }
  static HIDET_DIST_INLINE Vector load(const Brain *at) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, bits), 16));
  }
  static HIDET_DIST_INLINE Vector load(const Half *at) {
    return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
  }
  static HIDET_DIST_INLINE Vector broadcast(const float *at) { return _mm512_set1_ps(*at); }
  static HIDET_DIST_INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static HIDET_DIST_INLINE Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  static HIDET_DIST_INLINE Vector add_product(Vector a, Vector b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
  static HIDET_DIST_INLINE void store(float *at, Vector v) { _mm512_storeu_ps(at, v); }
  static HIDET_DIST_INLINE void store_first(float *at, Vector v, int64_t lanes) {
    _mm512_mask_storeu_ps(at, static_cast<__mmask16>((1u << lanes) - 1), v);
  }
};

}  // namespace

const hidet_dist::panels::Level hidet_dist::panels::kFourth = {Fourth::kWidth,     PanelProduct<Fourth>::kScratch,
                                                               multiply<Fourth>,   convolve_depthwise<Fourth>,
                                                               read_tiles<Fourth>, write_tiles<Fourth>};
const hidet_dist::panels::Quantized hidet_dist::panels::kQuantizedFourth = {quantized_row_bytes<WideQuantized<32>>,
                                                                            multiply_quantized<WideQuantized<32>>};
