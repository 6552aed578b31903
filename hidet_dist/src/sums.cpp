#include "sums.hpp"

#include <algorithm>
#include <exception>
#include <limits>
#include <vector>

// Lines are added with the widest vectors of the processor.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HIDET_DIST_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define HIDET_DIST_CLONES
#endif

namespace {

constexpr int64_t kLanes = 8;         // minima that are kept apart while a line is reduced
constexpr double kStridedCost = 3.0;  // of an entry that is not next to the one before, in entries that are
constexpr double kLineCost = 8.0;     // of beginning a line, in entries

HIDET_DIST_CLONES void add_line(const double *line, double base, int64_t size, double *sum) {
  for (int64_t i = 0; i < size; ++i) sum[i] = line[i] + base;
}

HIDET_DIST_CLONES void add_strided(const double *table, int64_t stride, int64_t size, double *sum) {
  if (stride == 1) {
    for (int64_t i = 0; i < size; ++i) sum[i] += table[i];
  } else {
    for (int64_t i = 0; i < size; ++i) sum[i] += table[i * stride];
  }
}

HIDET_DIST_CLONES void lower_line(const double *line, double base, int64_t size, double *result) {
  for (int64_t i = 0; i < size; ++i) {
    const double sum = line[i] + base;
    result[i] = sum < result[i] ? sum : result[i];
  }
}

HIDET_DIST_CLONES void lower_line(const double *line, const double *table, double base, int64_t size, double *result) {
  for (int64_t i = 0; i < size; ++i) {
    const double sum = line[i] + table[i] + base;
    result[i] = sum < result[i] ? sum : result[i];
  }
}

HIDET_DIST_CLONES double least(const double *line, int64_t size) {
  double lanes[kLanes];
  std::fill(lanes, lanes + kLanes, std::numeric_limits<double>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] = line[i + j] < lanes[j] ? line[i + j] : lanes[j];
  }
  for (; i < size; ++i) lanes[0] = std::min(lanes[0], line[i]);
  return *std::min_element(lanes, lanes + kLanes);
}

HIDET_DIST_CLONES double least(const double *line, const double *table, int64_t size) {
  double lanes[kLanes];
  std::fill(lanes, lanes + kLanes, std::numeric_limits<double>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const double sum = line[i + j] + table[i + j];
      lanes[j] = sum < lanes[j] ? sum : lanes[j];
    }
  }
  for (; i < size; ++i) lanes[0] = std::min(lanes[0], line[i] + table[i]);
  return *std::min_element(lanes, lanes + kLanes);
}

struct Loop {
  int64_t size;
  int64_t result_stride;
  std::vector<int64_t> strides;  // by table
};

// The loops from the outermost to the innermost. Each table is added in the innermost of the loops that it depends on,
// so that few additions are of all entries.
class Sums {
 public:
  Sums(int32_t dims, const int64_t *shape, int32_t tables, const double *const *data, const int64_t *strides,
       const int64_t *result_strides) {
    std::vector<Loop> all;
    for (int32_t d = 0; d < dims; ++d) {
      if (shape[d] == 1) continue;
      Loop loop{shape[d], result_strides[d], {}};
      for (int32_t p = 0; p < tables; ++p) loop.strides.push_back(strides[p * dims + d]);
      all.push_back(std::move(loop));
    }
    while (merge(all)) {
    }
    if (all.empty()) all.push_back({1, 0, std::vector<int64_t>(static_cast<size_t>(tables), 0)});
    const auto inner =
        std::min_element(all.begin(), all.end(), [](const Loop &a, const Loop &b) { return cost(a) < cost(b); });
    inner_ = *inner;
    all.erase(inner);
    // The result changes slowly: where it is reduced, the same line of it is lowered again and again.
    std::stable_partition(all.begin(), all.end(), [](const Loop &loop) { return loop.result_stride != 0; });
    outer_ = std::move(all);
    levels_.resize(outer_.size() + 1);
    for (size_t p = 0; p < static_cast<size_t>(tables); ++p) {
      size_t level = outer_.size();
      while (level > 0 && outer_[level - 1].strides[p] == 0) --level;
      (inner_.strides[p] ? levels_[level].lines : levels_[level].numbers).push_back(p);
    }
    for (Level &level : levels_) {
      level.sum.resize(static_cast<size_t>(inner_.size));
      level.at.assign(data, data + tables);
    }
  }

