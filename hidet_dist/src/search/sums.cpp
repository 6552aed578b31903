#include "sums.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "clones.hpp"

#define HIDET_DIST_INLINE inline __attribute__((always_inline))

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

constexpr int64_t kPanel = 1 << 12;        // entries of a panel at most: 32 KiB, a first-level cache
constexpr int64_t kMostPacked = 1 << 22;   // entries of a copy of a table, 32 MiB
// Times, in those of adding and comparing a vector of four entries.
constexpr double kCopied = 4.0;   // an entry that is copied with a stride
constexpr double kCalled = 80.0;  // beginning a panel

using Vector = double __attribute__((vector_size(32)));
using Unaligned = double __attribute__((vector_size(32), aligned(8), may_alias));

// A sum over the loops of a panel: reduced ones, by row, and inner ones, along it. Parts that are missing are null.
struct Sum {
  double number = 0.0;
  const double *column = nullptr;  // a number for each row
  const double *line = nullptr;    // a row for all rows
  const double *panel = nullptr;
  int64_t step = 0;  // from one row of the panel to the next
};

// Lowers entries of `result`, 4 * Vectors from one on, to the least of all rows.
template <int Vectors, bool Other, bool Column>
HIDET_DIST_INLINE void lower_at(const Sum &sum, const double *other, int64_t other_step, int64_t rows, int64_t at,
                                double *result) {
  Vector least[Vectors];
  for (int w = 0; w < Vectors; ++w) least[w] = Vector{} + kInfinite;
  const double *row = sum.panel + at;
  const double *second = Other ? other + at : nullptr;
  for (int64_t k = 0; k < rows; ++k) {
    for (int w = 0; w < Vectors; ++w) {
      Vector entry = reinterpret_cast<const Unaligned *>(row)[w];
      if (Other) entry += reinterpret_cast<const Unaligned *>(second)[w];
      if (Column) entry += sum.column[k];
      least[w] = entry < least[w] ? entry : least[w];
    }
    row += sum.step;
    if (Other) second += other_step;
  }
  for (int w = 0; w < Vectors; ++w) {
    least[w] += sum.number;
    if (sum.line) least[w] += reinterpret_cast<const Unaligned *>(sum.line + at)[w];
    auto *left = reinterpret_cast<Unaligned *>(result + at) + w;
    const Vector before = *left;
    *left = least[w] < before ? least[w] : before;
  }
}

template <bool Other, bool Column>
HIDET_DIST_INLINE void lower(const Sum &sum, const double *other, int64_t other_step, int64_t rows, int64_t size,
                             double *result) {
  int64_t at = 0;
  for (; at + 16 <= size; at += 16) lower_at<4, Other, Column>(sum, other, other_step, rows, at, result);
  for (; at + 8 <= size; at += 8) lower_at<2, Other, Column>(sum, other, other_step, rows, at, result);
  for (; at + 4 <= size; at += 4) lower_at<1, Other, Column>(sum, other, other_step, rows, at, result);
  if (at == size) return;
  if (size > 4) {
    // The last vector begins earlier: lowering entries again changes nothing.
    lower_at<1, Other, Column>(sum, other, other_step, rows, size - 4, result);
  } else {
    for (int64_t i = at; i < size; ++i) {
      double least = kInfinite;
      for (int64_t k = 0; k < rows; ++k) {
        double entry = sum.panel[k * sum.step + i];
        if (Other) entry += other[k * other_step + i];
        if (Column) entry += sum.column[k];
        least = entry < least ? entry : least;
      }
      least += sum.number;
      if (sum.line) least += sum.line[i];
      result[i] = least < result[i] ? least : result[i];
    }
  }
}

// Lowers a line to the least rows of a sum and another panel, which may be missing.
HIDET_DIST_CLONES("avx2")
void lower_by_panel(const Sum &sum, const double *other, int64_t other_step, int64_t rows, int64_t size,
                    double *result) {
  if (other) {
    if (sum.column)
      lower<true, true>(sum, other, other_step, rows, size, result);
    else
      lower<true, false>(sum, other, other_step, rows, size, result);
  } else {
    if (sum.column)
      lower<false, true>(sum, other, other_step, rows, size, result);
    else
      lower<false, false>(sum, other, other_step, rows, size, result);
  }
}

// Sums two arrays, of which the second has rows `step` apart and may be null, and a column, which may be null.
HIDET_DIST_CLONES("avx2")
void add_panels(const double *first, int64_t first_step, const double *second, int64_t second_step,
                const double *column, int64_t rows, int64_t size, double *sum) {
  for (int64_t k = 0; k < rows; ++k) {
    const double number = column ? column[k] : 0.0;
    const double *a = first + k * first_step, *b = second + k * second_step;
    double *row = sum + k * size;
    if (second) {
      for (int64_t i = 0; i < size; ++i) row[i] = a[i] + b[i] + number;
    } else {
      for (int64_t i = 0; i < size; ++i) row[i] = a[i] + number;
    }
  }
}

