/*
 * Products of stacks of matrices by a single-threaded BLAS, in parallel over the stack and over tiles of its products.
 * Half-precision operands are converted to binary32 a panel at a time, and accumulated in binary32.
 */
#ifndef HIDET_DIST_KERNELS_MATMUL_H
#define HIDET_DIST_KERNELS_MATMUL_H

#include "hidet_dist/kernels/matrices.h"

/* The BLAS standard's sgemm, as scipy-openblas32 names it; its cblas.h and hidet's headers both have a bfloat16. */
extern "C" void scipy_cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                                  const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);

namespace hidet_dist {
namespace kernels {

const int kRowMajor = 101, kNotTransposed = 111, kTransposed = 112; /* CBLAS's enumerations */

inline void sgemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
                  const float *b, int64_t ldb, bool add, float *c, int64_t ldc) {
  scipy_cblas_sgemm(kRowMajor, a_transposed ? kTransposed : kNotTransposed, b_transposed ? kTransposed : kNotTransposed,
                    static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), 1.0f, a, static_cast<int>(lda), b,
                    static_cast<int>(ldb), add ? 1.0f : 0.0f, c, static_cast<int>(ldc));
}

/*
 * Tiles of 4 MiB. BLAS copies the operands of each tile, which takes a tenth of the time with tiles of 256 x 512, more
 * than is gained where the epilogue reads the tile from a second-level cache instead of a third-level one.
 */
const int64_t kTileRows = 1024;
const int64_t kTileColumns = 1024;
const int64_t kPanelDepth = 512;

/* One tile, with operands read in place. */
template <class T>
struct TileProduct;

template <>
struct TileProduct<float> {
  static int64_t scratch(int64_t, int64_t) { return 0; }

  static void run(const Matrices<float> &a, const float *a_matrix, const Matrices<float> &b, const float *b_matrix,
                  int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t k, float *, float *c,
                  int64_t ldc) {
    sgemm(a.transposed, b.transposed, rows, columns, k, a.element(a_matrix, row, 0), a.leading,
          b.element(b_matrix, 0, column), b.leading, false, c, ldc);
  }
};

/* One tile of a half-precision type: panels of the operands are first converted to binary32, in their layout. */
template <class T>
struct TileProduct {
  static int64_t scratch(int64_t rows, int64_t columns) { return panel(rows) + panel(columns); }

  /* The size for either layout. */
  static int64_t panel(int64_t side) {
    return std::max(side * leading_dimension(kPanelDepth), kPanelDepth * leading_dimension(side));
  }

  static void run(const Matrices<T> &a, const T *a_matrix, const Matrices<T> &b, const T *b_matrix, int64_t row,
                  int64_t rows, int64_t column, int64_t columns, int64_t k, float *scratch, float *c, int64_t ldc) {
    for (int64_t start = 0; start < k; start += kPanelDepth) {
      const int64_t depth = std::min(kPanelDepth, k - start);
      float *const left = scratch;
      const int64_t lda = leading_dimension(a.transposed ? rows : depth);
      const int64_t a_rows = a.transposed ? depth : rows, a_columns = a.transposed ? rows : depth;
      const T *const a_first = a.element(a_matrix, row, start);
      for (int64_t r = 0; r < a_rows; ++r) read_run(a_first + r * a.leading, a_columns, left + r * lda);
      float *const right = left + lda * a_rows;
      const int64_t ldb = leading_dimension(b.transposed ? depth : columns);
      const int64_t b_rows = b.transposed ? columns : depth, b_columns = b.transposed ? depth : columns;
      const T *const b_first = b.element(b_matrix, start, column);
      for (int64_t r = 0; r < b_rows; ++r) read_run(b_first + r * b.leading, b_columns, right + r * ldb);
      sgemm(a.transposed, b.transposed, rows, columns, depth, left, lda, right, ldb, start > 0, c, ldc);
    }
  }
};

/* Writes the result row-major, one matrix after the other. */
inline void matmul(const Matrices<float> &a, const Matrices<float> &b, const Product &product, float *c) {
  const int64_t stack = product.stack();
  const double work = static_cast<double>(product.m) * product.n * product.k * stack;
  const int64_t threads = threads_for(work);
  const Cut cut(product.m, product.n, product.m, product.n, parts_of_each(stack, threads));
  const int64_t down = divide_up(product.m, cut.rows), across = divide_up(product.n, cut.columns);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t unit = 0; unit < stack * down * across; ++unit) {
    const int64_t index = unit / (down * across);
    const int64_t row = unit / across % down * cut.rows, column = unit % across * cut.columns;
    TileProduct<float>::run(a, a.at(index, product.sizes, product.dims), b, b.at(index, product.sizes, product.dims),
                            row, std::min(cut.rows, product.m - row), column, std::min(cut.columns, product.n - column),
                            product.k, nullptr, c + (index * product.m + row) * product.n + column, product.n);
  }
}

/* Passes the result to a `store`, as one matrix of stack * m rows. */
template <class T, class Store>
void matmul(const Matrices<T> &a, const Matrices<T> &b, const Product &product, const Store &store) {
  const int64_t stack = product.stack();
  const double work = static_cast<double>(product.m) * product.n * product.k * stack;
  const int64_t threads = threads_for(work);
  const Cut cut(product.m, product.n, kTileRows, kTileColumns, parts_of_each(stack, threads));
  const int64_t down = divide_up(product.m, cut.rows), across = divide_up(product.n, cut.columns);
  const int64_t ld = leading_dimension(cut.columns);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const Scratch tile(cut.rows * ld), panels(TileProduct<T>::scratch(cut.rows, cut.columns));
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < stack * down * across; ++unit) {
      const int64_t index = unit / (down * across);
      const int64_t row = unit / across % down * cut.rows, column = unit % across * cut.columns;
      const int64_t rows = std::min(cut.rows, product.m - row), columns = std::min(cut.columns, product.n - column);
      TileProduct<T>::run(a, a.at(index, product.sizes, product.dims), b, b.at(index, product.sizes, product.dims), row,
                          rows, column, columns, product.k, panels.get(), tile.get(), ld);
      store(tile.get(), ld, index * product.m + row, rows, column, columns);
    }
  }
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
