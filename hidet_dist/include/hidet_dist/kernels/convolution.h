/*
 * Convolutions of one to three spatial dims as products with a BLAS: the columns of a tile of outputs are gathered
 * (im2col) a few channels at a time into scratch memory that stays in the cache, with zeros for padding, and multiplied
 * by the filters. A convolution with a kernel of one is multiplied in place. One with few channels per group
 * (depthwise) is computed directly.
 */
#ifndef HIDET_DIST_KERNELS_CONVOLUTION_H
#define HIDET_DIST_KERNELS_CONVOLUTION_H

#include <type_traits>
#include <vector>

#include "hidet_dist/kernels/lines.h"
#include "hidet_dist/kernels/matmul.h"

namespace hidet_dist {
namespace kernels {

/* Sizes of x[images, channels, ...in], w[out_channels, channels / groups, ...kernel] and y[images, out_channels,
 * ...out], all row-major. `pad` is the padding before the first element. */
struct Convolution {
  int64_t images, channels, out_channels, groups;
  int64_t in[3], out[3], kernel[3], stride[3], dilation[3], pad[3];

  int64_t in_size() const { return in[0] * in[1] * in[2]; }
  int64_t out_size() const { return out[0] * out[1] * out[2]; }
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  int64_t group_channels() const { return channels / groups; }
  int64_t group_out_channels() const { return out_channels / groups; }

  bool is_pointwise() const {
    for (int dim = 0; dim < 3; ++dim) {
      if (kernel[dim] != 1 || stride[dim] != 1 || pad[dim] != 0 || in[dim] != out[dim]) return false;
    }
    return true;
  }

  /* The range of outputs along the last dim for which its tap `at` reads within the input. */
  void inside(int64_t at, int64_t *begin, int64_t *end) const {
    const int64_t offset = at * dilation[2] - pad[2];
    const int64_t first = offset < 0 ? divide_up(-offset, stride[2]) : 0;
    const int64_t last = in[2] - 1 - offset;
    *begin = std::min(first, out[2]);
    *end = std::max(*begin, last < 0 ? 0 : std::min(out[2], last / stride[2] + 1));
  }
};

/* The rows of im2col for `count` channels from `channel` on, and the columns `first` to `last`. */
template <class T>
inline void gather_columns(const Convolution &v, const T *x, int64_t channel, int64_t count, int64_t first,
                           int64_t last, float *tile, int64_t ld) {
  float *row = tile;
  for (int64_t c = channel; c < channel + count; ++c) {
    for (int64_t i = 0; i < v.kernel[0]; ++i) {
      for (int64_t j = 0; j < v.kernel[1]; ++j) {
        for (int64_t k = 0; k < v.kernel[2]; ++k, row += ld) {
          int64_t begin, end;
          v.inside(k, &begin, &end);
          const int64_t offset = k * v.dilation[2] - v.pad[2];
          for_lines(v, first, last, [&](const Line &line, int64_t column) {
            float *const target = row + column - line.begin;
            const int64_t depth = line.depth * v.stride[0] + i * v.dilation[0] - v.pad[0];
            const int64_t height = line.height * v.stride[1] + j * v.dilation[1] - v.pad[1];
            if (depth < 0 || depth >= v.in[0] || height < 0 || height >= v.in[1]) {
              std::fill(target + line.begin, target + line.end, 0.0f);
              return;
            }
            const int64_t from = std::min(std::max(begin, line.begin), line.end);
            const int64_t to = std::max(from, std::min(end, line.end));
            std::fill(target + line.begin, target + from, 0.0f);
            const T *const source =
                x + (((line.image * v.channels + c) * v.in[0] + depth) * v.in[1] + height) * v.in[2];
            read_strided(source + from * v.stride[2] + offset, v.stride[2], to - from, target + from);
            std::fill(target + to, target + line.end, 0.0f);
          });
        }
      }
    }
  }
}

/* Runs are copied a whole vector at a time: up to this many floats beyond their end are read and written. */
const int64_t kSpill = 16;

template <int64_t stride>
inline void copy_spilling(const float *source, int64_t count, float *target) {
  for (int64_t first = 0; first < count; first += kSpill) {
    float run[kSpill]; /* source and target may not be told apart otherwise */
    for (int64_t i = 0; i < kSpill; ++i) run[i] = source[(first + i) * stride];
    memcpy(target + first, run, sizeof(run));
  }
}

/* The part of one channel that the columns of a tile read, in rows with their padding: each tap of all columns is then
 * a set of runs, without checks for each element. For convolutions of one or two dims. */
class Rows {
 public:
  /* Not for a kernel of one, which reads each input once: copying would not pay. */
  static bool serve(const Convolution &v) {
    return v.in[0] == 1 && v.kernel[0] == 1 && v.pad[0] == 0 && v.kernel[1] * v.kernel[2] > 1;
  }

