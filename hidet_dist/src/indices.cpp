// Checks of indices in a call's inputs. See indices.h.
#include "hidet_dist/indices.h"

#include <algorithm>
#include <limits>
#include <type_traits>

namespace {

constexpr int64_t kRun = 1024;  // elements tested at once; only if one is outside is it searched for among them

struct View {
  int32_t dims;
  const int64_t *shape;
  const int64_t *strides;
};

template <class T> struct Range {
  T least, greatest;
  bool is_empty;

  Range(int64_t low, int64_t high) {
    using Limits = std::numeric_limits<T>;
    if constexpr (std::is_signed_v<T>) {
      low = std::max(low, static_cast<int64_t>(Limits::min()));
      high = std::min(high, static_cast<int64_t>(Limits::max()));
    } else {
      low = std::max<int64_t>(low, 0);
      if (sizeof(T) < sizeof(int64_t)) high = std::min(high, static_cast<int64_t>(Limits::max()));
    }
    is_empty = low > high;
    least = is_empty ? T(0) : static_cast<T>(low);
    greatest = is_empty ? T(0) : static_cast<T>(high);
  }

  bool holds(T x) const { return !is_empty && x >= least && x <= greatest; }
};

// The position in a row of the first element outside, or -1.
template <class T> int64_t outside_row(const T *row, int64_t size, int64_t stride, const Range<T> &range) {
  const T least = range.least, greatest = range.greatest;
  for (int64_t begin = 0; begin < size; begin += kRun) {
    const int64_t end = std::min(size, begin + kRun);
    unsigned outside = range.is_empty;
    if (stride == 1) {
      for (int64_t i = begin; i < end; ++i) outside |= unsigned(row[i] < least) | unsigned(row[i] > greatest);
    } else {
      for (int64_t i = begin; i < end; ++i)
        outside |= unsigned(row[i * stride] < least) | unsigned(row[i * stride] > greatest);
    }
    if (outside) {
      for (int64_t i = begin; i < end; ++i)
        if (!range.holds(row[i * stride])) return i;
    }
  }
  return -1;
}

template <class T>
bool outside(const T *data, int32_t dim, const View &view, const Range<T> &range, int64_t place, int64_t *result) {
  if (dim + 1 < view.dims) {
    for (int64_t i = 0; i < view.shape[dim]; ++i)
      if (outside(data, dim + 1, view, range, place + i * view.strides[dim], result)) return true;
    return false;
  }
  const int64_t size = view.dims ? view.shape[dim] : 1, stride = view.dims ? view.strides[dim] : 1;
  const int64_t i = outside_row(data + place, size, stride, range);
  if (i < 0) return false;
  result[0] = place + i * stride;
  result[1] = static_cast<int64_t>(data[result[0]]);
  return true;
}

template <class T>
int32_t find(const void *data, const View &view, int64_t least, int64_t greatest, int64_t *result) {
  return outside(static_cast<const T *>(data), 0, view, Range<T>(least, greatest), 0, result) ? 1 : 0;
}

}  // namespace

extern "C" int32_t hidet_dist_find_outside(const void *data, int32_t bytes, int32_t is_signed, int32_t dims,
                                           const int64_t *shape, const int64_t *strides, int64_t least,
                                           int64_t greatest, int64_t *result) {
  const View view{dims, shape, strides};
  switch (bytes) {
    case 1:
      return (is_signed ? find<int8_t> : find<uint8_t>)(data, view, least, greatest, result);
    case 2:
      return (is_signed ? find<int16_t> : find<uint16_t>)(data, view, least, greatest, result);
    case 4:
      return (is_signed ? find<int32_t> : find<uint32_t>)(data, view, least, greatest, result);
    case 8:
      return (is_signed ? find<int64_t> : find<uint64_t>)(data, view, least, greatest, result);
    default:
      return -1;
  }
}