struct Loop {
  int64_t size;
  int64_t result_stride;
  std::vector<int64_t> strides;  // by table
};

int64_t product(const std::vector<Loop> &loops) {
  int64_t product = 1;
  for (const Loop &loop : loops) product *= loop.size;
  return product;
}

// Makes one loop of two, where all tables and the result go on from one to the other without a gap.
bool merge(std::vector<Loop> &loops) {
  for (auto outer = loops.begin(); outer != loops.end(); ++outer) {
    for (auto inner = loops.begin(); inner != loops.end(); ++inner) {
      bool joins = outer != inner && outer->result_stride == inner->result_stride * inner->size;
      for (size_t p = 0; joins && p < inner->strides.size(); ++p)
        joins = outer->strides[p] == inner->strides[p] * inner->size;
      if (!joins) continue;
      inner->size *= outer->size;
      loops.erase(outer);
      return true;
    }
  }
  return false;
}

// The offsets of all entries of a table over some loops, in row-major order.
std::vector<int64_t> offsets(const std::vector<Loop> &loops, size_t p) {
  std::vector<int64_t> all{0};
  for (const Loop &loop : loops) {
    std::vector<int64_t> more;
    more.reserve(all.size() * static_cast<size_t>(loop.size));
    for (const int64_t offset : all) {
      for (int64_t i = 0; i < loop.size; ++i) more.push_back(offset + i * loop.strides[p]);
    }
    all.swap(more);
  }
  return all;
}

bool depends(const std::vector<Loop> &loops, size_t p) {
  return std::any_of(loops.begin(), loops.end(), [&](const Loop &loop) { return loop.strides[p] != 0; });
}

// The stride of a table over all entries of some loops; -1 if there is no single one.
int64_t stride_of(const std::vector<Loop> &loops, size_t p) {
  if (loops.empty()) return 0;
  int64_t expected = loops.back().strides[p];
  const int64_t stride = expected;
  for (size_t d = loops.size(); d-- > 0; expected *= loops[d].size) {
    if (loops[d].strides[p] != expected) return -1;
  }
  return stride;
}

// How the loops are nested: over `outer`, and within it over a panel of `rows`, which the result does not depend on, and
// of `inner`, along which the result is contiguous.
struct Nest {
  std::vector<Loop> outer, rows, inner;

  // Moves the outer loop to the end that makes the panels of the fewest tables change.
  void sort(size_t tables) {
    for (size_t end = outer.size(); end > 1; --end) {
      size_t best = 0;
      std::pair<size_t, int64_t> least{tables + 1, 0};
      for (size_t d = 0; d < end; ++d) {
        size_t panels = 0;
        for (size_t p = 0; p < tables; ++p) panels += outer[d].strides[p] && depends(inner, p) && depends(rows, p);
        const std::pair<size_t, int64_t> key{panels, -outer[d].size};
        if (key < least) least = key, best = d;
      }
      std::rotate(outer.begin() + static_cast<std::ptrdiff_t>(best),
                  outer.begin() + static_cast<std::ptrdiff_t>(best) + 1,
                  outer.begin() + static_cast<std::ptrdiff_t>(end));
    }
  }

  // Estimates the time of all sums.
  double cost(size_t tables) const {
    const auto panels = static_cast<double>(product(outer));
    const auto height = static_cast<double>(product(rows)), width = static_cast<double>(product(inner));
    double cost = panels * (kCalled + height * static_cast<double>((product(inner) + 3) / 4));
    for (size_t p = 0; p < tables; ++p) {
      double entries = 1.0;
      for (const Loop &loop : outer) entries *= loop.strides[p] ? static_cast<double>(loop.size) : 1.0;
      if (depends(rows, p)) entries *= height;
      if (depends(inner, p)) entries *= width;
      const int64_t along = stride_of(inner, p), across = stride_of(rows, p);
      if (along < 0 || along > 1 || across < 0) cost += kCopied * entries;
    }
    return cost;
  }
};

class Sums {
 public:
  Sums(Nest nest, size_t tables, const double *const *data) : nest_(std::move(nest)) {
    height_ = product(nest_.rows);
    width_ = product(nest_.inner);
    calls_ = product(nest_.outer);
    levels_.resize(nest_.outer.size() + 1);
    places_.resize(tables);
    for (size_t p = 0; p < tables; ++p) place(p, data[p]);
    for (Level &level : levels_) level.at.resize(tables);
    for (size_t p = 0; p < tables; ++p) levels_[0].at[p] = places_[p].data;
  }

  void run(double *result) { enter(0, Sum(), result); }