  Rows(const Convolution &v, int64_t first, int64_t last)
      : v_(v), width_((v.out[2] - 1) * v.stride[2] + (v.kernel[2] - 1) * v.dilation[2] + 1) {
    const int64_t reach = (v.kernel[1] - 1) * v.dilation[1] + 1;
    int64_t rows = 0;
    for_lines(v, first, last, [&](const Line &line, int64_t column) {
      if (images_.empty() || images_.back().image != line.image) {
        images_.push_back({line.image, line.height * v.stride[1] - v.pad[1], rows, 0});
      }
      Image &image = images_.back();
      const int64_t above = line.height * v.stride[1] - v.pad[1] - image.height;
      runs_.push_back({(image.row + above) * width_ + line.begin * v.stride[2], column, line.end - line.begin});
      image.rows = above + reach;
      rows = image.row + image.rows;
    });
    memory_.resize(static_cast<size_t>(rows * width_ + kSpill * v.stride[2]));
  }

  /* The rows of im2col for `count` channels from `channel` on. Some floats behind the last are overwritten. */
  template <class T>
  void gather(const T *x, int64_t channel, int64_t count, float *tile, int64_t ld) {
    for (int64_t c = channel; c < channel + count; ++c) {
      for (const Image &image : images_) read(x + (image.image * v_.channels + c) * v_.in_size(), image);
      for (int64_t j = 0; j < v_.kernel[1]; ++j) {
        for (int64_t k = 0; k < v_.kernel[2]; ++k, tile += ld) {
          const float *const source = memory_.data() + j * v_.dilation[1] * width_ + k * v_.dilation[2];
          if (v_.stride[2] == 1) {
            for (const Run &run : runs_) copy_spilling<1>(source + run.offset, run.count, tile + run.column);
          } else if (v_.stride[2] == 2) {
            for (const Run &run : runs_) copy_spilling<2>(source + run.offset, run.count, tile + run.column);
          } else {
            for (const Run &run : runs_) read_strided(source + run.offset, v_.stride[2], run.count, tile + run.column);
          }
        }
      }
    }
  }

 private:
  struct Image {
    int64_t image, height, row, rows; /* `rows` of input from `height` on, which may be above it */
  };
  struct Run {
    int64_t offset, column, count;
  };

  template <class T>
  void read(const T *plane, const Image &image) {
    const int64_t before = std::min(v_.pad[2], width_);
    const int64_t count = std::max<int64_t>(0, std::min(v_.in[2], width_ - before));
    float *target = memory_.data() + image.row * width_;
    for (int64_t height = image.height; height < image.height + image.rows; ++height, target += width_) {
      if (height < 0 || height >= v_.in[1]) {
        std::fill(target, target + width_, 0.0f);
        continue;
      }
      std::fill(target, target + before, 0.0f);
      read_run(plane + height * v_.in[2], count, target + before);
      std::fill(target + before + count, target + width_, 0.0f);
    }
  }

