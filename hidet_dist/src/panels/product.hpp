// The product of rows by panels (see panels.h), in terms of the vectors of a level.
//
// Each level's source is compiled with flags of its own, and the linker takes one of several copies of an inline
// function. So everything here is in an unnamed namespace, and nothing of the standard library is used.
#pragma once

#include <stdint.h>

#include "hidet_dist/panels.h"

#define HIDET_DIST_INLINE inline __attribute__((always_inline))

namespace {

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

HIDET_DIST_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The depth of a block, whose products are summed before they are added to the sum of earlier blocks.
constexpr int64_t kDepth = 512;
// The rows whose block of depth is packed at once: it should stay in the second-level cache.
constexpr int64_t kRows = 192;

constexpr int64_t kLine = 64;  // bytes of a cache line

// The rows up to which a panel is read in chunks, each of which stays in the first-level cache for all of them.
constexpr int64_t kSeveral = 32;
constexpr int64_t kChunkBytes = 4096;

// Rows are packed for more columns than these: for fewer, packing takes longer than reading rows where they lie.
constexpr int64_t kFewColumns = 128;
// Bytes after which addresses share a set of the first-level cache, and the ways of a set.
constexpr int64_t kSetBytes = 4096;
constexpr int64_t kWays = 8;

// Rows in blocks of nearly equal size.
class Blocks {
 public:
  Blocks(int64_t rows, int64_t most) : rows_(rows), count_((rows + most - 1) / most) {}
  HIDET_DIST_INLINE int64_t count() const { return count_; }
  HIDET_DIST_INLINE int64_t rows_of(int64_t block) const { return rows_ / count_ + (block < rows_ % count_); }
  HIDET_DIST_INLINE int64_t row_of(int64_t block) const {
    return block * (rows_ / count_) + least(block, rows_ % count_);
  }

 private:
  const int64_t rows_, count_;
};

// The bytes that are fetched while rows of a panel are multiplied: from which on, and how many for each row.
struct Fetch {
  const char *from;
  int64_t step;

  template <class T>
  Fetch(const T *first, int64_t elements)
      : from(reinterpret_cast<const char *>(first)), step(elements * static_cast<int64_t>(sizeof(T))) {}
};

// Rows of floats, at constant steps.
class Steps {
 public:
  Steps(const float *first, int64_t step) : first_(first), step_(step) {}
  HIDET_DIST_INLINE const float *operator[](int64_t row) const { return first_ + row * step_; }

 private:
  const float *const first_;
  const int64_t step_;
};

// Rows of floats, each from its `first` element on, anywhere.
class Runs {
 public:
  Runs(const void *const *runs, int64_t first) : runs_(runs), first_(first) {}
  HIDET_DIST_INLINE const float *operator[](int64_t row) const {
    return static_cast<const float *>(runs_[row]) + first_;
  }

 private:
  const void *const *const runs_;
  const int64_t first_;
};

template <class T, class U>
constexpr bool is_same = false;
template <class T>
constexpr bool is_same<T, T> = true;

template <class Level>
class PanelProduct {
  using Vector = typename Level::Vector;
  static constexpr int64_t kLanes = Level::kLanes;
  static constexpr int64_t kWidth = Level::kWidth;
  static constexpr int64_t kVectors = kWidth / kLanes;
  static constexpr int64_t kMost = Level::kRows;  // rows whose sums registers hold
  static constexpr int64_t kAhead = 16;  // rows of a panel from those that are multiplied to those that are fetched
  static constexpr int kLines = -1;      // of a row of a panel: all of them
  static constexpr int64_t kPacked = (kRows + 16) * kDepth;
  static constexpr int64_t kConverted = kWidth * kDepth;
  static constexpr int64_t kEdge = (kMost * 4 > kSeveral ? kMost * 4 : kSeveral) * kWidth;
  static constexpr int64_t kRead = 16 * kDepth;

 public:
  static constexpr int64_t kScratch = (kPacked + kConverted + kEdge + kRead) * static_cast<int64_t>(sizeof(float));

  explicit PanelProduct(const hidet_dist_panel_product &product)
      : p_(product),
        result_(static_cast<float *>(product.result)),
        packed_(static_cast<float *>(product.scratch)),
        converted_(packed_ + kPacked),
        edge_(converted_ + kConverted),
        read_(edge_ + kEdge) {}

