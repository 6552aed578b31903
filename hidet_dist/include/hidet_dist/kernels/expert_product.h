/*
 * Products of rows by the matrices of their experts: rows are sorted by expert, and each is multiplied with its own
 * expert's matrix alone, by the products of hidet_dist/panels.h. So a row's result depends neither on the rows beside
 * it nor on their number. A row whose expert there is not is zeros.
 */
#ifndef HIDET_DIST_KERNELS_EXPERT_PRODUCT_H
#define HIDET_DIST_KERNELS_EXPERT_PRODUCT_H

#include <vector>

#include "hidet_dist/kernels/panel_product.h"

namespace hidet_dist {
namespace kernels {

struct ExpertProduct {
  int64_t tokens, choices, experts, depth, columns;
  bool shared; /* whether the choices of a token share a row of the left operand */

  int64_t row_of(int64_t choice) const { return shared ? choice / choices : choice; }
};

/* The matrices of experts, in panels of `Width` columns; 0 if they are not. */
template <int64_t Width, class T>
struct ExpertMatrices {
  const T *data;
  int64_t depth, columns;
  bool transposed;

  static const int64_t kRows = kPanelTileRows;

  int64_t scratch(int64_t) const { return hidet_dist_panels_scratch(kPanelLevel); }

  template <class L>
  void multiply(int64_t expert, const L *left, int64_t step, int64_t rows, int64_t column, int64_t width, void *memory,
                float *c, int64_t ldc) const {
    const int64_t zero[] = {0};
    const Matrices<L> a = {left, false, step, zero};
    const Matrices<T> b = {data + expert * depth * columns, transposed, transposed ? depth : columns, zero};
    multiply_tile<Width>(a, left, b, b.data, 0, rows, column, width, depth, memory, c, ldc);
  }
};

/* The same of few bits. */
template <int64_t Width, int Bits, int64_t Group, int Scales>
struct QuantizedExperts {
  const uint8_t *data;
  int64_t depth, columns;
  bool transposed;

  static const int64_t kRows = kQuantizedTileRows;

  int64_t scratch(int64_t rows) const { return hidet_dist_quantized_scratch(kPanelLevel, rows, depth, Group); }

  void multiply(int64_t expert, const float *left, int64_t step, int64_t rows, int64_t column, int64_t width,
                void *memory, float *c, int64_t ldc) const {
    static_assert(Width == kPanelWidth, "the panels are those of another level");
    const int64_t column_bytes = divide_up(depth, Group) * (scale_bytes(Scales) + Group * Bits / 8);
    const uint8_t *const matrix = data + expert * divide_up(columns, Width) * Width * column_bytes;
    const hidet_dist_quantized_product part = {left, step,   1,     rows, width, depth, matrix + column * column_bytes,
                                               Bits, Scales, Group, c,    ldc,   memory};
    hidet_dist_multiply_quantized(kPanelLevel, &part);
  }
};

/* The choices of some tokens, sorted by expert, in their order; those behind the last expert's have none. */
class ByExpert {
 public:
  ByExpert(const ExpertProduct &product, const int32_t *chosen, const int32_t *labels, int64_t first, int64_t last)
      : begins_(product.experts + 2, 0), choices_((last - first) * product.choices) {
    int32_t most = 0;
    for (int64_t e = 0; e < product.experts; ++e) most = std::max(most, labels[e]);
    std::vector<int64_t> place(static_cast<size_t>(most) + 1, product.experts);
    for (int64_t e = product.experts; e-- > 0;) {
      if (labels[e] > 0) place[labels[e]] = e;
    }
    const int64_t count = static_cast<int64_t>(choices_.size()), start = first * product.choices;
    std::vector<int64_t> experts(choices_.size());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t label = static_cast<int64_t>(chosen[start + i]) + 1;
      experts[i] = label > 0 && label <= most ? place[label] : product.experts;
      ++begins_[experts[i] + 1];
    }
    for (int64_t e = 0; e <= product.experts; ++e) begins_[e + 1] += begins_[e];
    std::vector<int64_t> next(begins_.begin(), begins_.end() - 1);
    for (int64_t i = 0; i < count; ++i) choices_[next[experts[i]]++] = start + i;
  }

