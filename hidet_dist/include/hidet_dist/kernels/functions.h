// Elementary functions without branches, so that loops of them become vector code, and accumulators of many lanes.
//
// Polynomials: S. L. Moshier, Cephes Mathematical Library, single precision (log, tanh); for exp and erf see below.
// Their errors are within 2 units in the last place, over all of their range.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <limits>
#include <memory>
#include <type_traits>

#include "hidet_dist/kernels/halves.h"

#ifdef __FAST_MATH__
#error "functions.h counts on infinities, NaN and the order of operations: compile without -ffast-math"
#endif

#define HD_INLINE static inline __attribute__((always_inline))

namespace hd {

HD_INLINE uint32_t bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
HD_INLINE float from_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// 16 bit floats are only stored: arithmetic is in float.
struct bf16 {
  uint16_t u;
};
struct f16 {
  uint16_t u;
};

template <class T> HD_INLINE T load(const T &x) { return x; }
HD_INLINE float load(const bf16 &x) { return from_bits(uint32_t(x.u) << 16); }
HD_INLINE float load(const f16 &x) {
  const uint32_t sign = uint32_t(x.u & 0x8000u) << 16, rest = x.u & 0x7fffu;
  const uint32_t normal = (rest << 13) + 0x38000000u;
  const uint32_t special = (rest << 13) | 0x7f800000u;
  const uint32_t tiny = bits(from_bits(0x38800000u + (rest << 13)) - from_bits(0x38800000u));  // rest * 2^-24
  const uint32_t u = rest < 0x0400u ? tiny : rest >= 0x7c00u ? special : normal;
  return from_bits(u | sign);
}

template <class T> struct To {
  template <class S> HD_INLINE T from(S x) { return (T)x; }
};
template <> struct To<bf16> {
  HD_INLINE bf16 from(float x) {
    const uint32_t u = bits(x), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bf16 y;
    y.u = uint16_t(x != x ? (u >> 16) | 0x0040u : rounded);
    return y;
  }
};
template <> struct To<f16> {
  HD_INLINE f16 from(float x) {
    const uint32_t u = bits(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
    const uint32_t normal = (rest - 0x38000000u + 0x0fffu + ((rest >> 13) & 1u)) >> 13;
    const uint32_t tiny = bits(from_bits(rest) + 0.5f) - 0x3f000000u;  // the sum rounds to multiples of 2^-24
    const uint32_t large = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
    f16 y;
    y.u = uint16_t(sign | (rest >= 0x47800000u ? large : rest < 0x38800000u ? tiny : normal));
    return y;
  }
};

// Runs of halves as floats and back: by instructions for it where there are some, which compilers do not find.
HD_INLINE void load_run(const f16 *source, int64_t count, float *target) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) sixteen_floats_of(source + i, target + i);
#endif
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) eight_floats_of(source + i, target + i);
  for (; i < count; ++i) target[i] = float_of(source[i].u);
#else
  for (; i < count; ++i) target[i] = load(source[i]);
#endif
}
HD_INLINE void store_run(const float *source, int64_t count, f16 *target) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) sixteen_halves_of(source + i, target + i);
#endif
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) eight_halves_of(source + i, target + i);
  for (; i < count; ++i) target[i].u = half_of(source[i]);
#else
  for (; i < count; ++i) target[i] = To<f16>::from(source[i]);
#endif
}

// max and min keep NaN, as PyTorch's do.
template <class T> HD_INLINE T max(T a, T b) {
  const T greater = b > a ? b : a;
  return b != b ? b : greater;
}
template <class T> HD_INLINE T min(T a, T b) {
  const T less = b < a ? b : a;
  return b != b ? b : less;
}
template <class T> HD_INLINE T square(T x) { return x * x; }
template <class T> HD_INLINE T cube(T x) { return x * x * x; }
HD_INLINE float abs(float x) { return from_bits(bits(x) & 0x7fffffffu); }
HD_INLINE double abs(double x) { return __builtin_fabs(x); }
template <class T> HD_INLINE T abs(T x) { return x < 0 ? -x : x; }