  // L is the type of the left operand's elements, and T that of the right one's.
  template <class L, class T>
  void run() {
    if (const int64_t done = by_columns<L, T>()) {
      if (done == p_.columns) return;
      hidet_dist_panel_product rest = p_;
      rest.columns -= done;
      rest.right = static_cast<const T *>(p_.right) + done * p_.right_step;
      rest.result = result_ + done;
      return PanelProduct(rest).run<L, T>();
    }
    const Blocks blocks(p_.rows, kMost);
    const bool in_place = reads_in_place<L>();
    if (blocks.count() == 1 && p_.rows * p_.depth <= kRows * kDepth) return one_block<L, T>();
    for (int64_t start = 0; start < p_.depth; start += kDepth) {
      const int64_t depth = least(kDepth, p_.depth - start);
      for (int64_t first = 0; first < blocks.count();) {
        const int64_t count = least(kRows / kMost, blocks.count() - first);
        if (!in_place) pack<L>(first, first + count, blocks, start, depth, packed_);
        for (int64_t column = 0; column < p_.columns; column += kWidth) {
          if (in_panels() && p_.rows <= kSeveral && column + kWidth <= p_.columns) {
            in_chunks<T>(column, start, depth, blocks);
            continue;
          }
          const float *const panel = floats<T>(column, start, depth);
          if (in_place) {
            for (int64_t block = first; block < first + count; ++block) {
              multiply_in_place({blocks.row_of(block), start, depth}, blocks.rows_of(block), panel, column);
            }
            continue;
          }
          const float *left = packed_;
          for (int64_t block = first; block < first + count; ++block) {
            const int64_t rows = blocks.rows_of(block);
            // The blocks that read this panel fetch a part each of the next one.
            const int64_t part = block - first;
            const Fetch next =
                in_panels()
                    ? Fetch(panel_at<T>(column, start) + (p_.depth + part * (depth / count)) * kWidth, kWidth / count)
                    : Fetch(panel, 0);
            multiply<float, 1, kLines>(rows, depth, left, panel, blocks.row_of(block), column, start > 0, next);
            left += rows * depth;
          }
        }
        first += count;
      }
    }
  }

 private:
  bool in_panels() const { return p_.layout == HIDET_DIST_IN_PANELS; }

  // Whether blocks of rows are read where they lie: not if the rows of a block evict one another from the cache.
  template <class L>
  bool reads_in_place() const {
    if (!is_same<L, float> || p_.rows <= kSeveral || p_.columns > kFewColumns) return false;
    if (p_.runs == nullptr && p_.depth_step != 1) return false;
    const int64_t step = p_.runs == nullptr ? p_.row_step : p_.run;
    return kMost < kWays || step * static_cast<int64_t>(sizeof(float)) % kSetBytes != 0;
  }

  // Few rows, packed as a whole.
  template <class L>
  const float *packed_rows() {
    if (p_.rows == 1 && p_.depth_step == 1 && p_.runs == nullptr && is_same<L, float>) {
      return static_cast<const float *>(p_.left);
    }
    for (int64_t start = 0; start < p_.depth; start += kDepth) {
      pack<L>(0, 1, Blocks(p_.rows, p_.rows), start, least(kDepth, p_.depth - start), packed_ + start * p_.rows);
    }
    return packed_;
  }

  // Several blocks of packed rows by a block of a panel, which is read once. Its elements become floats once.
  template <class T>
  void in_chunks(int64_t column, int64_t start, int64_t depth, const Blocks &blocks) {
    constexpr int64_t kChunk = kChunkBytes / (kWidth * static_cast<int64_t>(sizeof(T)));
    const T *const panel = panel_at<T>(column, start);
    for (int64_t k = 0; k < depth; k += kChunk) {
      const int64_t part = least(kChunk, depth - k);
      const float *const chunk = converted(panel + k * kWidth, part);
      const bool last = k + part == depth;
      const T *const next = last ? panel + p_.depth * kWidth : panel + (k + part) * kWidth;
      const float *left = packed_;
      for (int64_t block = 0; block < blocks.count(); ++block) {
        const int64_t rows = blocks.rows_of(block), row = blocks.row_of(block);
        const Fetch ahead(next + block * (kChunk / blocks.count()) * kWidth, kWidth / blocks.count());
        float *const sums = edge_ + row * kWidth, *const result = result_ + row * p_.result_step + column;
        const float *const begin = k > 0 ? sums : nullptr;
        dispatch<float, 1, kMost, 1>(rows, part, left + k * rows, chunk, 0, begin, last ? result : sums,
                                     last ? p_.result_step : kWidth, last && start > 0, ahead);
        left += rows * depth;
      }
    }
  }

