/*
 * Products of stacks of matrices by weights, in panels or not, in parallel over the stack and over tiles of its
 * products: see hidet_dist/panels.h.
 */
#ifndef HIDET_DIST_KERNELS_PANEL_PRODUCT_H
#define HIDET_DIST_KERNELS_PANEL_PRODUCT_H

#include "hidet_dist/kernels/matrices.h"
#include "hidet_dist/kernels/scales.h"
#include "hidet_dist/panels.h"
#include "hidet_dist/workspace.h"

namespace hidet_dist {
namespace kernels {

/* The level that the kernel is compiled for, and the columns of its panels. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
const int32_t kPanelLevel = HIDET_DIST_X86_64_V4;
const int64_t kPanelWidth = 32;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
const int32_t kPanelLevel = HIDET_DIST_X86_64_V3;
const int64_t kPanelWidth = 16;
#else
const int32_t kPanelLevel = HIDET_DIST_X86_64;
const int64_t kPanelWidth = 8;
#endif

inline int32_t code_of(const float *) { return HIDET_DIST_F32; }
inline int32_t code_of(const Float16 *) { return HIDET_DIST_F16; }
inline int32_t code_of(const BFloat16 *) { return HIDET_DIST_BF16; }

/* A tile of a product stays in the second-level cache until it is written out. */
const int64_t kPanelTileRows = 192;
const int64_t kPanelTileColumns = 1024;
const int64_t kQuantizedTileRows = 96;

/* The memory of one thread: that of the multiplication, then a tile. It is kept from call to call. */
class PanelMemory {
 public:
  explicit PanelMemory(int64_t floats, int64_t scratch = hidet_dist_panels_scratch(kPanelLevel)) {
    memory_ = static_cast<char *>(hidet_dist_workspace(scratch + floats * static_cast<int64_t>(sizeof(float))));
    if (memory_ == nullptr) throw std::bad_alloc();
    tile_ = reinterpret_cast<float *>(memory_ + scratch);
  }
  void *scratch() const { return memory_; }
  float *tile() const { return tile_; }

 private:
  char *memory_;
  float *tile_;
};

/* One tile of the product of a matrix by a weight in panels, or, without a width, in rows or columns. */
template <int64_t Width, class L, class T>
inline void multiply_tile(const Matrices<L> &a, const L *a_matrix, const Matrices<T> &b, const T *b_matrix, int64_t row,
                          int64_t rows, int64_t column, int64_t columns, int64_t k, void *scratch, float *c,
                          int64_t ldc) {
  static_assert(Width == 0 || Width == kPanelWidth, "the panels are those of another level");
  const hidet_dist_panel_product part = {a.element(a_matrix, row, 0),
                                         a.transposed ? 1 : a.leading,
                                         a.transposed ? a.leading : 1,
                                         rows,
                                         columns,
                                         k,
                                         Width > 0 ? b_matrix + column * k : b.element(b_matrix, 0, column),
                                         Width > 0      ? HIDET_DIST_IN_PANELS
                                         : b.transposed ? HIDET_DIST_IN_COLUMNS
                                                        : HIDET_DIST_IN_ROWS,
                                         b.leading,
                                         code_of(a_matrix),
                                         code_of(b_matrix),
                                         c,
                                         ldc,
                                         scratch};
  hidet_dist_multiply_panels(kPanelLevel, &part);
}

/* Writes the result row-major, one matrix after the other. The panels of `b` have `Width` columns; 0 if it has none. */
template <int64_t Width, class T>
inline void multiply_panels(const Matrices<float> &a, const Matrices<T> &b, const Product &product, float *c) {
  const int64_t stack = product.stack();
  const int64_t threads = threads_for(static_cast<double>(product.m) * product.n * product.k * stack);
  const Cut cut(product.m, product.n, product.m, product.n, parts_of_each(stack, threads),
                std::max(kPanelWidth, INT64_C(16)));
  const int64_t down = divide_up(product.m, cut.rows), across = divide_up(product.n, cut.columns);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const PanelMemory memory(0);
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < stack * down * across; ++unit) {
      const int64_t index = unit / (down * across);
      const int64_t row = unit / across % down * cut.rows, column = unit % across * cut.columns;
      multiply_tile<Width>(a, a.at(index, product.sizes, product.dims), b, b.at(index, product.sizes, product.dims),
                           row, std::min(cut.rows, product.m - row), column, std::min(cut.columns, product.n - column),
                           product.k, memory.scratch(), c + (index * product.m + row) * product.n + column, product.n);
    }
  }
}

