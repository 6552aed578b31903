#include "dominance.hpp"

#include <algorithm>
#include <limits>

#include "../clones.hpp"

namespace {

constexpr size_t kRanges = 32;   // of a column
constexpr size_t kWords = 4;     // of bits, for a chunk of lines
constexpr size_t kChunk = kWords * 64;
constexpr size_t kSample = 512;  // lines from which the ranges of a column are chosen
constexpr size_t kFew = 256;     // lines that are compared one by one
constexpr size_t kPlaces = 4096;  // of the first column, by which most lines of two columns are dropped

constexpr double kInfinite = std::numeric_limits<double>::infinity();

bool no_greater(const double *line, const double *other, size_t columns) {
  size_t c = 0;
  while (c < columns && line[c] <= other[c]) ++c;
  return c == columns;
}

// Finds the ranges that the numbers of a line are in, as positions in a chunk; greater numbers are in no earlier one.
HIDET_DIST_CLONES("avx2") void find_ranges(const double *line, const double *cuts, size_t columns, size_t *ranges) {
  for (size_t c = 0; c < columns; ++c) {
    const double value = line[c];
    uint64_t below = 0;
    for (size_t r = 0; r < kRanges; ++r) below += cuts[c * kRanges + r] < value ? 1 : 0;
    ranges[c] = (c * kRanges + below) * kWords;
  }
}

// Combines the bits of some ranges; tells whether any is left.
HIDET_DIST_CLONES("avx2") bool combine(const uint64_t *bits, const size_t *ranges, size_t count, uint64_t *result) {
  const uint64_t *first = bits + ranges[0];
  for (size_t w = 0; w < kWords; ++w) result[w] = first[w];
  for (size_t c = 1; c < count; ++c) {
    const uint64_t *range = bits + ranges[c];
    for (size_t w = 0; w < kWords; ++w) result[w] &= range[w];
  }
  return (result[0] | result[1] | result[2] | result[3]) != 0;
}

// The position of the highest bit of a word that is not 0.
size_t highest(uint64_t word) {
  size_t position = 0;
  for (size_t step = 32; step > 0; step /= 2) {
    if (word >> step) {
      word >>= step;
      position += step;
    }
  }
  return position;
}

}  // namespace