  // Few rows: each panel is read from its beginning to its end.
  template <class L, class T>
  void one_block() {
    const float *const left = packed_rows<L>();
    int64_t panels = 1;
    for (int64_t column = 0; column < p_.columns; column += panels * kWidth) {
      const int64_t rest = in_panels() ? (p_.columns - column) / kWidth : 0;  // those that are read in place
      panels = least(panels_of(p_.rows), rest >= 4 ? 4 : rest >= 2 ? 2 : 1);
      for (int64_t start = 0; start < p_.depth; start += kDepth) {
        const int64_t depth = least(kDepth, p_.depth - start);
        const float *const from = left + start * p_.rows;
        if (rest == 0) {
          const float *const block = floats<T>(column, start, depth);
          multiply<float, 1, 0>(p_.rows, depth, from, block, 0, column, start > 0, Fetch(block, 0));
          continue;
        }
        const T *const panel = panel_at<T>(column, start);
        const Fetch ahead(panel + kAhead * kWidth, kWidth);
        if (panels == 4) {
          multiply<T, 4, kLines>(p_.rows, depth, from, panel, 0, column, start > 0, ahead);
        } else if (panels == 2) {
          multiply<T, 2, kLines>(p_.rows, depth, from, panel, 0, column, start > 0, ahead);
        } else {
          multiply<T, 1, 0>(p_.rows, depth, from, panel, 0, column, start > 0, ahead);
        }
      }
    }
  }

  // Multiplies few rows by what lies in columns, as it lies, if the level can; returns the number of columns.
  template <class L, class T>
  int64_t by_columns() {
    if constexpr (Level::kInColumns > 0) {
      const int64_t columns = p_.columns / kWidth * kWidth;
      if (p_.layout != HIDET_DIST_IN_COLUMNS || p_.rows > Level::kInColumns || columns == 0) return 0;
      if (p_.rows * p_.depth > kRows * kDepth) return 0;
      const float *const left = packed_rows<L>();
      for (int64_t column = 0; column < columns; column += 16) few_by_columns<T, Level::kInColumns>(left, column);
      return columns;
    }
    return 0;
  }

  template <class T, int Rows>
  void few_by_columns(const float *left, int64_t column) {
    if constexpr (Rows > 1) {
      if (p_.rows < Rows) return few_by_columns<T, Rows - 1>(left, column);
    }
    const T *const right = static_cast<const T *>(p_.right) + column * p_.right_step;
    Level::template by_columns<T, Rows>(p_.depth, left, right, p_.right_step, result_ + column, p_.result_step);
  }

  // The panels that are read beside one another: with few rows, one has too few sums to hide an addition's latency, and
  // several are read faster from memory. One alone is read fastest if the processor itself foresees what is read.
  static int64_t panels_of(int64_t rows) { return rows == 1 ? 4 : rows <= Level::kTwoPanels ? 2 : 1; }

  template <class T>
  const T *panel_at(int64_t column, int64_t start) const {
    return static_cast<const T *>(p_.right) + column * p_.depth + start * least(kWidth, p_.columns - column);
  }

  // A block of the right operand as floats, as wide as a panel. What stands in columns behind the last is multiplied,
  // and not written.
  template <class T>
  const float *floats(int64_t column, int64_t start, int64_t depth) {
    const int64_t width = least(kWidth, p_.columns - column);
    if (in_panels()) {
      const T *const panel = panel_at<T>(column, start);
      return width < kWidth ? expanded(panel, depth, width, width) : converted(panel, depth);
    }
    const T *const right = static_cast<const T *>(p_.right);
    if (p_.layout == HIDET_DIST_IN_ROWS) {
      return expanded(right + start * p_.right_step + column, depth, width, p_.right_step);
    }
    for (int64_t j = 0; j < width; j += 16) {
      int64_t step = p_.right_step;
      const int64_t columns = least(16, width - j);
      const float *const read = as_floats(right + (column + j) * p_.right_step + start, columns, depth, &step);
      Level::interleave(Steps(read, step), columns, depth, converted_ + j, kWidth);
    }
    return converted_;
  }