  void run(double *result) { enter(0, nullptr, 0.0, result); }

 private:
  struct Level {
    std::vector<size_t> lines, numbers;  // the tables that are added here, along the inner loop or as one number
    std::vector<double> sum;             // a line
    std::vector<const double *> at;      // the position in each table
  };

  // Makes one loop of two, where all tables and the result go on from one to the other without a gap.
  static bool merge(std::vector<Loop> &loops) {
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

  static double cost(const Loop &loop) {
    double cost = loop.result_stride > 1 ? kStridedCost : 1.0;
    for (const int64_t stride : loop.strides) cost += stride == 0 ? 0.0 : stride == 1 ? 1.0 : kStridedCost;
    return cost + kLineCost * static_cast<double>(loop.strides.size() + 1) / static_cast<double>(loop.size);
  }

  void enter(size_t depth, const double *line, double base, double *result) {
    Level &level = levels_[depth];
    for (const size_t p : level.numbers) base += *level.at[p];
    if (depth == outer_.size()) {
      finish(level, line, base, result);
      return;
    }
    if (!level.lines.empty()) {
      line = sum(level, line, base, level.lines.size());
      base = 0.0;
    }
    const Loop &loop = outer_[depth];
    std::vector<const double *> &next = levels_[depth + 1].at;
    std::copy(level.at.begin(), level.at.end(), next.begin());
    for (int64_t i = 0; i < loop.size; ++i) {
      enter(depth + 1, line, base, result);
      for (size_t p = 0; p < next.size(); ++p) next[p] += loop.strides[p];
      result += loop.result_stride;
    }
  }

  // The sum of a line, a number and the first `count` tables of a level.
  const double *sum(Level &level, const double *line, double base, size_t count) {
    double *total = level.sum.data();
    if (line)
      add_line(line, base, inner_.size, total);
    else
      std::fill(total, total + inner_.size, base);
    for (size_t n = 0; n < count; ++n) {
      const size_t p = level.lines[n];
      add_strided(level.at[p], inner_.strides[p], inner_.size, total);
    }
    return total;
  }

  void finish(Level &level, const double *line, double base, double *result) {
    const int64_t size = inner_.size, stride = inner_.result_stride;
    const double *last = nullptr;
    size_t count = level.lines.size();
    if (count > 0 && inner_.strides[level.lines[count - 1]] == 1) last = level.at[level.lines[--count]];
    if (count > 0 || !line) {
      line = sum(level, line, base, count);
      base = 0.0;
    }
    if (stride == 0) {
      const double value = (last ? least(line, last, size) : least(line, size)) + base;
      *result = std::min(*result, value);
    } else if (stride == 1) {
      if (last)
        lower_line(line, last, base, size, result);
      else
        lower_line(line, base, size, result);
    } else {
      for (int64_t i = 0; i < size; ++i) {
        const double value = line[i] + (last ? last[i] : 0.0) + base;
        result[i * stride] = std::min(result[i * stride], value);
      }
    }
  }

  Loop inner_;
  std::vector<Loop> outer_;
  std::vector<Level> levels_;
};

}  // namespace

namespace hidet_dist {

void lower_by_sums(int32_t dims, const int64_t *shape, int32_t tables, const double *const *data,
                   const int64_t *strides, const int64_t *result_strides, double *result) {
  Sums(dims, shape, tables, data, strides, result_strides).run(result);
}

}  // namespace hidet_dist