 private:
  // Where a table is: in place, or in a copy that has the panels one after the other.
  struct Place {
    const double *data;
    int64_t step = 0;              // from one row to the next
    std::vector<int64_t> strides;  // of the outer loops
    std::vector<double> copy;
    std::vector<int64_t> across, along;  // offsets in a panel, if that is copied whenever it is needed
  };

  // What is added once the loops before a depth are at one index each.
  struct Level {
    std::vector<size_t> numbers, columns, lines, panels;  // tables
    std::vector<double> column, line, panel;              // sums
    std::vector<const double *> at;  // the position in each table
  };

  void place(size_t p, const double *data) {
    Place &place = places_[p];
    place.data = data;
    const bool column = depends(nest_.rows, p), line = depends(nest_.inner, p);
    size_t depth = nest_.outer.size();
    while (depth > 0 && nest_.outer[depth - 1].strides[p] == 0) --depth;
    Level &level = levels_[depth];
    (column ? line ? level.panels : level.columns : line ? level.lines : level.numbers).push_back(p);
    for (const Loop &loop : nest_.outer) place.strides.push_back(loop.strides[p]);
    const int64_t across = stride_of(nest_.rows, p), along = stride_of(nest_.inner, p);
    place.step = across;
    if (line ? along == 1 && (!column || across >= 0) : !column || across == 1) return;
    const int64_t height = column ? height_ : 1, width = line ? width_ : 1;
    int64_t count = 1;
    for (const Loop &loop : nest_.outer) count *= loop.strides[p] ? loop.size : 1;
    const std::vector<int64_t> rows = column ? offsets(nest_.rows, p) : std::vector<int64_t>{0};
    const std::vector<int64_t> inner = line ? offsets(nest_.inner, p) : std::vector<int64_t>{0};
    place.step = width;
    if (column && line && (2 * count > calls_ || count * height * width > kMostPacked)) {
      place.across = rows;
      place.along = inner;
      place.copy.resize(static_cast<size_t>(height * width));
      return;
    }
    place.copy.resize(static_cast<size_t>(count * height * width));
    double *to = place.copy.data();
    std::vector<Loop> own;
    for (const Loop &loop : nest_.outer) {
      if (loop.strides[p]) own.push_back(loop);
    }
    for (const int64_t begin : offsets(own, p)) {
      copy(data + begin, rows, inner, to);
      to += height * width;
    }
    int64_t stride = height * width;
    for (size_t d = nest_.outer.size(); d-- > 0;) {
      if (!place.strides[d]) continue;
      place.strides[d] = stride;
      stride *= nest_.outer[d].size;
    }
    place.data = place.copy.data();
  }

  static void copy(const double *from, const std::vector<int64_t> &rows, const std::vector<int64_t> &inner,
                   double *to) {
    for (const int64_t row : rows) {
      for (const int64_t i : inner) *to++ = from[row + i];
    }
  }

  void enter(size_t depth, Sum sum, double *result) {
    Level &level = levels_[depth];
    const bool last = depth == nest_.outer.size();
    for (const size_t p : level.numbers) sum.number += *level.at[p];
    for (const size_t p : level.columns) add(sum.column, level.at[p], height_, level.column);
    for (const size_t p : level.lines) add(sum.line, level.at[p], width_, level.line);
    const double *other = nullptr;
    int64_t other_step = 0;
    for (size_t n = 0; n < level.panels.size(); ++n) {
      const size_t p = level.panels[n];
      Place &place = places_[p];
      const double *panel = level.at[p];
      if (!place.across.empty()) {
        copy(panel, place.across, place.along, place.copy.data());
        panel = place.copy.data();
      }
      if (!sum.panel) {
        sum.panel = panel;
        sum.step = place.step;
      } else if (last && sum.panel && n + 1 == level.panels.size()) {
        other = panel;
        other_step = place.step;
      } else {
        level.panel.resize(static_cast<size_t>(height_ * width_));
        add_panels(panel, place.step, sum.panel, sum.step, nullptr, height_, width_, level.panel.data());
        sum.panel = level.panel.data();
        sum.step = width_;
      }
    }
    if (last) {
      lower(sum, other, other_step, result);
      return;
    }
    // Numbers by row are added here, unless further ones are needed for each panel.
    if (sum.panel && sum.column && levels_.back().columns.empty()) {
      level.panel.resize(static_cast<size_t>(height_ * width_));
      add_panels(sum.panel, sum.step, nullptr, 0, sum.column, height_, width_, level.panel.data());
      sum.panel = level.panel.data();
      sum.step = width_;
      sum.column = nullptr;
    }
    const Loop &loop = nest_.outer[depth];
    std::vector<const double *> &next = levels_[depth + 1].at;
    std::copy(level.at.begin(), level.at.end(), next.begin());
    for (int64_t i = 0; i < loop.size; ++i) {
      enter(depth + 1, sum, result);
      for (size_t p = 0; p < next.size(); ++p) next[p] += places_[p].strides[depth];
      result += loop.result_stride;
    }
  }

