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

// Several outputs of a line, beside one another, for the channels of one vector: by a kernel of `Taps` along the line and
// a stride of `Step` there. An element of the input is loaded once for all outputs that read it.
template <class Level, int Taps, int Step, int Pixels>
class Beside {
  using Vector = typename Level::Vector;
  static constexpr int kReads = (Pixels - 1) * Step + Taps;  // elements of the input

 public:
  // Adds the products by the filters of a line of the kernel, `width` floats apart. Of the elements of the input, `step`
  // floats apart, those from `begin` to `end` are within it; all are if `Inside`.
  template <bool Inside>
  HIDET_DIST_INLINE void add(const float *x, int64_t step, const float *filters, int64_t width, int begin, int end) {
    Vector filter[Taps];
#pragma GCC unroll 8
    for (int k = 0; k < Taps; ++k) filter[k] = Level::load(filters + k * width);
#pragma GCC unroll 32
    for (int q = 0; q < kReads; ++q) {
      if (!Inside && (q < begin || q >= end)) continue;
      const Vector value = Level::load(x + q * step);
#pragma GCC unroll 8
      for (int k = 0; k < Taps; ++k) {
        const int ahead = q - k;  // folded: which output, if any, reads this element by this tap
        if (ahead >= 0 && ahead % Step == 0 && ahead / Step < Pixels) {
          sums_[ahead / Step] = Level::add_product(value, filter[k], sums_[ahead / Step]);
        }
      }
    }
  }

  HIDET_DIST_INLINE void store(float *target, int64_t step) const {
#pragma GCC unroll 16
    for (int p = 0; p < Pixels; ++p) Level::store(target + p * step, sums_[p]);
  }

  HIDET_DIST_INLINE void clear() {
#pragma GCC unroll 16
    for (int p = 0; p < Pixels; ++p) sums_[p] = Level::zero();
  }

 private:
  Vector sums_[Pixels];
};

