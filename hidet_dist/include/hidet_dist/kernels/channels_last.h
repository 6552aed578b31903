/*
 * Convolutions of images with channels last, by filters in panels, in parallel over tiles of the result: see
 * hidet_dist/convolution.h.
 */
#ifndef HIDET_DIST_KERNELS_CHANNELS_LAST_H
#define HIDET_DIST_KERNELS_CHANNELS_LAST_H

#include <vector>

#include "hidet_dist/convolution.h"
#include "hidet_dist/kernels/panel_product.h"

namespace hidet_dist {
namespace kernels {

/* The floats of a tile: it stays in the second-level cache, beside the panels that it is computed from, until it is
 * written out. */
const int64_t kConvolutionTile = 1 << 16;
const int64_t kLeastConvolutionRows = 48;

/* Multiplies the channels of some pixels, counted over all images, by scale[images, channels]. */
inline void scale_pixels(const hidet_dist_convolution &v, const float *scale, int64_t pixel, int64_t pixels,
                         float *target) {
  const int64_t of_image = v.in[0] * v.in[1] * v.in[2];
  const float *source = static_cast<const float *>(v.x) + pixel * v.channels;
  for (int64_t end = pixel + pixels; pixel < end; ++pixel, source += v.channels, target += v.channels) {
    const float *const factors = scale + pixel / of_image * v.channels;
    for (int64_t channel = 0; channel < v.channels; ++channel) target[channel] = source[channel] * factors[channel];
  }
}

/* Passes the result to a `store`, as one matrix of images * pixels rows.
 *
 * With a `scale`[images, channels], the convolution is of single pixels, float32 and not in groups, and its input is
 * multiplied by the scale first: the pixels of a tile at a time, which stay in the cache. */
template <class Store>
void convolve_panels(const hidet_dist_convolution &v, const Store &store, const float *scale = nullptr) {
  const bool depthwise = hidet_dist_is_depthwise(&v) != 0;
  const int64_t pixels = v.images * v.out[0] * v.out[1] * v.out[2];
  const int64_t groups = depthwise ? 1 : v.groups, channels = v.out_channels / groups;
  const int64_t taps = v.kernel[0] * v.kernel[1] * v.kernel[2];
  const int64_t threads = threads_for(static_cast<double>(pixels) * v.out_channels * taps * (v.channels / v.groups));
  const int64_t most_columns = std::min(channels, kPanelTileColumns);
  const int64_t widest = std::max(scale == nullptr ? 1 : v.channels, most_columns);
  const int64_t most_rows =
      std::max(kLeastConvolutionRows, std::min(kPanelTileRows, kConvolutionTile / std::max<int64_t>(widest, 1)));
  const Cut cut(pixels, channels, most_rows, most_columns, parts_of_each(groups, threads),
                std::max(kPanelWidth, INT64_C(16)));
  const int64_t down = divide_up(pixels, cut.rows), across = divide_up(channels, cut.columns);
  const int64_t ld = leading_dimension(cut.columns);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const PanelMemory memory(cut.rows * (ld + (scale == nullptr ? 0 : v.channels)),
                             hidet_dist_convolution_scratch(kPanelLevel, &v, cut.rows));
    float *const scaled = memory.tile() + cut.rows * ld;
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < groups * down * across; ++unit) {
      const int64_t group = unit / (down * across);
      const int64_t row = unit / across % down * cut.rows, column = unit % across * cut.columns;
      const int64_t rows = std::min(cut.rows, pixels - row), columns = std::min(cut.columns, channels - column);
      hidet_dist_convolution_part part = {group, row, rows, column, columns, memory.tile(), ld, memory.scratch()};
      if (scale == nullptr) {
        hidet_dist_convolve(kPanelLevel, &v, &part);
      } else {
        scale_pixels(v, scale, row, rows, scaled);
        hidet_dist_convolution own = v; /* of the tile's pixels, as one line of an image */
        own.images = own.in[0] = own.out[0] = own.in[1] = own.out[1] = 1;
        own.in[2] = own.out[2] = rows;
        own.x = scaled;
        part.pixel = 0;
        hidet_dist_convolve(kPanelLevel, &own, &part);
      }
      store(memory.tile(), ld, row, rows, group * channels + column, columns);
    }
  }
}

/* Filters[out_channels, channels / groups, ...kernel], brought into panels. */
template <class T>
inline std::vector<T> panels_of_filters(const hidet_dist_convolution &v, const T *filters) {
  const bool depthwise = hidet_dist_is_depthwise(&v) != 0;
  const int64_t groups = depthwise ? 1 : v.groups, columns = v.out_channels / groups;
  const int64_t taps = v.kernel[0] * v.kernel[1] * v.kernel[2], channels = v.channels / v.groups;
  std::vector<T> panels(static_cast<size_t>(v.out_channels * channels * taps));
  T *target = panels.data();
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t first = 0; first < columns; first += kPanelWidth) {
      const int64_t width = std::min(kPanelWidth, columns - first);
      for (int64_t tap = 0; tap < taps; ++tap) {
        for (int64_t channel = 0; channel < channels; ++channel) {
          for (int64_t j = 0; j < width; ++j) {
            *target++ = filters[((group * columns + first + j) * channels + channel) * taps + tap];
          }
        }
      }
    }
  }
  return panels;
}

/* The panels of the filters have `Width` columns; 0 if they are not in panels. */
template <int64_t Width, class T, class Store>
void convolve_channels_last(const hidet_dist_convolution &v, const Store &store, const float *scale = nullptr) {
  static_assert(Width == 0 || Width == kPanelWidth, "the panels are those of another level");
  if (Width > 0) return convolve_panels(v, store, scale);
  const std::vector<T> panels = panels_of_filters(v, static_cast<const T *>(v.filters));
  hidet_dist_convolution in_panels = v;
  in_panels.filters = panels.data();
  convolve_panels(in_panels, store, scale);
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