  /* The choices of an expert; those of none are of the number of experts. */
  const int64_t *of(int64_t expert) const { return choices_.data() + begins_[expert]; }
  int64_t count(int64_t expert) const { return begins_[expert + 1] - begins_[expert]; }

 private:
  std::vector<int64_t> begins_, choices_;
};

/* Rows of the left operand at equal distances: those of some choices, or copies of them. */
template <class L>
struct Rows {
  const L *first;
  int64_t step;

  Rows(const ExpertProduct &product, const L *left, const int64_t *choices, int64_t count, L *copies) {
    first = left + product.row_of(choices[0]) * product.depth;
    step = product.depth;
    if (count == 1) return;
    const int64_t distance = product.row_of(choices[1]) - product.row_of(choices[0]);
    bool equal = distance > 0;
    for (int64_t i = 2; i < count && equal; ++i) {
      equal = product.row_of(choices[i]) - product.row_of(choices[i - 1]) == distance;
    }
    step = distance * product.depth;
    if (equal) return;
    for (int64_t i = 0; i < count; ++i) {
      memcpy(copies + i * product.depth, left + product.row_of(choices[i]) * product.depth,
             static_cast<size_t>(product.depth) * sizeof(L));
    }
    first = copies;
    step = product.depth;
  }
};

/* The memory of one thread: scratch memory, a tile, copies of rows, and floats for sums. */
template <class L>
class ExpertMemory {
 public:
  ExpertMemory(int64_t scratch, int64_t tile, int64_t copies, int64_t sums)
      : memory_(divide_up(tile, 16) * 16 + divide_up(sums, 16) * 16 +
                    divide_up(copies * static_cast<int64_t>(sizeof(L)), 64) * 16,
                divide_up(scratch, 64) * 64) {
    sums_ = memory_.tile() + divide_up(tile, 16) * 16;
    copies_ = reinterpret_cast<L *>(sums_ + divide_up(sums, 16) * 16);
  }
  void *scratch() const { return memory_.scratch(); }
  float *tile() const { return memory_.tile(); }
  float *sums() const { return sums_; }
  L *copies() const { return copies_; }

 private:
  PanelMemory memory_;
  float *sums_;
  L *copies_;
};

/* The rows of tiles of an expert that has this many: equal ones of at most `most`. */
inline int64_t tile_rows(int64_t count, int64_t most) { return divide_up(count, divide_up(count, most)); }

/* Passes the products of all choices to a `store`, as a matrix of tokens * choices rows. */
template <class L, class Experts, class Store>
void multiply_experts(const ExpertProduct &product, const L *left, const Experts &experts, const int32_t *chosen,
                      const int32_t *labels, const Store &store) {
  struct Tile {
    int64_t expert, first, rows;
  };
  const ByExpert sorted(product, chosen, labels, 0, product.tokens);
  std::vector<Tile> tiles;
  int64_t most = 1, all = 0;
  for (int64_t e = 0; e < product.experts; ++e) {
    const int64_t count = sorted.count(e);
    if (count == 0) continue;
    const int64_t rows = tile_rows(count, Experts::kRows);
    for (int64_t first = 0; first < count; first += rows) tiles.push_back({e, first, std::min(rows, count - first)});
    most = std::max(most, rows);
    all += count;
  }
  const int64_t threads = threads_for(static_cast<double>(all) * product.columns * product.depth);
  const int64_t width =
      block_size(product.columns, kPanelTileColumns, parts_of_each(static_cast<int64_t>(tiles.size()), threads),
                 std::max(kPanelWidth, INT64_C(16)));
  const int64_t across = divide_up(product.columns, width), ld = leading_dimension(width);
  const int64_t units = static_cast<int64_t>(tiles.size()) * across, none = sorted.count(product.experts);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const ExpertMemory<L> memory(experts.scratch(most), most * ld, most * product.depth, 0);
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < units; ++unit) {
      const Tile &tile = tiles[unit / across];
      const int64_t column = unit % across * width, columns = std::min(width, product.columns - column);
      const int64_t *const choices = sorted.of(tile.expert) + tile.first;
      const Rows<L> rows(product, left, choices, tile.rows, memory.copies());
      experts.multiply(tile.expert, rows.first, rows.step, tile.rows, column, columns, memory.scratch(), memory.tile(),
                       ld);
      for (int64_t r = 0, next; r < tile.rows; r = next) { /* choices that follow one another are stored together */
        for (next = r + 1; next < tile.rows && choices[next] == choices[next - 1] + 1;) ++next;
        store(memory.tile() + r * ld, ld, choices[r], next - r, column, columns);
      }
    }
    if (none > 0) {
      memset(memory.tile(), 0, static_cast<size_t>(ld) * sizeof(float));
#pragma omp for
      for (int64_t i = 0; i < none; ++i) {
        for (int64_t column = 0; column < product.columns; column += width) {
          store(memory.tile(), ld, sorted.of(product.experts)[i], 1, column, std::min(width, product.columns - column));
        }
      }
    }
  }
}

