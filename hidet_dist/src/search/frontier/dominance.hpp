// Dominance among labels: lines of numbers of which less is better.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace hidet_dist::frontier {

// Selects the lines that no other line equals or undercuts in every column; of equal lines the first.
class Dominance {
 public:
  // `lines` has `count` lines of `columns` numbers, the first of which is finite. At most `comparisons` pairs of lines are
  // compared, and subtracted from it. Writes the numbers of the selected lines, in lexicographic order; returns false if
  // that takes more comparisons.
  bool select(size_t count, size_t columns, const double *lines, int64_t &comparisons, std::vector<int32_t> &selected);

 private:
  void order_undercutting(size_t count, const double *lines);
  void cut(size_t count, const double *lines);
  bool has_dominating(const double *line, int64_t &comparisons);
  void add(const double *line);

  using Entry = std::pair<double, int32_t>;  // the first column of a line, and its number

  std::vector<Entry> order_;
  std::vector<double> below_;  // by place of the first column: the least second column of lines of lesser places
  // The selected lines, without the first column of all lines. Each of its columns is cut into ranges. For 256 lines at a
  // time, bits tell which lines are in a range or below it, column by column and range by range.
  size_t rest_ = 0;
  std::vector<double> front_;
  std::vector<double> cuts_;  // where the ranges of each column end
  std::vector<uint64_t> bits_;
  std::vector<double> sample_;
  std::vector<size_t> ranges_;  // of the line at hand, as positions in a chunk
};

}  // namespace hidet_dist::frontier