namespace hidet_dist::frontier {

bool Dominance::select(size_t count, size_t columns, const double *lines, int64_t &comparisons,
                       std::vector<int32_t> &selected) {
  selected.clear();
  order_.clear();
  if (columns == 2 && count > kFew) {
    order_undercutting(count, lines);
  } else {
    for (size_t i = 0; i < count; ++i) order_.emplace_back(lines[i * columns], static_cast<int32_t>(i));
  }
  const auto line = [&](int32_t i) { return lines + static_cast<size_t>(i) * columns; };
  std::sort(order_.begin(), order_.end(), [&](const Entry &a, const Entry &b) {
    if (a.first != b.first) return a.first < b.first;
    const double *one = line(a.second), *other = line(b.second);
    for (size_t c = 1; c < columns; ++c) {
      if (one[c] != other[c]) return one[c] < other[c];
    }
    return a.second < b.second;
  });
  // In lexicographic order a line can only be dominated by one before it, which undercuts its first column.
  rest_ = columns - 1;
  if (rest_ == 1) {
    double least = kInfinite;
    for (const auto &[first, i] : order_) {
      if (line(i)[1] < least) selected.push_back(i);
      least = std::min(least, line(i)[1]);
    }
    return true;
  }
  front_.clear();
  bits_.clear();
  cuts_.clear();
  if (count > kFew) cut(count, lines);
  for (const auto &[first, i] : order_) {
    const bool gone = has_dominating(line(i) + 1, comparisons);
    if (comparisons < 0) return false;
    if (gone) continue;
    add(line(i) + 1);
    selected.push_back(i);
  }
  return true;
}

// Enters the lines of two columns that undercut, in the second one, all lines of lesser places of the first one. They are
// few, and no other line is selected; finding them takes less time than sorting all.
void Dominance::order_undercutting(size_t count, const double *lines) {
  double first = lines[0], last = lines[0];
  for (size_t i = 1; i < count; ++i) {
    first = std::min(first, lines[i * 2]);
    last = std::max(last, lines[i * 2]);
  }
  const double scale = last > first ? static_cast<double>(kPlaces - 1) / (last - first) : 0.0;
  // A lesser place is that of a lesser number.
  const auto place = [&](size_t i) { return static_cast<size_t>((lines[i * 2] - first) * scale); };
  below_.assign(kPlaces, kInfinite);
  for (size_t i = 0; i < count; ++i) {
    double &least = below_[place(i)];
    least = std::min(least, lines[i * 2 + 1]);
  }
  double least = kInfinite;
  for (double &each : below_) {
    const double own = each;
    each = least;
    least = std::min(least, own);
  }
  for (size_t i = 0; i < count; ++i) {
    if (lines[i * 2 + 1] < below_[place(i)]) order_.emplace_back(lines[i * 2], static_cast<int32_t>(i));
  }
}

// Chooses ranges of each column that equally many lines of a sample are in.
void Dominance::cut(size_t count, const double *lines) {
  const size_t columns = rest_ + 1, step = std::max<size_t>(1, count / kSample);
  cuts_.assign(rest_ * kRanges, kInfinite);
  for (size_t c = 0; c < rest_; ++c) {
    sample_.clear();
    for (size_t i = 0; i < count; i += step) sample_.push_back(lines[i * columns + c + 1]);
    std::sort(sample_.begin(), sample_.end());
    sample_.erase(std::unique(sample_.begin(), sample_.end()), sample_.end());
    const size_t ranges = std::min(kRanges, sample_.size());
    for (size_t r = 0; r + 1 < ranges; ++r) cuts_[c * kRanges + r] = sample_[(r + 1) * sample_.size() / ranges - 1];
  }
}

// Tells whether a selected line is no greater in any column. Neighbours in lexicographic order are the likeliest.
bool Dominance::has_dominating(const double *line, int64_t &comparisons) {
  const size_t count = front_.size() / rest_;
  if (cuts_.empty()) {
    for (size_t i = count; i-- > 0;) {
      --comparisons;
      if (no_greater(front_.data() + i * rest_, line, rest_)) return true;
    }
    return false;
  }
  ranges_.resize(rest_);
  find_ranges(line, cuts_.data(), rest_, ranges_.data());
  uint64_t words[kWords];
  for (size_t chunk = (count + kChunk - 1) / kChunk; chunk-- > 0;) {
    comparisons -= static_cast<int64_t>(std::min(kChunk, count - chunk * kChunk));
    if (!combine(bits_.data() + chunk * rest_ * kRanges * kWords, ranges_.data(), rest_, words)) continue;
    for (size_t w = kWords; w-- > 0;) {
      for (uint64_t word = words[w]; word != 0;) {
        const size_t bit = highest(word);
        if (no_greater(front_.data() + (chunk * kChunk + w * 64 + bit) * rest_, line, rest_)) return true;
        word ^= uint64_t{1} << bit;
      }
    }
  }
  return false;
}

// Selects a line, whose ranges were found.
void Dominance::add(const double *line) {
  const size_t number = front_.size() / rest_, place = number % kChunk;
  front_.insert(front_.end(), line, line + rest_);
  if (cuts_.empty()) return;
  const size_t chunk = rest_ * kRanges * kWords;
  if (place == 0) bits_.resize(bits_.size() + chunk);
  uint64_t *words = bits_.data() + (bits_.size() - chunk) + place / 64;
  for (size_t c = 0; c < rest_; ++c) {
    for (size_t at = ranges_[c]; at < (c + 1) * kRanges * kWords; at += kWords)
      words[at] |= uint64_t{1} << (place % 64);
  }
}

}  // namespace hidet_dist::frontier
