#include "dominance.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

// Bits are combined with the widest vectors of the processor.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HIDET_DIST_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define HIDET_DIST_CLONES
#endif

namespace {

constexpr size_t kRanges = 32;   // of a column
constexpr size_t kWords = 4;     // of bits, for a chunk of lines
constexpr size_t kChunk = kWords * 64;
constexpr size_t kSample = 512;  // lines from which the ranges of a column are chosen
constexpr size_t kFew = 64;      // lines that are compared one by one

constexpr double kInfinite = std::numeric_limits<double>::infinity();

bool no_greater(const double *line, const double *other, size_t columns) {
  size_t c = 0;
  while (c < columns && line[c] <= other[c]) ++c;
  return c == columns;
}

// Combines the bits of some ranges; tells whether any is left.
HIDET_DIST_CLONES bool combine(const uint64_t *bits, const size_t *ranges, size_t count, uint64_t *result) {
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
  order_.resize(count);
  std::iota(order_.begin(), order_.end(), 0);
  const auto line = [&](int32_t i) { return lines + static_cast<size_t>(i) * columns; };
  std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    const double *one = line(a), *other = line(b);
    for (size_t c = 0; c < columns; ++c) {
      if (one[c] != other[c]) return one[c] < other[c];
    }
    return a < b;
  });
  // In lexicographic order a line can only be dominated by one before it, which undercuts its first column.
  rest_ = columns - 1;
  if (rest_ == 1) {
    double least = kInfinite;
    for (const int32_t i : order_) {
      if (line(i)[1] < least) selected.push_back(i);
      least = std::min(least, line(i)[1]);
    }
    return true;
  }
  front_.clear();
  bits_.clear();
  cuts_.clear();
  if (count > kFew) cut(count, lines);
  for (const int32_t i : order_) {
    const bool gone = has_dominating(line(i) + 1, comparisons);
    if (comparisons < 0) return false;
    if (gone) continue;
    add(line(i) + 1);
    selected.push_back(i);
  }
  return true;
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

// The range that a number of a column is in: greater numbers are in no earlier one.
size_t Dominance::range(size_t column, double value) const {
  const double *cuts = cuts_.data() + column * kRanges;
  return static_cast<size_t>(std::lower_bound(cuts, cuts + kRanges - 1, value) - cuts);
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
  for (size_t c = 0; c < rest_; ++c) ranges_[c] = (c * kRanges + range(c, line[c])) * kWords;
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

void Dominance::add(const double *line) {
  const size_t number = front_.size() / rest_, place = number % kChunk;
  front_.insert(front_.end(), line, line + rest_);
  if (cuts_.empty()) return;
  const size_t chunk = rest_ * kRanges * kWords;
  if (place == 0) bits_.resize(bits_.size() + chunk);
  uint64_t *words = bits_.data() + (bits_.size() - chunk) + place / 64;
  for (size_t c = 0; c < rest_; ++c) {
    for (size_t r = range(c, line[c]); r < kRanges; ++r)
      words[(c * kRanges + r) * kWords] |= uint64_t{1} << (place % 64);
  }
}

}  // namespace hidet_dist::frontier
