// Conversion of halves (binary16) to floats and back by the processor's instructions for it, where it has some: one
// number, or a run at any address. The compiler's functions are called by the names that immintrin.h gives others to:
// that header takes longer to compile, precompiled too, than most kernels.
#ifndef HIDET_DIST_KERNELS_HALVES_H
#define HIDET_DIST_KERNELS_HALVES_H

#include <stdint.h>
#include <string.h>

#if defined(__F16C__)

namespace hd {

const int kNearest = 0,
          kAsSet = 4;  // rounding: to the nearest number, the even one of two; and what the thread has set

static inline __attribute__((always_inline)) float float_of(uint16_t half) {
  typedef short Halves __attribute__((vector_size(16)));
  const Halves halves = {static_cast<short>(half), 0, 0, 0, 0, 0, 0, 0};
  return __builtin_ia32_vcvtph2ps(halves)[0];
}
static inline __attribute__((always_inline)) uint16_t half_of(float x) {
  typedef float Floats __attribute__((vector_size(16)));
  const Floats floats = {x, 0, 0, 0};
  return static_cast<uint16_t>(__builtin_ia32_vcvtps2ph(floats, kNearest)[0]);
}

// Eight numbers.
static inline __attribute__((always_inline)) void eight_floats_of(const void *halves, float *floats) {
  typedef short Halves __attribute__((vector_size(16)));
  typedef float Floats __attribute__((vector_size(32)));
  Halves read;
  memcpy(&read, halves, sizeof(read));
  const Floats converted = __builtin_ia32_vcvtph2ps256(read);
  memcpy(floats, &converted, sizeof(converted));
}
static inline __attribute__((always_inline)) void eight_halves_of(const float *floats, void *halves) {
  typedef short Halves __attribute__((vector_size(16)));
  typedef float Floats __attribute__((vector_size(32)));
  Floats read;
  memcpy(&read, floats, sizeof(read));
  const Halves converted = __builtin_ia32_vcvtps2ph256(read, kNearest);
  memcpy(halves, &converted, sizeof(converted));
}

#if defined(__AVX512F__)
// Sixteen numbers.
static inline __attribute__((always_inline)) void sixteen_floats_of(const void *halves, float *floats) {
  typedef short Halves __attribute__((vector_size(32)));
  typedef float Floats __attribute__((vector_size(64)));
  Halves read;
  memcpy(&read, halves, sizeof(read));
  const Floats none = {}, converted = __builtin_ia32_vcvtph2ps512_mask(read, none, 0xffff, kAsSet);
  memcpy(floats, &converted, sizeof(converted));
}
static inline __attribute__((always_inline)) void sixteen_halves_of(const float *floats, void *halves) {
  typedef short Halves __attribute__((vector_size(32)));
  typedef float Floats __attribute__((vector_size(64)));
  Floats read;
  memcpy(&read, floats, sizeof(read));
  const Halves none = {}, converted = __builtin_ia32_vcvtps2ph512_mask(read, kNearest, none, 0xffff);
  memcpy(halves, &converted, sizeof(converted));
}
#endif

}  // namespace hd

#endif

#endif
