/*
 * Stacks of matrices in memory, their products, and the tiling of a product for several threads.
 */
#ifndef HIDET_DIST_KERNELS_MATRICES_H
#define HIDET_DIST_KERNELS_MATRICES_H

#include "hidet_dist/kernels/tiles.h"

namespace hidet_dist {
namespace kernels {

/* The number of matrices of a stack. */
inline int64_t stack_size(const int64_t *sizes, int64_t dims) {
  int64_t count = 1;
  for (int64_t dim = 0; dim < dims; ++dim) count *= sizes[dim];
  return count;
}

/* The elements before a matrix of a stack, given those from one to the next for each dim. */
inline int64_t stack_offset(int64_t index, const int64_t *steps, const int64_t *sizes, int64_t dims) {
  int64_t offset = 0;
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    offset += index % sizes[dim] * steps[dim];
    index /= sizes[dim];
  }
  return offset;
}

/* A stack of matrices in memory, row-major or transposed. */
template <class T>
struct Matrices {
  const T *data;
  bool transposed;
  int64_t leading;
  const int64_t *steps; /* elements from one to the next, for each dim of the stack; 0 where it is broadcast */

  const T *at(int64_t index, const int64_t *sizes, int64_t dims) const {
    return data + stack_offset(index, steps, sizes, dims);
  }

  const T *element(const T *matrix, int64_t row, int64_t column) const {
    return transposed ? matrix + column * leading + row : matrix + row * leading + column;
  }
};

struct Product {
  int64_t dims; /* of the stack */
  const int64_t *sizes;
  int64_t m, n, k;

  int64_t stack() const { return stack_size(sizes, dims); }
};

/* The tiling of a product: tiles of `rows` x `columns`, at least `parts` of them if its sides are long enough. Each
 * begins at a multiple of `unit` columns. */
struct Cut {
  int64_t rows, columns;

  Cut(int64_t m, int64_t n, int64_t most_rows, int64_t most_columns, int64_t parts, int64_t unit = 16) {
    /* The data read for a part is proportional to its two sides. */
    int64_t best = 1, across = 1;
    double least = static_cast<double>(m) + static_cast<double>(n);
    for (int64_t down = 1; down <= parts; ++down) {
      const int64_t other = parts / down;
      if (parts % down != 0 || (down > 1 && m / down < 16) || (other > 1 && n / other < 16)) continue;
      const double sides = static_cast<double>(m) / down + static_cast<double>(n) / other;
      if (best * across < parts || sides < least) {
        best = down;
        across = other;
        least = sides;
      }
    }
    rows = block_size(m, most_rows, best, 1);
    columns = block_size(n, most_columns, across, unit);
  }
};

/* The number of parts of one product, so that all threads have equal work. */
inline int64_t parts_of_each(int64_t products, int64_t threads) {
  return products % threads == 0 || products >= 8 * threads ? 1 : threads;
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