/* The tokens whose sums are kept at once, and the columns of them: they stay in the last-level cache. */
const int64_t kSummedTokens = 4096;
const int64_t kSummedFloats = INT64_C(1) << 21;

/*
 * Passes the sums of each token's products, each times its scale, to a `store`, as a matrix of tokens rows. They are
 * added in the order of experts.
 */
template <class L, class S, class Experts, class Store>
void sum_experts(const ExpertProduct &product, const L *left, const Experts &experts, const int32_t *chosen,
                 const int32_t *labels, const S *scales, const Store &store) {
  const int64_t threads =
      threads_for(static_cast<double>(product.tokens) * product.choices * product.columns * product.depth);
  const int64_t block = block_size(product.tokens, kSummedTokens, 1, 1), unit = std::max(kPanelWidth, INT64_C(16));
  const int64_t most_columns = std::min(kPanelTileColumns, std::max(unit, kSummedFloats / block));
  const int64_t down = divide_up(product.tokens, block);
  const int64_t width = block_size(product.columns, most_columns, parts_of_each(down, threads), unit);
  const int64_t across = divide_up(product.columns, width), ld = leading_dimension(width);
  const int64_t most = std::min(Experts::kRows, block * product.choices);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const ExpertMemory<L> memory(experts.scratch(most), most * ld, most * product.depth, block * ld);
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < down * across; ++number) {
      const int64_t first = number / across * block, last = std::min(first + block, product.tokens);
      const int64_t column = number % across * width, columns = std::min(width, product.columns - column);
      const ByExpert sorted(product, chosen, labels, first, last);
      float *const sums = memory.sums();
      memset(sums, 0, static_cast<size_t>((last - first) * ld) * sizeof(float));
      for (int64_t e = 0; e < product.experts; ++e) {
        const int64_t count = sorted.count(e);
        if (count == 0) continue;
        const int64_t size = tile_rows(count, most);
        for (int64_t begin = 0; begin < count; begin += size) {
          const int64_t *const choices = sorted.of(e) + begin;
          const int64_t number_of_rows = std::min(size, count - begin);
          const Rows<L> rows(product, left, choices, number_of_rows, memory.copies());
          experts.multiply(e, rows.first, rows.step, number_of_rows, column, columns, memory.scratch(), memory.tile(),
                           ld);
          for (int64_t r = 0; r < number_of_rows; ++r) {
            const float scale = as_float(scales[choices[r]]);
            const float *const from = memory.tile() + r * ld;
            float *const to = sums + (choices[r] / product.choices - first) * ld;
            for (int64_t j = 0; j < columns; ++j) to[j] += scale * from[j];
          }
        }
      }
      store(sums, ld, first, last - first, column, columns);
    }
  }
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
