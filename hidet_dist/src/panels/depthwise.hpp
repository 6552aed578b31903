// Convolutions of each channel by itself (see convolution.h), in terms of the vectors of a level; see product.hpp for
// what holds here, too.
#pragma once

#include "hidet_dist/convolution.h"
#include "hidet_dist/kernels/lines.h"
#include "product.hpp"

namespace {

using hidet_dist::kernels::Line;

// The taps along a dim that read from within the input, for an output.
struct TapRange {
  int64_t begin, end;

  TapRange(const hidet_dist_convolution &v, int dim, int64_t output) {
    const int64_t first = output * v.stride[dim] - v.pad[dim], step = v.dilation[dim];
    begin = first < 0 ? least(v.kernel[dim], (-first + step - 1) / step) : 0;
    const int64_t last = v.in[dim] - 1 - first;
    end = last < 0 ? begin : least(v.kernel[dim], last / step + 1);
    if (end < begin) end = begin;
  }
};

template <class Level, class L, class T>
class Depthwise {
  using Vector = typename Level::Vector;
  static constexpr int64_t kLanes = Level::kLanes, kWidth = Level::kWidth;
  static constexpr int kPixels = Level::kPixels;  // outputs whose sums registers hold, for the channels of a panel

 public:
  Depthwise(const hidet_dist_convolution &convolution, const hidet_dist_convolution_part &part)
      : v_(convolution), p_(part) {}

  void run() {
    hidet_dist::kernels::for_lines(v_, p_.pixel, p_.pixel + p_.pixels, [this](const Line &line, int64_t place) {
      one_line(line, p_.result + place * p_.result_step);
    });
  }

 private:
  void one_line(const Line &line, float *target) {
    const TapRange depths(v_, 0, line.depth), heights(v_, 1, line.height);
    // The outputs all of whose taps along the line read from within the input.
    const int64_t reach = (v_.kernel[2] - 1) * v_.dilation[2], room = v_.in[2] - 1 + v_.pad[2] - reach;
    const int64_t low = least(line.end, (v_.pad[2] + v_.stride[2] - 1) / v_.stride[2]);
    const int64_t begin = low > line.begin ? low : line.begin;
    const int64_t high = room < 0 ? begin : least(line.end, room / v_.stride[2] + 1), end = high > begin ? high : begin;
    for (int64_t c = 0; c < p_.channels; c += kLanes * 2) {
      const int64_t channel = p_.channel + c, width = least(kWidth, v_.channels - channel);
      const int64_t left = least(kWidth, p_.channels - c);
      const Taps taps{depths, heights, line,
                      static_cast<const T *>(v_.filters) + channel * v_.kernel[0] * v_.kernel[1] * v_.kernel[2], width};
      if (left == kWidth) {
        over_line<2>(taps, channel, begin, end, target + c, kLanes);
        continue;
      }
      if (left >= kLanes) over_line<1>(taps, channel, begin, end, target + c, kLanes);
      const int64_t rest = left % kLanes;
      if (rest > 0) over_line<0>(taps, channel + left - rest, begin, end, target + c + left - rest, rest);
    }
  }

  struct Taps {
    const TapRange &depths, &heights;
    const Line &line;
    const T *filters;  // of the panel
    int64_t width;     // of the panel
  };

  // All outputs of a line for the channels of one or two vectors; or for `lanes` channels, fewer than a vector has, if
  // `Vectors` is 0.
  template <int Vectors>
  void over_line(const Taps &taps, int64_t channel, int64_t begin, int64_t end, float *target, int64_t lanes) {
    const int64_t first = taps.line.begin;
    int64_t o = first;
    for (; o < begin; ++o) some<Vectors, 1>(taps, channel, o, true, target + (o - first) * p_.result_step, lanes);
    for (; o + kPixels <= end; o += kPixels) {
      some<Vectors, kPixels>(taps, channel, o, false, target + (o - first) * p_.result_step, lanes);
    }
    for (; o < end; ++o) some<Vectors, 1>(taps, channel, o, false, target + (o - first) * p_.result_step, lanes);
    for (; o < taps.line.end; ++o) {
      some<Vectors, 1>(taps, channel, o, true, target + (o - first) * p_.result_step, lanes);
    }
  }