  static void add(const double *&sum, const double *table, int64_t size, std::vector<double> &own) {
    if (!sum) {
      sum = table;
      return;
    }
    own.resize(static_cast<size_t>(size));
    add_panels(sum, 0, table, 0, nullptr, 1, size, own.data());
    sum = own.data();
  }

  void lower(Sum &sum, const double *other, int64_t other_step, double *result) {
    if (sum.panel) {
      lower_by_panel(sum, other, other_step, height_, width_, result);
      return;
    }
    if (sum.column) sum.number += *std::min_element(sum.column, sum.column + height_);
    for (int64_t i = 0; i < width_; ++i)
      result[i] = std::min(result[i], sum.line ? sum.number + sum.line[i] : sum.number);
  }

  Nest nest_;
  int64_t height_, width_, calls_;
  std::vector<Level> levels_;
  std::vector<Place> places_;
};

// Chooses the panels, and lowers the result.
void lower_by(std::vector<Loop> all, const std::vector<const double *> &data, double *result) {
  while (merge(all)) {
  }
  std::vector<Loop> kept, reduced;
  for (Loop &loop : all) (loop.result_stride ? kept : reduced).push_back(std::move(loop));
  std::sort(kept.begin(), kept.end(), [](const Loop &a, const Loop &b) { return a.result_stride > b.result_stride; });
  std::optional<std::pair<double, Nest>> best;
  const auto consider = [&](size_t inner, const std::vector<size_t> &rows) {
    Nest nest;
    const auto from = kept.end() - static_cast<std::ptrdiff_t>(inner);
    nest.outer.assign(kept.begin(), from);
    nest.inner.assign(from, kept.end());
    for (size_t d = 0; d < reduced.size(); ++d) {
      const bool row = std::find(rows.begin(), rows.end(), d) != rows.end();
      (row ? nest.rows : nest.outer).push_back(reduced[d]);
    }
    nest.sort(data.size());
    const double cost = nest.cost(data.size());
    if (!best || cost < best->first) best.emplace(cost, std::move(nest));
  };
  int64_t width = 1;
  for (size_t inner = 0; inner <= kept.size(); ++inner) {
    if (inner > 0) {
      const Loop &loop = kept[kept.size() - inner];
      if (loop.result_stride != width || (inner > 1 && width * loop.size > kPanel)) break;
      width *= loop.size;
    } else if (!kept.empty() && kept.back().result_stride == 1) {
      continue;
    }
    // One loop, or further ones beginning with it, in the order in which they were given.
    if (reduced.empty()) consider(inner, {});
    for (size_t first = 0; first < reduced.size(); ++first) {
      std::vector<size_t> rows;
      int64_t entries = width;
      for (size_t d = first; d < reduced.size(); ++d) {
        entries *= reduced[d].size;
        if (d > first && entries > kPanel) break;
        rows.push_back(d);
        consider(inner, rows);
      }
    }
  }
  Sums(std::move(best->second), data.size(), data.data()).run(result);
}

}  // namespace

namespace hidet_dist {

void lower_by_sums(int32_t dims, const int64_t *shape, int32_t tables, const double *const *data,
                   const int64_t *strides, const int64_t *result_strides, double *result) {
  std::vector<Loop> all;
  for (int32_t d = 0; d < dims; ++d) {
    if (shape[d] == 1) continue;
    Loop loop{shape[d], result_strides[d], {}};
    for (int32_t p = 0; p < tables; ++p) loop.strides.push_back(strides[p * dims + d]);
    all.push_back(std::move(loop));
  }
  std::vector<const double *> at(data, data + tables);
  lower_by(std::move(all), at, result);
}

HIDET_DIST_CLONES("avx2") double least_entry(const double *entries, int64_t size) {
  Vector least[2] = {Vector{} + kInfinite, Vector{} + kInfinite};
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    for (int64_t w = 0; w < 2; ++w) {
      const Vector entry = reinterpret_cast<const Unaligned *>(entries + i)[w];
      least[w] = entry < least[w] ? entry : least[w];
    }
  }
  double result = kInfinite;
  for (; i < size; ++i) result = std::min(result, entries[i]);
  for (int lane = 0; lane < 4; ++lane) result = std::min({result, least[0][lane], least[1][lane]});
  return result;
}

HIDET_DIST_CLONES("avx2") void subtract(double number, int64_t size, double *entries) {
  for (int64_t i = 0; i < size; ++i) entries[i] -= number;
}

}  // namespace hidet_dist