// (exp(r) - 1 - r) / r^2 for |r| <= log(2) / 2: a minimax polynomial for exp(r), fitted for this file, whose error is
// 4e-9 of it.
HD_INLINE float exp_beyond_r(float r) {
  float p = 1.3814540580e-3f;
  p = p * r + 8.3687454462e-3f;
  p = p * r + 4.1668388993e-2f;
  p = p * r + 1.6666521132e-1f;
  return p * r + 4.9999994040e-1f;
}
HD_INLINE float exp_near_0(float r) { return exp_beyond_r(r) * (r * r) + r + 1.0f; }

HD_INLINE float exp(float x) {
  float c = x < -104.0f ? -104.0f : x;
  c = c > 89.0f ? 89.0f : c;
  const float n = __builtin_rintf(c * 1.44269504088896341f);
  const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  const float p = exp_near_0(r);
  // 2^n in two steps: it may be less or more than a float holds, the product not. Where the result is 0, the second step
  // multiplies by 0: a product that underflows takes a processor a hundred cycles, and half of a causal mask does.
  const int32_t i = (int32_t)n, half = i >> 1;
  const float rest = x < -104.0f ? 0.0f : from_bits(uint32_t(i - half + 127) << 23);
  return p * from_bits(uint32_t(half + 127) << 23) * rest;
}

// 1 + exp(-x), which is infinite where exp(-x) is 2^128 or more.
HD_INLINE float one_and_exp_of_minus(float x) {
  float c = x < -89.0f ? -89.0f : x;
  c = c > 88.0f ? 88.0f : c;
  // The sum with 3 * 2^22 has the whole part n in its last bits.
  const float whole = c * -1.44269504088896341f + 12582912.0f, n = whole - 12582912.0f;
#ifdef __FMA__
  const float r = -(n * 0.69314718246f + c);
#else
  const float r = n * 2.12194440e-4f - (n * 0.693359375f + c);
#endif
  const float p = (exp_beyond_r(r) * r + 1.0f) * r + 1.0f;
  return p * from_bits((bits(whole) + 127) << 23) + 1.0f;
}

// 1 / (1 + exp(-x)), and a times it: within 3 units where |x| < 10, and 6 elsewhere. Results of the first below the least
// normal number are 0.
HD_INLINE float logistic(float x) { return 1.0f / one_and_exp_of_minus(x); }
HD_INLINE float times_logistic(float a, float x) { return a / one_and_exp_of_minus(x); }

HD_INLINE float log(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float y = tiny ? x * 8388608.0f : x;
  const uint32_t u = bits(y);
  int32_t e = (int32_t)(u >> 23) - 126 - (tiny ? 23 : 0);
  float m = from_bits((u & 0x007fffffu) | 0x3f000000u);  // in [0.5, 1)
  const bool low = m < 0.707106781186547524f;
  e -= low ? 1 : 0;
  m = low ? m + m - 1.0f : m - 1.0f;
  const float z = m * m, n = (float)e;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  float value = p * m * z + n * -2.12194440e-4f - 0.5f * z;
  value = m + value + n * 0.693359375f;
  value = x == 0.0f ? -INFINITY : value;
  value = x < 0.0f ? NAN : value;
  return x < INFINITY ? value : x;  // infinity and NaN map to themselves
}

HD_INLINE float tanh(float x) {
  const float z = x * x, a = abs(x);
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float small = p * z * x + x;
  const float large = 1.0f - 2.0f / (exp(a + a) + 1.0f);
  return a < 0.625f ? small : from_bits(bits(large) | (bits(x) & 0x80000000u));
}

// Minimax polynomials, fitted for this file: erf(x) / x - 1 in x^2 for |x| < 0.9, -log2(erfc(|x|)) from there to 3.93,
// beyond which erf is 1 in single precision, and 2^f for |f| <= 1/2.
HD_INLINE float erf(float x) {
  const float a = abs(x), c = a > 3.93f ? 3.93f : a, z = x * x;
  float p = -6.0903409030e-04f;
  p = p * z + 5.0119631924e-03f;
  p = p * z - 2.6778912172e-02f;
  p = p * z + 1.1282140762e-01f;
  p = p * z - 3.7612524629e-01f;
  p = p * z + 1.2837915123e-01f;
  float q = 1.8197913887e-03f;
  q = q * c - 2.2581873462e-02f;
  q = q * c + 1.3175092638e-01f;
  q = q * c + 9.3840646744e-01f;
  q = q * c + 1.6163923740e+00f;
  q = q * c + 2.6289785746e-03f;
  // erfc = 2^-q: the sum with 3 * 2^22 has the whole part of -q in its last bits.
  const float whole = 12582912.0f - q, f = (12582912.0f - whole) - q;
  float e = 1.3276438694e-03f;
  e = e * f + 9.6755409613e-03f;
  e = e * f + 5.5507134646e-02f;
  e = e * f + 2.4022120237e-01f;
  e = e * f + 6.9314694405e-01f;
  e = e * f + 1.0000001192e+00f;
  const float large = 1.0f - from_bits(bits(e) + (bits(whole) << 23));
  return a >= 0.9f ? from_bits(bits(large) | (bits(x) & 0x80000000u)) : p * x + x;
}

