/*
 * Convolutions of images with channels last by Winograd's minimal filtering, in parallel over tiles and over products:
 * see hidet_dist/winograd.h. An element's sums do not depend on the pixels beside its tile, nor on the number of threads.
 */
#ifndef HIDET_DIST_KERNELS_WINOGRAD_H
#define HIDET_DIST_KERNELS_WINOGRAD_H

#include "hidet_dist/kernels/panel_product.h"
#include "hidet_dist/winograd.h"

namespace hidet_dist {
namespace kernels {

/* The floats of the matrices of a block of tiles, for each thread: they stay in its second-level cache. A block has so
 * many tiles at least, because it reads all filters. */
const int64_t kWinogradFloats = 1 << 16;
const int64_t kLeastTiles = 96;

/* How the tiles of a convolution are divided into blocks of lines. */
struct WinogradBlocks {
  int64_t down, across; /* tiles of an image */
  int64_t lines;        /* of a block */
  int64_t step_in, step_out; /* from one matrix to the next */

  WinogradBlocks(const hidet_dist_convolution &v, int64_t threads)
      : down(divide_up(v.out[1], HIDET_DIST_WINOGRAD_TILE)), across(divide_up(v.out[2], HIDET_DIST_WINOGRAD_TILE)) {
    const int64_t floats = HIDET_DIST_WINOGRAD_MATRICES * (v.channels + v.out_channels);
    const int64_t tiles = std::max(kLeastTiles, kWinogradFloats / floats) * threads;
    lines = block_size(v.images * down, std::max<int64_t>(1, tiles / across), 1, 1);
    step_in = leading_dimension(lines * across * v.channels);
    step_out = leading_dimension(lines * across * v.out_channels);
  }
};

/* Passes the result to a `store`, as one matrix of images * pixels rows. The filters are transformed, and in panels of
 * `Width` columns. */
template <int64_t Width, class Store>
void convolve_winograd(const hidet_dist_convolution &v, const Store &store) {
  static_assert(Width == kPanelWidth, "the panels are those of another level");
  const int64_t kTile = HIDET_DIST_WINOGRAD_TILE, kMatrices = HIDET_DIST_WINOGRAD_MATRICES;
  const int64_t channels = v.channels, columns = v.out_channels, width = v.out[2];
  const int64_t threads = threads_for(static_cast<double>(v.images * v.out[1] * width) * channels * columns * 4);
  const WinogradBlocks blocks(v, threads);
  const int64_t total = v.images * blocks.down, ld = leading_dimension(columns);
  const int64_t across =
      block_size(columns, columns, parts_of_each(kMatrices, threads), std::max(kPanelWidth, INT64_C(16)));
  const int64_t parts = divide_up(columns, across), own_floats = kTile * width * ld + channels;
  const PanelMemory first(kMatrices * (blocks.step_in + blocks.step_out) + own_floats);
  float *const read = first.tile(), *const written = read + kMatrices * blocks.step_in;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    void *scratch = first.scratch();
    float *zeros = written + kMatrices * blocks.step_out;
    if (omp_get_thread_num() > 0) { /* the first thread's memory is what all work on */
      const PanelMemory memory(own_floats);
      scratch = memory.scratch();
      zeros = memory.tile();
    }
    float *const pixels = zeros + channels;
    memset(zeros, 0, static_cast<size_t>(channels) * sizeof(float));
    for (int64_t begin = 0; begin < total; begin += blocks.lines) {
      const int64_t lines = std::min(blocks.lines, total - begin), tiles = lines * blocks.across;
#pragma omp for schedule(static)
      for (int64_t line = 0; line < lines; ++line) {
        const hidet_dist_winograd_part part = {
            begin + line, 1, read + line * blocks.across * channels, blocks.step_in, zeros, nullptr, 0};
        hidet_dist_winograd_read(kPanelLevel, &v, &part);
      }
#pragma omp for schedule(static)
      for (int64_t unit = 0; unit < kMatrices * parts; ++unit) {
        const int64_t matrix = unit / parts, column = unit % parts * across;
        const float *const filters = static_cast<const float *>(v.filters) + (matrix * columns + column) * channels;
        const hidet_dist_panel_product product = {read + matrix * blocks.step_in,
                                                  channels,
                                                  1,
                                                  tiles,
                                                  std::min(across, columns - column),
                                                  channels,
                                                  filters,
                                                  HIDET_DIST_IN_PANELS,
                                                  0,
                                                  HIDET_DIST_F32,
                                                  HIDET_DIST_F32,
                                                  written + matrix * blocks.step_out + column,
                                                  columns,
                                                  scratch,
                                                  nullptr,
                                                  0};
        hidet_dist_multiply_panels(kPanelLevel, &product);
      }
#pragma omp for schedule(static) nowait
      for (int64_t line = 0; line < lines; ++line) {
        const hidet_dist_winograd_part part = {
            begin + line, 1, written + line * blocks.across * columns, blocks.step_out, zeros, pixels, ld};
        hidet_dist_winograd_write(kPanelLevel, &v, &part);
        const int64_t image = (begin + line) / blocks.down, row = (begin + line) % blocks.down * kTile;
        store(pixels, ld, (image * v.out[1] + row) * width, std::min(kTile, v.out[1] - row) * width, 0, columns);
      }
    }
  }
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
