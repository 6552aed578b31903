/*
 * Attention, softmax(q k^T * scale + bias) v, whose scores never reach memory: those of a block of queries with all keys
 * stay in a core's second-level cache. Compiled into generated kernels, as C++11 with OpenMP.
 *
 * The keys and the values of a head are brought into panels (hidet_dist/panels.h), which all of its blocks read. The sums
 * of a query do not depend on the queries beside it, nor on the number of threads.
 */
#ifndef HIDET_DIST_KERNELS_ATTENTION_H
#define HIDET_DIST_KERNELS_ATTENTION_H

#include <immintrin.h>
#include <math.h>

#include "hidet_dist/kernels/functions.h"
#include "hidet_dist/kernels/panel_product.h"

namespace hidet_dist {
namespace kernels {
namespace attention {

struct Shape {
  int64_t dims; /* of the stack of heads */
  const int64_t *sizes;
  int64_t queries, keys;
  int64_t size, size_v; /* of a head of queries and keys, and of values */
  float scale;

  int64_t stack() const { return stack_size(sizes, dims); }
};

/* A stack of matrices in memory. Where they are broadcast, elements from one to the next are 0. */
struct Operand {
  const float *data;
  const int64_t *steps; /* elements from one matrix to the next, for each dim of the stack, */
  int64_t row, column;  /* from one row to the next, and from one column to the next */

  const float *at(int64_t index, const Shape &shape) const {
    return data + stack_offset(index, steps, shape.sizes, shape.dims);
  }
};

const int64_t kScores = 1 << 16;              /* of a block: 256 KiB */
const int64_t kLeastRows = 12, kMostRows = 96; /* of a block: whole passes of a product over its panels */

inline int64_t rows_of_block(int64_t keys) {
  const int64_t rows = kScores / keys / kLeastRows * kLeastRows;
  return std::min(std::max(rows, kLeastRows), kMostRows);
}

/* Brings columns that lie one after the other, `step` elements apart, into the rows of a panel of so many columns. */
inline void transpose(const float *from, int64_t step, int64_t depth, int64_t width, float *to) {
  int64_t j = 0;
  for (; j + 4 <= width; j += 4, from += 4 * step) {
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4) {
      __m128 a = _mm_loadu_ps(from + k), b = _mm_loadu_ps(from + step + k);
      __m128 c = _mm_loadu_ps(from + 2 * step + k), d = _mm_loadu_ps(from + 3 * step + k);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      float *const block = to + k * width + j;
      _mm_storeu_ps(block, a);
      _mm_storeu_ps(block + width, b);
      _mm_storeu_ps(block + 2 * width, c);
      _mm_storeu_ps(block + 3 * width, d);
    }
    for (; k < depth; ++k) {
      for (int64_t i = 0; i < 4; ++i) to[k * width + j + i] = from[i * step + k];
    }
  }
  for (; j < width; ++j, from += step) {
    for (int64_t k = 0; k < depth; ++k) to[k * width + j] = from[k];
  }
}

/* Brings a right operand into panels: element (k, j) is at from[k * row + j * column]. */
inline void pack(const float *from, int64_t row, int64_t column, int64_t depth, int64_t columns, float *to) {
  for (int64_t first = 0; first < columns; first += kPanelWidth, to += depth * kPanelWidth) {
    const int64_t width = std::min(kPanelWidth, columns - first);
    const float *const source = from + first * column;
    if (row == 1) {
      transpose(source, column, depth, width, to);
    } else if (column == 1) {
      for (int64_t k = 0; k < depth; ++k)
        memcpy(to + k * width, source + k * row, static_cast<size_t>(width) * sizeof(float));
    } else {
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t j = 0; j < width; ++j) to[k * width + j] = source[k * row + j * column];
      }
    }
  }
}

