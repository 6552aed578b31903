#include "reduce.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "hidet_dist/collectives.h"

namespace {

// Elements that are reduced at a time, so that partial results stay in the first-level cache.
constexpr int64_t kBlock = 1024;

struct Sum {
  static constexpr bool kDivides = false;
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};
struct Mean : Sum {
  static constexpr bool kDivides = true;
};
struct Product {
  static constexpr bool kDivides = false;
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
};
// NaN wins, as in NumPy and PyTorch.
struct Max {
  static constexpr bool kDivides = false;
  template <typename T>
  static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  static constexpr bool kDivides = false;
  template <typename T>
  static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};

// How elements are stored, and in which type they are reduced.
template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value load(Stored x) { return x; }
  static Stored store(Value x) { return x; }
  static Value divide(Value x, int32_t by) {
    if constexpr (std::is_floating_point_v<T>) return x / static_cast<T>(by);
    return static_cast<T>(static_cast<int64_t>(x) / by);
  }
};

// Signed integers wrap around, which C++ leaves undefined for them but not for unsigned ones.
template <typename S, typename U>
struct Wrapping {
  using Stored = S;
  using Value = U;
  static Value load(Stored x) { return static_cast<U>(x); }
  static Stored store(Value x) { return static_cast<S>(x); }
  // Towards zero.
  static Value divide(Value x, int32_t by) { return static_cast<U>(static_cast<int64_t>(static_cast<S>(x)) / by); }
};

float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

struct BFloat16 {
  using Stored = uint16_t;
  using Value = float;
  static float load(uint16_t x) { return as_float(static_cast<uint32_t>(x) << 16); }
  static float divide(float x, int32_t by) { return x / static_cast<float>(by); }
  static uint16_t store(float x) {
    const uint32_t bits = as_bits(x);
    if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Value = float;
  static float divide(float x, int32_t by) { return x / static_cast<float>(by); }
  static float load(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
    const uint32_t exponent = (x >> 10) & 0x1f;
    const uint32_t mantissa = x & 0x3ff;
    if (exponent == 0x1f) return as_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent != 0) return as_float(sign | (exponent + 112) << 23 | mantissa << 13);
    // Subnormal: mantissa * 2^-24, which binary32 holds exactly.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return as_float(sign | as_bits(magnitude));
  }
  static uint16_t store(float x) {
    const uint32_t bits = as_bits(x);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);  // 2^16 and above
    if (magnitude < 0x38800000) {                                             // below the least normal, 2^-14
      // Adding 0.5 leaves the multiple of 2^-24 in the low bits, rounded by the hardware.
      return static_cast<uint16_t>(sign | (as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f)));
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));  // may round up to infinity
  }
};

template <typename Type, typename Op>
void reduce_as(const void *const *sources, int32_t source_count, void *result, int64_t count) {
  using Stored = typename Type::Stored;
  using Value = typename Type::Value;
  Value block[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    const Stored *first = static_cast<const Stored *>(sources[0]) + begin;
    for (int64_t i = 0; i < size; ++i) block[i] = Type::load(first[i]);
    for (int32_t s = 1; s < source_count; ++s) {
      const Stored *next = static_cast<const Stored *>(sources[s]) + begin;
      for (int64_t i = 0; i < size; ++i) block[i] = Op::apply(block[i], Type::load(next[i]));
    }
    if constexpr (Op::kDivides) {
      for (int64_t i = 0; i < size; ++i) block[i] = Type::divide(block[i], source_count);
    }
    Stored *out = static_cast<Stored *>(result) + begin;
    for (int64_t i = 0; i < size; ++i) out[i] = Type::store(block[i]);
  }
}

// Unsigned arithmetic gives the bits of a signed sum or product; an order needs the sign.
template <typename Arithmetic, typename Ordered>
void reduce_by(const void *const *sources, int32_t source_count, void *result, int64_t count, int32_t reduce_op) {
  switch (reduce_op) {
    case HIDET_DIST_SUM:
      return reduce_as<Arithmetic, Sum>(sources, source_count, result, count);
    case HIDET_DIST_MEAN:
      return reduce_as<Arithmetic, Mean>(sources, source_count, result, count);
    case HIDET_DIST_PRODUCT:
      return reduce_as<Arithmetic, Product>(sources, source_count, result, count);
    case HIDET_DIST_MAX:
      return reduce_as<Ordered, Max>(sources, source_count, result, count);
    default:
      return reduce_as<Ordered, Min>(sources, source_count, result, count);
  }
}

}  // namespace

namespace hidet_dist {

void reduce(const void *const *sources, int32_t source_count, void *result, int64_t count, int32_t dtype,
            int32_t reduce_op) {
  switch (dtype) {
    case HIDET_DIST_F32:
      return reduce_by<Plain<float>, Plain<float>>(sources, source_count, result, count, reduce_op);
    case HIDET_DIST_F64:
      return reduce_by<Plain<double>, Plain<double>>(sources, source_count, result, count, reduce_op);
    case HIDET_DIST_F16:
      return reduce_by<Float16, Float16>(sources, source_count, result, count, reduce_op);
    case HIDET_DIST_BF16:
      return reduce_by<BFloat16, BFloat16>(sources, source_count, result, count, reduce_op);
    case HIDET_DIST_I8:
      return reduce_by<Wrapping<int8_t, uint8_t>, Plain<int8_t>>(sources, source_count, result, count, reduce_op);
    case HIDET_DIST_I32:
      return reduce_by<Wrapping<int32_t, uint32_t>, Plain<int32_t>>(sources, source_count, result, count, reduce_op);
    case HIDET_DIST_I64:
      return reduce_by<Wrapping<int64_t, uint64_t>, Plain<int64_t>>(sources, source_count, result, count, reduce_op);
    case HIDET_DIST_BOOL:  // bytes of 0 and 1: "or" is their max, "and" their min
      reduce_op = reduce_op == HIDET_DIST_SUM || reduce_op == HIDET_DIST_MAX ? HIDET_DIST_MAX : HIDET_DIST_MIN;
      [[fallthrough]];
    default:
      return reduce_by<Plain<uint8_t>, Plain<uint8_t>>(sources, source_count, result, count, reduce_op);
  }
}

}  // namespace hidet_dist