  static const float *converted(const float *panel, int64_t) { return panel; }
  template <class T>
  const float *converted(const T *panel, int64_t depth) {
    for (int64_t at = 0; at < depth * kWidth; at += kLanes) Level::store(converted_ + at, Level::load(panel + at));
    return converted_;
  }

  // `width` elements of each row.
  template <class T>
  const float *expanded(const T *block, int64_t depth, int64_t width, int64_t step) {
    int64_t k = 0;
    for (; k * step + kWidth <= (depth - 1) * step + width; ++k) {
      for (int64_t j = 0; j < kWidth; j += kLanes) {
        Level::store(converted_ + k * kWidth + j, Level::load(block + k * step + j));
      }
    }
    for (; k < depth; ++k) {
      for (int64_t j = 0; j < kWidth; ++j) {
        converted_[k * kWidth + j] = j < width ? Level::one(block + k * step + j) : 0.0f;
      }
    }
    return converted_;
  }

  // Packs blocks of rows: each block's columns one after the other.
  template <class T>
  void pack(int64_t first, int64_t last, const Blocks &blocks, int64_t start, int64_t depth, float *target) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t rows = blocks.rows_of(block), row = blocks.row_of(block);
      if (p_.runs != nullptr) {
        pack_runs<T>(row, rows, start, depth, target);
        target += rows * depth;
        continue;
      }
      const T *const source = static_cast<const T *>(p_.left) + row * p_.row_step + start * p_.depth_step;
      if (p_.depth_step == 1) {
        int64_t step = p_.row_step;
        const float *const read = as_floats(source, rows, depth, &step);
        Level::interleave(Steps(read, step), rows, depth, target, rows);
      } else {
        for (int64_t k = 0; k < depth; ++k) {
          for (int64_t r = 0; r < rows; ++r) target[k * rows + r] = Level::one(source + k * p_.depth_step + r);
        }
      }
      target += rows * depth;
    }
  }

  // Packs a block of rows that lie in runs.
  template <class T>
  void pack_runs(int64_t row, int64_t rows, int64_t start, int64_t depth, float *target) {
    for (int64_t k = start; k < start + depth;) {
      const int64_t within = k % p_.run, count = least(p_.run - within, start + depth - k);
      const void *const *const runs = p_.runs + k / p_.run * p_.rows + row;
      if constexpr (is_same<T, float>) {
        Level::interleave(Runs(runs, within), rows, count, target, rows);
      } else {
        for (int64_t r = 0; r < rows; ++r) {
          const T *const run = static_cast<const T *>(runs[r]) + within;
          int64_t i = 0;
          for (; i + kLanes <= count; i += kLanes) Level::store(read_ + r * kDepth + i, Level::load(run + i));
          for (; i < count; ++i) read_[r * kDepth + i] = Level::one(run + i);
        }
        Level::interleave(Steps(read_, kDepth), rows, count, target, rows);
      }
      target += count * rows;
      k += count;
    }
  }

  const float *as_floats(const float *source, int64_t, int64_t, int64_t *) { return source; }
  template <class T>
  const float *as_floats(const T *source, int64_t rows, int64_t depth, int64_t *step) {
    for (int64_t r = 0; r < rows; ++r) {
      const T *const row = source + r * *step;
      float *const target = read_ + r * kDepth;
      int64_t k = 0;
      for (; k + kLanes <= depth; k += kLanes) Level::store(target + k, Level::load(row + k));
      for (; k < depth; ++k) target[k] = Level::one(row + k);
    }
    *step = kDepth;
    return read_;
  }

  // Adds the product of packed rows by a block of panels to the result, or writes it there.
  template <class T, int Panels, int Lines>
  void multiply(int64_t rows, int64_t depth, const float *left, const T *panel, int64_t row, int64_t column, bool add,
                Fetch ahead) {
    float *const target = result_ + row * p_.result_step + column;
    const int64_t step = p_.depth * kWidth;
    const int64_t columns = p_.columns - column;
    if (columns >= Panels * kWidth) {
      return dispatch<T, Panels, kMost, Lines>(rows, depth, left, panel, step, nullptr, target, p_.result_step, add,
                                               ahead);
    }
    if constexpr (Panels == 1 && kVectors > 1 && is_same<T, float>) {
      if (columns <= kLanes) {
        narrow<kMost>(rows, depth, left, panel, edge_);
        return write_edge(rows, columns, kLanes, target, add);
      }
    }
    dispatch<T, Panels, kMost, Lines>(rows, depth, left, panel, step, nullptr, edge_, Panels * kWidth, false, ahead);
    write_edge(rows, columns, Panels * kWidth, target, add);
  }

  // Adds sums of `width` columns a row to the result, or writes them there, for the columns that it has.
  void write_edge(int64_t rows, int64_t columns, int64_t width, float *target, bool add) const {
    for (int64_t r = 0; r < rows; ++r) {
      const float *const from = edge_ + r * width;
      float *const to = target + r * p_.result_step;
      int64_t j = 0;
      for (; j + kLanes <= columns; j += kLanes) {
        const Vector sums = Level::load(from + j);
        Level::store(to + j, add ? Level::add(Level::load(to + j), sums) : sums);
      }
      if (const int64_t rest = columns - j; rest > 0) {
        const Vector sums = Level::load(from + j);
        Level::store_first(to + j, add ? Level::add(Level::load_first(to + j, rest), sums) : sums, rest);
      }
    }
  }

  // The product of packed rows by the first vector of each row of a panel: it serves a last panel that has no more.
  template <int Rows>
  __attribute__((noinline)) static void narrow(int64_t rows, int64_t depth, const float *left, const float *panel,
                                               float *target) {
    if constexpr (Rows > 1) {
      if (rows < Rows) return narrow<Rows - 1>(rows, depth, left, panel, target);
    }
    Vector sums[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sums[r] = Level::zero();
    for (int64_t k = 0; k < depth; ++k, panel += kWidth, left += Rows) {
      const Vector right = Level::load(panel);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) sums[r] = Level::add_product(Level::broadcast(left + r), right, sums[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) Level::store(target + r * kLanes, sums[r]);
  }

  // Rows from `row` on, and their elements [start, start + depth).
  struct Span {
    int64_t row, start, depth;
  };

  // Adds the product of rows, read where they lie, by a panel to the result, or writes it there. Sums are those of
  // packed rows.
  void multiply_in_place(const Span &span, int64_t rows, const float *panel, int64_t column) {
    float *const target = result_ + span.row * p_.result_step + column;
    const int64_t columns = p_.columns - column;
    const bool add = span.start > 0;
    if (columns >= kWidth) {
      return dispatch_in_place<kMost, kVectors>(rows, span, panel, target, p_.result_step, add);
    }
    if (columns <= kLanes) {
      dispatch_in_place<kMost, 1>(rows, span, panel, edge_, kLanes, false);
      return write_edge(rows, columns, kLanes, target, add);
    }
    dispatch_in_place<kMost, kVectors>(rows, span, panel, edge_, kWidth, false);
    write_edge(rows, columns, kWidth, target, add);
  }

  template <int Rows, int Across>
  void dispatch_in_place(int64_t rows, const Span &span, const float *panel, float *target, int64_t target_step,
                         bool add) const {
    if constexpr (Rows > 1) {
      if (rows < Rows) return dispatch_in_place<Rows - 1, Across>(rows, span, panel, target, target_step, add);
    }
    kernel_in_place<Rows, Across>(span, panel, target, target_step, add);
  }

  // The product by the first vectors of each row of a panel.
  template <int Rows, int Across>
  __attribute__((noinline)) void kernel_in_place(const Span &span, const float *panel, float *target,
                                                 int64_t target_step, bool add) const {
    Vector sums[Rows][Across];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < Across; ++v) sums[r][v] = Level::zero();
    }
    const int64_t end = span.start + span.depth;
    for (int64_t k = span.start; k < end;) {
      const float *left[Rows];
      int64_t count = end - k;
      if (p_.runs == nullptr) {
        const float *const first = static_cast<const float *>(p_.left) + span.row * p_.row_step + k;
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) left[r] = first + r * p_.row_step;
      } else {
        const int64_t within = k % p_.run;
        count = least(count, p_.run - within);
        const void *const *const runs = p_.runs + k / p_.run * p_.rows + span.row;
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) left[r] = static_cast<const float *>(runs[r]) + within;
      }
      for (int64_t i = 0; i < count; ++i, panel += kWidth) {
        Vector right[Across];
#pragma GCC unroll 16
        for (int v = 0; v < Across; ++v) right[v] = Level::load(panel + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
          const Vector one = Level::broadcast(left[r] + i);
#pragma GCC unroll 16
          for (int v = 0; v < Across; ++v) sums[r][v] = Level::add_product(one, right[v], sums[r][v]);
        }
      }
      k += count;
    }
    write_sums(sums, target, target_step, add);
  }

  // Adds sums, which registers hold, to a result, or writes them there.
  template <int Rows, int Across>
  HIDET_DIST_INLINE static void write_sums(const Vector (&sums)[Rows][Across], float *target, int64_t target_step,
                                           bool add) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < Across; ++v) {
        float *const at = target + r * target_step + v * kLanes;
        Level::store(at, add ? Level::add(Level::load(at), sums[r][v]) : sums[r][v]);
      }
    }
  }

  // Calls the kernel of a number of rows. For each row of a panel, so many lines of the cache are fetched.
  template <class T, int Panels, int Rows, int Lines>
  static void dispatch(int64_t rows, int64_t depth, const float *left, const T *panel, int64_t step, const float *begin,
                       float *target, int64_t target_step, bool add, Fetch ahead) {
    constexpr int kAtOnce = Panels == 4   ? 1
                            : Panels == 2 ? static_cast<int>(Level::kTwoPanels)
                                          : static_cast<int>(kMost);
    if constexpr (Rows > kAtOnce) {
      dispatch<T, Panels, kAtOnce, Lines>(rows, depth, left, panel, step, begin, target, target_step, add, ahead);
    } else if constexpr (Rows == 1) {
      kernel<T, Panels, 1, Lines>(depth, left, panel, step, begin, target, target_step, add, ahead);
    } else if (rows == Rows) {
      kernel<T, Panels, Rows, Lines>(depth, left, panel, step, begin, target, target_step, add, ahead);
    } else {
      dispatch<T, Panels, Rows - 1, Lines>(rows, depth, left, panel, step, begin, target, target_step, add, ahead);
    }
  }

  // The sums go on from `begin`, in rows of a panel's width, or from zero.
  template <class T, int Panels, int Rows, int Lines>
  __attribute__((noinline)) static void kernel(int64_t depth, const float *left, const T *panel, int64_t step,
                                               const float *begin, float *target, int64_t target_step, bool add,
                                               Fetch ahead) {
    constexpr int kAcross = Panels * static_cast<int>(kVectors);
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    constexpr int64_t kFetched = Lines == kLines ? kWidth * kSize : Lines * kLine;
    Vector sums[Rows][kAcross];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kAcross; ++v) {
        sums[r][v] = begin == nullptr ? Level::zero() : Level::load(begin + r * kWidth + v * kLanes);
      }
    }
    for (int64_t k = 0; k < depth; ++k) {
      Vector right[kAcross];
#pragma GCC unroll 16
      for (int q = 0; q < Panels; ++q) {
#pragma GCC unroll 16
        for (int64_t at = 0; at < kFetched; at += kLine) __builtin_prefetch(ahead.from + q * step * kSize + at);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) right[q * kVectors + v] = Level::load(panel + q * step + v * kLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Vector one = Level::broadcast(left + r);
#pragma GCC unroll 16
        for (int v = 0; v < kAcross; ++v) sums[r][v] = Level::add_product(one, right[v], sums[r][v]);
      }
      panel += kWidth;
      ahead.from += ahead.step;
      left += Rows;
    }
    write_sums(sums, target, target_step, add);
  }

  const hidet_dist_panel_product &p_;
  float *const result_;
  float *const packed_;
  float *const converted_;
  float *const edge_;
  float *const read_;
};

template <class Level>
int32_t multiply(const hidet_dist_panel_product &product) {
  if (product.layout < HIDET_DIST_IN_PANELS || product.layout > HIDET_DIST_IN_COLUMNS) {
    return HIDET_DIST_INVALID_ARGUMENT;
  }
  PanelProduct<Level> part(product);
  const bool wide = product.left_dtype == HIDET_DIST_F32;
  if (!wide && product.left_dtype != product.right_dtype) return HIDET_DIST_INVALID_ARGUMENT;
  if (product.right_dtype == HIDET_DIST_F32) {
    part.template run<float, float>();
  } else if (product.right_dtype == HIDET_DIST_F16) {
    wide ? part.template run<float, Half>() : part.template run<Half, Half>();
  } else if (product.right_dtype == HIDET_DIST_BF16) {
    wide ? part.template run<float, Brain>() : part.template run<Brain, Brain>();
  } else {
    return HIDET_DIST_INVALID_ARGUMENT;
  }
  return HIDET_DIST_OK;
}

}  // namespace