/* Makes the weights of a query's scores, up to a factor; returns the sum of the weights. */
inline float weigh(float *x, int64_t keys, float scale, const float *bias, int64_t step) {
  float most = -INFINITY, total = 0.0f;
  if (bias == nullptr) {
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < keys; ++j) {
      x[j] *= scale;
      most = x[j] > most ? x[j] : most;
    }
  } else if (step == 1) {
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < keys; ++j) {
      x[j] = x[j] * scale + bias[j];
      most = x[j] > most ? x[j] : most;
    }
  } else {
    for (int64_t j = 0; j < keys; ++j) {
      x[j] = x[j] * scale + bias[j * step];
      most = x[j] > most ? x[j] : most;
    }
  }
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < keys; ++j) {
    x[j] = hd::exp(x[j] - most);
    total += x[j];
  }
  return total;
}

inline void multiply(const float *left, int64_t row_step, int64_t depth_step, int64_t rows, int64_t columns,
                     int64_t depth, const float *panels, float *result, int64_t result_step, void *scratch) {
  const hidet_dist_panel_product part = {
      left, row_step,       depth_step,     rows,   columns,     depth,   panels,  HIDET_DIST_IN_PANELS,
      0,    HIDET_DIST_F32, HIDET_DIST_F32, result, result_step, scratch, nullptr, 0};
  hidet_dist_multiply_panels(kPanelLevel, &part);
}

/* Writes the result row-major, one head after the other. The rows or the columns of queries follow one another. */
inline void attend(const Shape &shape, const Operand &q, const Operand &k, const Operand &v, const Operand &bias,
                   float *result) {
  if (shape.keys == 0) { /* sums over nothing */
    std::fill_n(result, shape.stack() * shape.queries * shape.size_v, 0.0f);
    return;
  }
  const int64_t rows = rows_of_block(shape.keys), blocks = divide_up(shape.queries, rows);
  const int64_t units = shape.stack() * blocks, ld = leading_dimension(shape.keys);
  const double work = static_cast<double>(shape.stack()) * shape.queries * shape.keys * (shape.size + shape.size_v);
  const int64_t threads = std::min(threads_for(work), units);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const PanelMemory memory(shape.keys * (shape.size + shape.size_v) + rows * ld);
    float *const keys = memory.tile(), *const values = keys + shape.keys * shape.size;
    float *const scores = values + shape.keys * shape.size_v;
    const float *packed_keys = nullptr, *packed_values = nullptr; /* heads that share them follow one another */
/* Long runs first, as a thread packs the keys of each head that it comes to; short ones in the end. */
#pragma omp for schedule(guided)
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t index = unit / blocks, row = unit % blocks * rows, count = std::min(rows, shape.queries - row);
      const float *const own_keys = k.at(index, shape), *const own_values = v.at(index, shape);
      if (own_keys != packed_keys) pack(own_keys, k.column, k.row, shape.size, shape.keys, keys);
      if (own_values != packed_values) pack(own_values, v.row, v.column, shape.keys, shape.size_v, values);
      packed_keys = own_keys;
      packed_values = own_values;
      multiply(q.at(index, shape) + row * q.row, q.row, q.column, count, shape.keys, shape.size, keys, scores, ld,
               memory.scratch());
      const float *const biases = bias.data == nullptr ? nullptr : bias.at(index, shape) + row * bias.row;
      float *const own = result + (index * shape.queries + row) * shape.size_v;
      float totals[kMostRows];
      for (int64_t r = 0; r < count; ++r) {
        totals[r] = weigh(scores + r * ld, shape.keys, shape.scale, biases == nullptr ? nullptr : biases + r * bias.row,
                          bias.column);
      }
      multiply(scores, ld, 1, count, shape.size_v, shape.keys, values, own, shape.size_v, memory.scratch());
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t d = 0; d < shape.size_v; ++d) own[r * shape.size_v + d] /= totals[r];
      }
    }
  }
}

}  // namespace attention
}  // namespace kernels
}  // namespace hidet_dist

#endif
