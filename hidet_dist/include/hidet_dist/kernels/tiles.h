/*
 * Common parts of the matrix product and the convolution: tiling for a core's cache, scratch memory, and conversion of
 * half precision to binary32. Compiled into generated kernels, as C++11 with OpenMP.
 *
 * A kernel computes a tile of its result in scratch memory and passes it to a `store`, which writes it to the result
 * while it is in the cache, and applies the fused element-wise operators:
 *
 *     store(tile, ld, row, rows, column, columns)
 *
 * where element (r, c) of the tile, at tile[r * ld + c], is element (row + r, column + c) of the result seen as a
 * matrix.
 */
#ifndef HIDET_DIST_KERNELS_TILES_H
#define HIDET_DIST_KERNELS_TILES_H

#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>

#include "hidet_dist/kernels/halves.h"

namespace hidet_dist {
namespace kernels {

/* The bits of a half-precision type, with the layout of hidet's types. */
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float as_float(float value) { return value; }

inline float as_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

inline float as_float(Float16 value) {
#if defined(__F16C__)
  return hd::float_of(value.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  float result;
  if (magnitude < 0x0400u) { /* zero or subnormal: a multiple of 2^-24 */
    result = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    uint32_t bits;
    memcpy(&bits, &result, sizeof(bits));
    bits |= sign;
    memcpy(&result, &bits, sizeof(result));
    return result;
  }
  /* The exponent's bias is 15, and 127 in binary32; all ones stay all ones. */
  const uint32_t bits = sign | ((magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u));
  memcpy(&result, &bits, sizeof(result));
  return result;
#endif
}

template <class T>
inline void read_run(const T *source, int64_t count, float *target) {
  for (int64_t i = 0; i < count; ++i) target[i] = as_float(source[i]);
}

inline void read_run(const float *source, int64_t count, float *target) {
  memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
}

inline void read_run(const Float16 *source, int64_t count, float *target) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) hd::eight_floats_of(source + i, target + i);
#endif
  for (; i < count; ++i) target[i] = as_float(source[i]);
}

/* Every `stride`-th element of a run. */
template <class T>
inline void read_strided(const T *source, int64_t stride, int64_t count, float *target) {
  if (stride == 1) {
    read_run(source, count, target);
  } else if (stride == 2) { /* a constant, so that it is vectorized */
    for (int64_t i = 0; i < count; ++i) target[i] = as_float(source[2 * i]);
  } else {
    for (int64_t i = 0; i < count; ++i) target[i] = as_float(source[stride * i]);
  }
}

/* Memory of one thread for the length of a call. */
class Scratch {
 public:
  explicit Scratch(int64_t floats) : data_(nullptr) {
    const size_t bytes = static_cast<size_t>(std::max<int64_t>(floats, 1)) * sizeof(float);
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, bytes) != 0) throw std::bad_alloc();
    data_ = static_cast<float *>(memory);
  }
  ~Scratch() { free(data_); }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;
  float *get() const { return data_; }

 private:
  float *data_;
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* A tile's leading dimension: whole vectors, and rows that do not all fall into the same sets of the cache. */
inline int64_t leading_dimension(int64_t columns) {
  const int64_t whole = divide_up(columns, 16) * 16;
  return whole % 512 == 0 ? whole + 16 : whole;
}

/* How many threads pay for this many multiplications: starting them takes some microseconds. */
inline int64_t threads_for(double products) {
  const double worth_a_thread = 1 << 17;
  const double most = static_cast<double>(omp_get_max_threads());
  return static_cast<int64_t>(std::max(1.0, std::min(most, products / worth_a_thread)));
}

/* `total` in equal blocks of at most `most`, each a multiple of `unit`; their number is a multiple of `parts` if that
 * is possible. */
inline int64_t block_size(int64_t total, int64_t most, int64_t parts, int64_t unit) {
  const int64_t count = divide_up(divide_up(total, most), parts) * parts;
  return std::max<int64_t>(1, std::min(total, divide_up(divide_up(total, count), unit) * unit));
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