  template <int Vectors, int Pixels>
  __attribute__((noinline)) void some(const Taps &taps, int64_t channel, int64_t output, bool at_edge, float *target,
                                      int64_t lanes) {
    constexpr int kVectors = Vectors == 0 ? 1 : Vectors;
    const TapRange widths(v_, 2, output);
    const int64_t k_begin = at_edge ? widths.begin : 0, k_end = at_edge ? widths.end : v_.kernel[2];
    const int64_t panel = channel % kWidth;
    const int64_t step = v_.stride[2] * v_.channels, gap = v_.dilation[2] * v_.channels;
    Vector sums[Pixels][kVectors];
#pragma GCC unroll 16
    for (int p = 0; p < Pixels; ++p) {
#pragma GCC unroll 2
      for (int q = 0; q < kVectors; ++q) sums[p][q] = Level::zero();
    }
    for (int64_t i = taps.depths.begin; i < taps.depths.end; ++i) {
      const int64_t depth = taps.line.depth * v_.stride[0] + i * v_.dilation[0] - v_.pad[0];
      for (int64_t j = taps.heights.begin; j < taps.heights.end; ++j) {
        const int64_t height = taps.line.height * v_.stride[1] + j * v_.dilation[1] - v_.pad[1];
        const int64_t row = (taps.line.image * v_.in[0] + depth) * v_.in[1] + height;
        const L *x = static_cast<const L *>(v_.x) +
                     (row * v_.in[2] + output * v_.stride[2] + k_begin * v_.dilation[2] - v_.pad[2]) * v_.channels +
                     channel;
        const T *w = taps.filters + ((i * v_.kernel[1] + j) * v_.kernel[2] + k_begin) * taps.width + panel;
        for (int64_t k = k_begin; k < k_end; ++k, x += gap, w += taps.width) {
          Vector filter[kVectors];
#pragma GCC unroll 2
          for (int q = 0; q < kVectors; ++q) filter[q] = Vectors == 0 ? some_of(w, lanes) : Level::load(w + q * kLanes);
#pragma GCC unroll 16
          for (int p = 0; p < Pixels; ++p) {
#pragma GCC unroll 2
            for (int q = 0; q < kVectors; ++q) {
              const L *const at = x + p * step + q * kLanes;
              sums[p][q] =
                  Level::add_product(Vectors == 0 ? some_of(at, lanes) : Level::load(at), filter[q], sums[p][q]);
            }
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < Pixels; ++p) {
#pragma GCC unroll 2
      for (int q = 0; q < kVectors; ++q) Level::store(target + p * p_.result_step + q * kLanes, sums[p][q]);
    }
  }

  // The first lanes of a vector; the others are zero.
  template <class U>
  static HIDET_DIST_INLINE Vector some_of(const U *at, int64_t lanes) {
    float values[kLanes] = {};
    for (int64_t i = 0; i < lanes; ++i) values[i] = Level::one(at + i);
    return Level::load(values);
  }
  static HIDET_DIST_INLINE Vector some_of(const float *at, int64_t lanes) { return Level::load_first(at, lanes); }

  const hidet_dist_convolution &v_;
  const hidet_dist_convolution_part &p_;
};

template <class Level>
int32_t convolve_depthwise(const hidet_dist_convolution &v, const hidet_dist_convolution_part &part) {
  const bool wide = v.x_dtype == HIDET_DIST_F32;
  if (!wide && v.x_dtype != v.filters_dtype) return HIDET_DIST_INVALID_ARGUMENT;
  if (v.filters_dtype == HIDET_DIST_F32) {
    Depthwise<Level, float, float>(v, part).run();
  } else if (v.filters_dtype == HIDET_DIST_F16) {
    wide ? Depthwise<Level, float, Half>(v, part).run() : Depthwise<Level, Half, Half>(v, part).run();
  } else if (v.filters_dtype == HIDET_DIST_BF16) {
    wide ? Depthwise<Level, float, Brain>(v, part).run() : Depthwise<Level, Brain, Brain>(v, part).run();
  } else {
    return HIDET_DIST_INVALID_ARGUMENT;
  }
  return HIDET_DIST_OK;
}

}  // namespace
