/*
 * Convolutions of images with channels last by Winograd's minimal filtering, in parallel over tiles and over products:
 * see hidet_dist/winograd.h. An element's sums do not depend on the pixels beside its tile, nor on the number of
 * threads.
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

/* How the tiles of a convolution are divided into blocks of lines, and these among threads. Where there are enough
 * tiles, each thread has blocks of its own, and reads all filters for each: what it transforms and multiplies does not
 * leave its caches. Otherwise all threads share a block, and each has products of its own. */
struct WinogradBlocks {
  int64_t down, across;      /* tiles of an image */
  int64_t total;             /* lines of tiles */
  bool shared;
  int64_t lines;             /* of a block */
  int64_t step_in, step_out; /* from one matrix to the next */

  WinogradBlocks(const hidet_dist_convolution &v, int64_t threads)
      : down(divide_up(v.out[1], HIDET_DIST_WINOGRAD_TILE)),
        across(divide_up(v.out[2], HIDET_DIST_WINOGRAD_TILE)),
        total(v.images * down),
        shared(threads > 1 && total / threads * across < kLeastTiles) {
    const int64_t floats = HIDET_DIST_WINOGRAD_MATRICES * (v.channels + v.out_channels);
    const int64_t tiles = std::max(kLeastTiles, kWinogradFloats / floats) * (shared ? threads : 1);
    lines = block_size(total, std::max<int64_t>(1, tiles / across), shared ? 1 : threads, 1);
    step_in = leading_dimension(lines * across * v.channels);
    step_out = leading_dimension(lines * across * v.out_channels);
  }

  int64_t floats() const { return HIDET_DIST_WINOGRAD_MATRICES * (step_in + step_out); }
};

/* The steps of a block: its pixels are transformed line by line, multiplied matrix by matrix, and written line by line.
 * `matrices` has the floats of a block, and `pixels` those of a line of its result. */
template <class Store>
class WinogradSteps {
 public:
  WinogradSteps(const hidet_dist_convolution &convolution, const WinogradBlocks &blocks, const Store &store,
                float *matrices, const float *zeros, float *pixels, void *scratch)
      : v_(convolution),
        blocks_(blocks),
        store_(store),
        read_(matrices),
        written_(matrices + HIDET_DIST_WINOGRAD_MATRICES * blocks.step_in),
        zeros_(zeros),
        pixels_(pixels),
        scratch_(scratch) {}

  void read(int64_t begin, int64_t line) const {
    const hidet_dist_winograd_part part = {
        begin + line, 1, read_ + line * blocks_.across * v_.channels, blocks_.step_in, zeros_, nullptr, 0};
    hidet_dist_winograd_read(kPanelLevel, &v_, &part);
  }

  /* Some columns of one product of all tiles. */
  void multiply(int64_t tiles, int64_t matrix, int64_t column, int64_t columns) const {
    const float *const filters =
        static_cast<const float *>(v_.filters) + (matrix * v_.out_channels + column) * v_.channels;
    const hidet_dist_panel_product product = {read_ + matrix * blocks_.step_in,
                                              v_.channels,
                                              1,
                                              tiles,
                                              columns,
                                              v_.channels,
                                              filters,
                                              HIDET_DIST_IN_PANELS,
                                              0,
                                              HIDET_DIST_F32,
                                              HIDET_DIST_F32,
                                              written_ + matrix * blocks_.step_out + column,
                                              v_.out_channels,
                                              scratch_,
                                              nullptr,
                                              0};
    hidet_dist_multiply_panels(kPanelLevel, &product);
  }

  void write(int64_t begin, int64_t line) const {
    const int64_t kTile = HIDET_DIST_WINOGRAD_TILE, columns = v_.out_channels, width = v_.out[2];
    const int64_t ld = leading_dimension(columns);
    const hidet_dist_winograd_part part = {
        begin + line, 1, written_ + line * blocks_.across * columns, blocks_.step_out, zeros_, pixels_, ld};
    hidet_dist_winograd_write(kPanelLevel, &v_, &part);
    const int64_t image = (begin + line) / blocks_.down, row = (begin + line) % blocks_.down * kTile;
    store_(pixels_, ld, (image * v_.out[1] + row) * width, std::min(kTile, v_.out[1] - row) * width, 0, columns);
  }

 private:
  const hidet_dist_convolution &v_;
  const WinogradBlocks &blocks_;
  const Store &store_;
  float *const read_, *const written_;
  const float *const zeros_;
  float *const pixels_;
  void *const scratch_;
};

/* Passes the result to a `store`, as one matrix of images * pixels rows. The filters are transformed, and in panels of
 * `Width` columns. */
template <int64_t Width, class Store>
void convolve_winograd(const hidet_dist_convolution &v, const Store &store) {
  static_assert(Width == kPanelWidth, "the panels are those of another level");
  const int64_t kMatrices = HIDET_DIST_WINOGRAD_MATRICES, columns = v.out_channels;
  const int64_t threads = threads_for(static_cast<double>(v.images * v.out[1] * v.out[2]) * v.channels * columns * 4);
  const WinogradBlocks blocks(v, threads);
  const int64_t across =
      block_size(columns, columns, parts_of_each(kMatrices, threads), std::max(kPanelWidth, INT64_C(16)));
  const int64_t parts = divide_up(columns, across);
  const int64_t own_floats = HIDET_DIST_WINOGRAD_TILE * v.out[2] * leading_dimension(columns) + v.channels;
  const PanelMemory first(own_floats + blocks.floats());
  float *const of_all = first.tile() + own_floats;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    /* The first thread's memory is what all work on, where they share blocks. */
    const PanelMemory memory(omp_get_thread_num() == 0 || !blocks.shared ? own_floats + blocks.floats() : own_floats);
    float *const zeros = memory.tile(), *const pixels = zeros + v.channels;
    memset(zeros, 0, static_cast<size_t>(v.channels) * sizeof(float));
    const WinogradSteps<Store> steps(v, blocks, store, blocks.shared ? of_all : zeros + own_floats, zeros, pixels,
                                     memory.scratch());
    if (blocks.shared) {
      for (int64_t begin = 0; begin < blocks.total; begin += blocks.lines) {
        const int64_t lines = std::min(blocks.lines, blocks.total - begin);
#pragma omp for schedule(static)
        for (int64_t line = 0; line < lines; ++line) steps.read(begin, line);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < kMatrices * parts; ++unit) {
          const int64_t column = unit % parts * across;
          steps.multiply(lines * blocks.across, unit / parts, column, std::min(across, columns - column));
        }
#pragma omp for schedule(static) nowait
        for (int64_t line = 0; line < lines; ++line) steps.write(begin, line);
      }
    } else {
#pragma omp for schedule(dynamic)
      for (int64_t block = 0; block < divide_up(blocks.total, blocks.lines); ++block) {
        const int64_t begin = block * blocks.lines, lines = std::min(blocks.lines, blocks.total - begin);
        for (int64_t line = 0; line < lines; ++line) steps.read(begin, line);
        for (int64_t matrix = 0; matrix < kMatrices; ++matrix) {
          steps.multiply(lines * blocks.across, matrix, 0, columns);
        }
        for (int64_t line = 0; line < lines; ++line) steps.write(begin, line);
      }
    }
  }
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