  const Convolution v_;
  const int64_t width_;
  std::vector<Image> images_;
  std::vector<Run> runs_;
  std::vector<float> memory_;
};

/* Passes the part of a tile that belongs to each image to `store`. */
template <class Store>
inline void store_images(const Convolution &v, float *tile, int64_t ld, int64_t channel, int64_t rows, int64_t first,
                         int64_t last, const Store &store) {
  const int64_t size = v.out_size();
  for (int64_t column = first; column < last;) {
    const int64_t image = column / size, position = column % size;
    const int64_t count = std::min(size - position, last - column);
    store(tile + (column - first), ld, image * v.out_channels + channel, rows, position, count);
    column += count;
  }
}

/* The filters of `rows` output channels, a few input channels of them. */
inline const float *filters(const float *w, int64_t, int64_t, int64_t, float *, int64_t *) { return w; }

template <class T>
inline const float *filters(const T *w, int64_t rows, int64_t depth, int64_t leading, float *scratch, int64_t *ld) {
  *ld = leading_dimension(depth);
  for (int64_t r = 0; r < rows; ++r) read_run(w + r * leading, depth, scratch + r * *ld);
  return scratch;
}

/* The data if inputs of this type are multiplied in place, or null. */
inline const float *in_place(const float *x) { return x; }
template <class T>
inline const float *in_place(const T *) {
  return nullptr;
}

/* Groups of fewer output channels are computed directly, because BLAS is inefficient for them. */
const int64_t kFewChannels = 8;
const int64_t kConvolutionRows = 512;
const int64_t kConvolutionColumns = 384;
/* The least columns of one image for a separate product; below, columns of several images are gathered. */
const int64_t kImageColumns = 128;

template <class T, class Store>
void multiply_columns(const Convolution &v, const T *x, const T *w, const Store &store) {
  const int64_t size = v.out_size(), taps = v.taps();
  const int64_t rows_of_group = v.group_out_channels(), channels = v.group_channels(), depth = channels * taps;
  const bool by_image = v.is_pointwise() && in_place(x) != nullptr && (size >= kImageColumns || v.images == 1);
  const int64_t products = v.groups * (by_image ? v.images : 1);
  const int64_t columns = by_image ? size : size * v.images;
  const double work = static_cast<double>(rows_of_group) * depth * columns * products;
  const int64_t threads = threads_for(work);
  const Cut cut(rows_of_group, columns, kConvolutionRows, kConvolutionColumns, parts_of_each(products, threads));
  const int64_t down = divide_up(rows_of_group, cut.rows), across = divide_up(columns, cut.columns);
  const int64_t ld = leading_dimension(cut.columns);
  const int64_t at_once = std::max<int64_t>(1, std::min(channels, kPanelDepth / taps));
  const bool reads_filters = in_place(w) == nullptr, in_rows = Rows::serve(v);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const Scratch tile(cut.rows * ld), gathered(by_image ? 0 : at_once * taps * ld + kSpill),
        read(reads_filters ? cut.rows * leading_dimension(at_once * taps) : 0);
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < products * down * across; ++unit) {
      const int64_t product = unit / (down * across);
      const int64_t group = product % v.groups, image = product / v.groups;
      const int64_t row = unit / across % down * cut.rows, first = unit % across * cut.columns;
      const int64_t rows = std::min(cut.rows, rows_of_group - row), last = std::min(first + cut.columns, columns);
      const int64_t channel = group * rows_of_group + row;
      if (by_image) {
        const float *const matrix = in_place(x) + (image * v.channels + group * channels) * size;
        sgemm(false, false, rows, last - first, depth, in_place(w) + channel * depth, depth, matrix + first, size,
              false, tile.get(), ld);
        store(tile.get(), ld, image * v.out_channels + channel, rows, first, last - first);
        continue;
      }
      Rows input(v, first, in_rows ? last : first);
      for (int64_t c = 0; c < channels; c += at_once) {
        const int64_t count = std::min(at_once, channels - c);
        if (in_rows) {
          input.gather(x, group * channels + c, count, gathered.get(), ld);
        } else {
          gather_columns(v, x, group * channels + c, count, first, last, gathered.get(), ld);
        }
        int64_t leading = depth;
        const float *const left =
            filters(w + channel * depth + c * taps, rows, count * taps, depth, read.get(), &leading);
        sgemm(false, false, rows, last - first, count * taps, left, leading, gathered.get(), ld, c > 0, tile.get(), ld);
      }
      store_images(v, tile.get(), ld, channel, rows, first, last, store);
    }
  }
}

/* The number of outputs that are computed at once: they stay in the first-level cache. */
const int64_t kRun = 2048;
const int64_t kMostTaps = 32; /* along the last dim, of a kernel whose taps' ranges are looked up */

/* target[o] += filter[k] * source[o * stride + k * dilation] for all taps k of a line of a kernel, each where it reads
 * from within the input; three taps, of which most kernels are, in one pass. */