HD_INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
HD_INLINE double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
HD_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
HD_INLINE double sqrt(double x) { return __builtin_sqrt(x); }
HD_INLINE float floor(float x) { return __builtin_floorf(x); }
HD_INLINE double floor(double x) { return __builtin_floor(x); }
HD_INLINE float ceil(float x) { return __builtin_ceilf(x); }
HD_INLINE double ceil(double x) { return __builtin_ceil(x); }
HD_INLINE float trunc(float x) { return __builtin_truncf(x); }
HD_INLINE double trunc(double x) { return __builtin_trunc(x); }
HD_INLINE double exp(double x) { return ::exp(x); }
HD_INLINE double log(double x) { return ::log(x); }
HD_INLINE double tanh(double x) { return ::tanh(x); }
HD_INLINE double erf(double x) { return ::erf(x); }

// What accumulates: the identity, and how two values become one.
template <class T> struct Sum {
  static constexpr T identity() { return T(0); }
  template <class V> HD_INLINE V combine(V a, V b) { return a + b; }
};
template <class T> struct Product {
  static constexpr T identity() { return T(1); }
  template <class V> HD_INLINE V combine(V a, V b) { return a * b; }
};
template <class T, bool floating = std::is_floating_point<T>::value> struct Bounds {
  static constexpr T low() { return -INFINITY; }
  static constexpr T high() { return INFINITY; }
};
template <class T> struct Bounds<T, false> {
  static constexpr T low() { return std::numeric_limits<T>::min(); }
  static constexpr T high() { return std::numeric_limits<T>::max(); }
};
template <class T> struct Max {
  static constexpr T identity() { return Bounds<T>::low(); }
  template <class V> HD_INLINE V combine(V a, V b) {
    const V greater = b > a ? b : a;  // one instruction, which keeps a's NaN
    return b != b ? b : greater;
  }
};
template <class T> struct Min {
  static constexpr T identity() { return Bounds<T>::high(); }
  template <class V> HD_INLINE V combine(V a, V b) {
    const V less = b < a ? b : a;
    return b != b ? b : less;
  }
};
struct And {
  static constexpr bool identity() { return true; }
  HD_INLINE bool combine(bool a, bool b) { return a & b; }
};
struct Or {
  static constexpr bool identity() { return false; }
  HD_INLINE bool combine(bool a, bool b) { return a | b; }
};

// A row is reduced in some lanes, which are combined in a fixed order at the end.
template <class Op, class T, int LANES> HD_INLINE void start(T (&lanes)[LANES]) {
  for (int l = 0; l < LANES; ++l) lanes[l] = Op::identity();
}
template <class Op, class T, int LANES> HD_INLINE T finish(T (&lanes)[LANES]) {
  constexpr int NUMBER = 16 / sizeof(T), ROWS = LANES / NUMBER;
  typedef T Vector __attribute__((vector_size(16)));
  typedef decltype(Vector() == Vector()) Places;
  Vector rows[ROWS];
  memcpy(rows, lanes, sizeof(rows));
  for (int half = ROWS / 2; half; half /= 2)
    for (int j = 0; j < half; ++j) rows[j] = Op::combine(rows[j], rows[j + half]);
  Vector last = rows[0];
#pragma GCC unroll 4
  for (int half = NUMBER / 2; half; half /= 2) {
    Places places;
    for (int l = 0; l < NUMBER; ++l) places[l] = (l + half) % NUMBER;
    last = Op::combine(last, __builtin_shuffle(last, places));
  }
  return last[0];
}

}  // namespace hd