/* Passes the result to a `store`, as one matrix of stack * m rows. */
template <int64_t Width, class L, class T, class Store>
void multiply_panels(const Matrices<L> &a, const Matrices<T> &b, const Product &product, const Store &store) {
  const int64_t stack = product.stack();
  const int64_t threads = threads_for(static_cast<double>(product.m) * product.n * product.k * stack);
  const Cut cut(product.m, product.n, kPanelTileRows, kPanelTileColumns, parts_of_each(stack, threads),
                std::max(kPanelWidth, INT64_C(16)));
  const int64_t down = divide_up(product.m, cut.rows), across = divide_up(product.n, cut.columns);
  const int64_t ld = leading_dimension(cut.columns);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const PanelMemory memory(cut.rows * ld);
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < stack * down * across; ++unit) {
      const int64_t index = unit / (down * across);
      const int64_t row = unit / across % down * cut.rows, column = unit % across * cut.columns;
      const int64_t rows = std::min(cut.rows, product.m - row), columns = std::min(cut.columns, product.n - column);
      multiply_tile<Width>(a, a.at(index, product.sizes, product.dims), b, b.at(index, product.sizes, product.dims),
                           row, rows, column, columns, product.k, memory.scratch(), memory.tile(), ld);
      store(memory.tile(), ld, index * product.m + row, rows, column, columns);
    }
  }
}

/* The product by weights of few bits, whose matrices are bytes in panels of `Width` columns. */
template <int64_t Width, int Bits, int64_t Group, int Scales, class Store>
void multiply_quantized(const Matrices<float> &a, const Matrices<uint8_t> &b, const Product &product,
                        const Store &store) {
  static_assert(Width == kPanelWidth, "the panels are those of another level");
  const int64_t stack = product.stack();
  const int64_t threads = threads_for(static_cast<double>(product.m) * product.n * product.k * stack);
  const Cut cut(product.m, product.n, kQuantizedTileRows, kPanelTileColumns, parts_of_each(stack, threads),
                std::max(kPanelWidth, INT64_C(16)));
  const int64_t down = divide_up(product.m, cut.rows), across = divide_up(product.n, cut.columns);
  const int64_t ld = leading_dimension(cut.columns);
  const int64_t column_bytes = divide_up(product.k, Group) * (scale_bytes(Scales) + Group * Bits / 8);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const PanelMemory memory(cut.rows * ld, hidet_dist_quantized_scratch(kPanelLevel, cut.rows, product.k, Group));
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < stack * down * across; ++unit) {
      const int64_t index = unit / (down * across);
      const int64_t row = unit / across % down * cut.rows, column = unit % across * cut.columns;
      const int64_t rows = std::min(cut.rows, product.m - row), columns = std::min(cut.columns, product.n - column);
      const hidet_dist_quantized_product part = {a.element(a.at(index, product.sizes, product.dims), row, 0),
                                                 a.transposed ? 1 : a.leading,
                                                 a.transposed ? a.leading : 1,
                                                 rows,
                                                 columns,
                                                 product.k,
                                                 b.at(index, product.sizes, product.dims) + column * column_bytes,
                                                 Bits,
                                                 Scales,
                                                 Group,
                                                 memory.tile(),
                                                 ld,
                                                 memory.scratch()};
      hidet_dist_multiply_quantized(kPanelLevel, &part);
      store(memory.tile(), ld, index * product.m + row, rows, column, columns);
    }
  }
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