template <class T, class Stride>
inline void add_line(const T *source, Stride stride, int64_t dilation, const T *filter, int64_t taps,
                     const int64_t *begins, const int64_t *ends, int64_t begin, int64_t end, float *target) {
  int64_t first = begin, last = begin;
  if (taps == 3) {
    first = std::max(begin, std::max(begins[0], std::max(begins[1], begins[2])));
    last = std::max(first, std::min(end, std::min(ends[0], std::min(ends[1], ends[2]))));
    const float left = as_float(filter[0]), middle = as_float(filter[1]), right = as_float(filter[2]);
    for (int64_t o = first; o < last; ++o) {
      const T *const at = source + o * stride;
      target[o] += left * as_float(at[0]) + middle * as_float(at[dilation]) + right * as_float(at[2 * dilation]);
    }
  }
  for (int64_t k = 0; k < taps; ++k) {
    const float factor = as_float(filter[k]);
    const T *const from = source + k * dilation;
    const int64_t low = std::max(begins[k], begin), high = std::min(ends[k], end);
    for (int64_t o = low; o < std::min(first, high); ++o) target[o] += factor * as_float(from[o * stride]);
    for (int64_t o = std::max(low, last); o < high; ++o) target[o] += factor * as_float(from[o * stride]);
  }
}

template <class T, class Store>
void sum_directly(const Convolution &v, const T *x, const T *w, const Store &store) {
  const int64_t size = v.out_size(), taps = v.taps(), channels = v.group_channels();
  const double work = static_cast<double>(v.images) * v.out_channels * size * channels * taps;
  const int64_t threads = threads_for(work);
  int64_t begins[kMostTaps], ends[kMostTaps];
  for (int64_t k = 0; k < v.kernel[2]; ++k) v.inside(k, begins + k, ends + k);
  const std::integral_constant<int64_t, 1> one = {};
  const std::integral_constant<int64_t, 2> two = {};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const Scratch sums(kRun);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < v.images * v.out_channels; ++row) {
      const int64_t image = row / v.out_channels, channel = row % v.out_channels;
      const int64_t group = channel / v.group_out_channels();
      const T *const planes = x + (image * v.channels + group * channels) * v.in_size();
      for (int64_t start = 0; start < size; start += kRun) {
        const int64_t count = std::min(kRun, size - start);
        float *const run = sums.get();
        std::fill(run, run + count, 0.0f);
        for_lines(v, start, start + count, [&](const Line &line, int64_t column) {
          float *const target = run + column - line.begin;
          const T *filter = w + channel * channels * taps;
          for (int64_t c = 0; c < channels; ++c) {
            for (int64_t i = 0; i < v.kernel[0]; ++i) {
              const int64_t depth = line.depth * v.stride[0] + i * v.dilation[0] - v.pad[0];
              for (int64_t j = 0; j < v.kernel[1]; ++j, filter += v.kernel[2]) {
                const int64_t height = line.height * v.stride[1] + j * v.dilation[1] - v.pad[1];
                if (depth < 0 || depth >= v.in[0] || height < 0 || height >= v.in[1]) continue;
                const T *const source = planes + ((c * v.in[0] + depth) * v.in[1] + height) * v.in[2] - v.pad[2];
                if (v.stride[2] == 1) {
                  add_line(source, one, v.dilation[2], filter, v.kernel[2], begins, ends, line.begin, line.end, target);
                } else if (v.stride[2] == 2) {
                  add_line(source, two, v.dilation[2], filter, v.kernel[2], begins, ends, line.begin, line.end, target);
                } else {
                  add_line(source, v.stride[2], v.dilation[2], filter, v.kernel[2], begins, ends, line.begin, line.end,
                           target);
                }
              }
            }
          }
        });
        store(run, kRun, row, 1, start, count);
      }
    }
  }
}

/* Passes the result to a `store`, as one matrix of images * out_channels rows.
 *
 * It is inlined so that only the way which the constants of a kernel take is compiled. */
template <class T, class Store>
__attribute__((always_inline)) inline void convolve(const Convolution &v, const T *x, const T *w, const Store &store) {
  if (v.groups > 1 && v.group_out_channels() < kFewChannels && v.kernel[2] <= kMostTaps) {
    sum_directly(v, x, w, store);
  } else {
    multiply_columns(v, x, w, store);
  }
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