template <class Level, class L, class T>
class Depthwise {
  using Vector = typename Level::Vector;
  static constexpr int64_t kLanes = Level::kLanes, kWidth = Level::kWidth;
  static constexpr int kPixels = Level::kPixels;  // outputs whose sums registers hold, for the channels of a panel
  static constexpr int kMany = 8, kSome = 4;      // and for those of a vector

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
    const int64_t known = by_line(line, depths, heights, target);
    if (known < p_.channels) tap_by_tap(line, depths, heights, known, target);
  }

  // The lines of the input that a line of outputs reads, and where the filters of each begin.
  struct Lines {
    static constexpr int kMost = 16;
    int count;
    const L *x[kMost];
    int64_t tap[kMost];
  };

  // Computes the channels of whole vectors, where there is a kernel of so many taps and such a stride along the line.
  // Returns how many those are.
  int64_t by_line(const Line &line, const TapRange &depths, const TapRange &heights, float *target) {
    if (v_.dilation[2] != 1 || v_.kernel[0] * v_.kernel[1] > Lines::kMost) return 0;
    Lines lines;
    lines.count = 0;
    for (int64_t i = depths.begin; i < depths.end; ++i) {
      const int64_t depth = line.depth * v_.stride[0] + i * v_.dilation[0] - v_.pad[0];
      for (int64_t j = heights.begin; j < heights.end; ++j, ++lines.count) {
        const int64_t height = line.height * v_.stride[1] + j * v_.dilation[1] - v_.pad[1];
        const int64_t row = (line.image * v_.in[0] + depth) * v_.in[1] + height;
        lines.x[lines.count] = static_cast<const L *>(v_.x) + row * v_.in[2] * v_.channels;
        lines.tap[lines.count] = (i * v_.kernel[1] + j) * v_.kernel[2];
      }
    }
    switch (v_.kernel[2] * 4 + v_.stride[2]) {
      case 3 * 4 + 1:
        return over_lines<3, 1>(line, lines, target, lines.x);
      case 3 * 4 + 2:
        return over_lines<3, 2>(line, lines, target, lines.x);
      case 5 * 4 + 1:
        return over_lines<5, 1>(line, lines, target, lines.x);
      case 5 * 4 + 2:
        return over_lines<5, 2>(line, lines, target, lines.x);
      case 7 * 4 + 1:
        return over_lines<7, 1>(line, lines, target, lines.x);
      default:
        return 0;
    }
  }

  // Half precision is converted tap by tap.
  template <int Taps, int Step, class X>
  int64_t over_lines(const Line &, const Lines &, float *, const X *const *) {
    return 0;
  }
  template <int Taps, int Step>
  int64_t over_lines(const Line &line, const Lines &lines, float *target, const float *const *) {
    if (v_.filters_dtype != HIDET_DIST_F32) return 0;
    const int64_t whole = p_.channels / kLanes * kLanes, taps = v_.kernel[0] * v_.kernel[1] * v_.kernel[2];
    const int64_t count = line.end - line.begin;
    for (int64_t c = 0; c < whole; c += kLanes) {
      const int64_t channel = p_.channel + c, panel = channel / kWidth * kWidth;
      const float *const filters = static_cast<const float *>(v_.filters) + panel * taps + channel - panel;
      const int64_t width = least(kWidth, v_.channels - panel);
      if (count >= kMany) {
        along<Taps, Step, kMany>(line, lines, channel, filters, width, target + c);
      } else if (count >= kSome) {
        along<Taps, Step, kSome>(line, lines, channel, filters, width, target + c);
      } else {
        along<Taps, Step, 1>(line, lines, channel, filters, width, target + c);
      }
    }
    return whole;
  }

  // The outputs of a line, so many at once, for the channels of a vector.
  template <int Taps, int Step, int Outputs>
  __attribute__((noinline)) void along(const Line &line, const Lines &lines, int64_t channel, const float *filters,
                                       int64_t width, float *target) {
    constexpr int64_t kReads = (Outputs - 1) * Step + Taps;
    const int64_t count = line.end - line.begin, step = v_.channels;
    for (int64_t o = 0; o < count; o += Outputs) {
      const int64_t output = least(o, count - Outputs);  // the last ones overlap those before
      const int64_t first = (line.begin + output) * Step - v_.pad[2];
      float *const to = target + output * p_.result_step;
      Beside<Level, Taps, Step, Outputs> sums;
      if (first < 0 || first + kReads > v_.in[2]) {
        at_edge<Taps, Step, Outputs>(lines, channel, first, filters, width, to);
        continue;
      }
      sums.clear();
      for (int r = 0; r < lines.count; ++r) {
        const float *const x = lines.x[r] + first * step + channel;
        sums.template add<true>(x, step, filters + lines.tap[r] * width, width, 0, 0);
      }
      sums.store(to, p_.result_step);
    }
  }

  // Outputs of which some read beside the input.
  template <int Taps, int Step, int Outputs>
  __attribute__((noinline)) void at_edge(const Lines &lines, int64_t channel, int64_t first, const float *filters,
                                         int64_t width, float *target) {
    constexpr int64_t kReads = (Outputs - 1) * Step + Taps;
    const int64_t room = v_.in[2] - first;
    const int begin = static_cast<int>(first < 0 ? least(-first, kReads) : 0);
    const int end = static_cast<int>(room < 0 ? 0 : least(room, kReads));
    Beside<Level, Taps, Step, Outputs> sums;
    sums.clear();
    for (int r = 0; r < lines.count; ++r) {
      const float *const x = lines.x[r] + first * v_.channels + channel;
      sums.template add<false>(x, v_.channels, filters + lines.tap[r] * width, width, begin, end);
    }
    sums.store(target, p_.result_step);
  }

  // Computes the other channels: those behind the first `known` ones.
  void tap_by_tap(const Line &line, const TapRange &depths, const TapRange &heights, int64_t known, float *target) {
    // The outputs all of whose taps along the line read from within the input.
    const int64_t reach = (v_.kernel[2] - 1) * v_.dilation[2], room = v_.in[2] - 1 + v_.pad[2] - reach;
    const int64_t low = least(line.end, (v_.pad[2] + v_.stride[2] - 1) / v_.stride[2]);
    const int64_t begin = low > line.begin ? low : line.begin;
    const int64_t high = room < 0 ? begin : least(line.end, room / v_.stride[2] + 1), end = high > begin ? high : begin;
    for (int64_t c = known / kWidth * kWidth; c < p_.channels; c += kWidth) {  // panel by panel
      const int64_t channel = p_.channel + c, width = least(kWidth, v_.channels - channel);
      const int64_t left = least(kWidth, p_.channels - c);
      const Taps taps{depths, heights, line,
                      static_cast<const T *>(v_.filters) + channel * v_.kernel[0] * v_.kernel[1] * v_.kernel[2], width};
      if (left == kWidth) {
        over_line<2>(taps, channel, begin, end, target + c, kLanes);
        continue;
      }
      if (left >= kLanes && c >= known) over_line<1>(taps, channel, begin, end, target + c, kLanes);
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
    int64_t k_begin = 0, k_end = v_.kernel[2];
    if (at_edge) {
      const TapRange widths(v_, 2, output);
      k_begin = widths.begin;
      k_end = widths.end;
    }
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
