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

/* Passes the result to a `store`, as one matrix of images * pixels rows. */
template <class Store>
void convolve_panels(const hidet_dist_convolution &v, const Store &store) {
  const bool depthwise = hidet_dist_is_depthwise(&v) != 0;
  const int64_t pixels = v.images * v.out[0] * v.out[1] * v.out[2];
  const int64_t groups = depthwise ? 1 : v.groups, channels = v.out_channels / groups;
  const int64_t taps = v.kernel[0] * v.kernel[1] * v.kernel[2];
  const int64_t threads = threads_for(static_cast<double>(pixels) * v.out_channels * taps * (v.channels / v.groups));
  const int64_t most_columns = std::min(channels, kPanelTileColumns);
  const int64_t most_rows =
      std::max(kLeastConvolutionRows, std::min(kPanelTileRows, kConvolutionTile / std::max<int64_t>(most_columns, 1)));
  const Cut cut(pixels, channels, most_rows, most_columns, parts_of_each(groups, threads),
                std::max(kPanelWidth, INT64_C(16)));
  const int64_t down = divide_up(pixels, cut.rows), across = divide_up(channels, cut.columns);
  const int64_t ld = leading_dimension(cut.columns);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const PanelMemory memory(cut.rows * ld, hidet_dist_convolution_scratch(kPanelLevel, &v, cut.rows));
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < groups * down * across; ++unit) {
      const int64_t group = unit / (down * across);
      const int64_t row = unit / across % down * cut.rows, column = unit % across * cut.columns;
      const int64_t rows = std::min(cut.rows, pixels - row), columns = std::min(cut.columns, channels - column);
      const hidet_dist_convolution_part part = {group, row, rows, column, columns, memory.tile(), ld, memory.scratch()};
      hidet_dist_convolve(kPanelLevel, &v, &part);
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
void convolve_channels_last(const hidet_dist_convolution &v, const Store &store) {
  static_assert(Width == 0 || Width == kPanelWidth, "the panels are those of another level");
  if (Width > 0) return convolve_panels(v, store);
  const std::vector<T> panels = panels_of_filters(v, static_cast<const T *>(v.filters));
  hidet_dist_convolution in_panels = v;
  in_panels.filters = panels.data();
  convolve_panels(in_panels, store);
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
