// The transforms of tiles for Winograd's minimal filtering (see winograd.h), in terms of the vectors of a level; see
// product.hpp for what holds here, too.
#pragma once

#include "hidet_dist/winograd.h"
#include "product.hpp"

namespace {

template <class Level>
class Winograd {
  using Vector = typename Level::Vector;
  static constexpr int64_t kLanes = Level::kLanes;
  static constexpr int kTile = HIDET_DIST_WINOGRAD_TILE, kSide = kTile + 2;  // pixels that a tile writes and reads
  static_assert(kSide * kSide == HIDET_DIST_WINOGRAD_MATRICES, "a matrix for each pixel that a tile reads");
  static_assert(kLanes <= HIDET_DIST_WINOGRAD_LEAST_CHANNELS, "the last vector of channels reaches back");

 public:
  Winograd(const hidet_dist_convolution &convolution, const hidet_dist_winograd_part &part)
      : v_(convolution), p_(part), down_((v_.out[1] + kTile - 1) / kTile), across_((v_.out[2] + kTile - 1) / kTile) {}

  void read() const {
    float *target = p_.matrices;
    for (int64_t line = p_.line; line < p_.line + p_.lines; ++line) {
      const float *const image = static_cast<const float *>(v_.x) + line / down_ * v_.in[1] * v_.in[2] * v_.channels;
      const int64_t top = line % down_ * kTile - v_.pad[1];
      for (int64_t tile = 0; tile < across_; ++tile, target += v_.channels) {
        const int64_t left = tile * kTile - v_.pad[2];
        const float *pixels[kSide][kSide];
        for (int i = 0; i < kSide; ++i) {
          const bool inside = top + i >= 0 && top + i < v_.in[1];
          for (int j = 0; j < kSide; ++j) {
            const int64_t width = left + j;
            pixels[i][j] = !inside || width < 0 || width >= v_.in[2]
                               ? p_.zeros
                               : image + ((top + i) * v_.in[2] + width) * v_.channels;
          }
        }
        for_vectors(v_.channels, [&](int64_t channel) { read_channels(pixels, channel, target + channel); });
      }
    }
  }

  void write() const {
    const float *source = p_.matrices;
    float *target = p_.result;
    for (int64_t line = p_.line; line < p_.line + p_.lines; ++line) {
      const int64_t rows = least(kTile, v_.out[1] - line % down_ * kTile);
      for (int64_t tile = 0; tile < across_; ++tile, source += v_.out_channels) {
        const int64_t columns = least(kTile, v_.out[2] - tile * kTile);
        float *const first = target + tile * kTile * p_.result_step;
        for_vectors(v_.out_channels,
                    [&](int64_t channel) { write_channels(source + channel, rows, columns, first + channel); });
      }
      target += rows * v_.out[2] * p_.result_step;
    }
  }

 private:
  // Calls `visit` for the first channel of each vector. The last one shares some with the one before it.
  template <class Visit>
  static HIDET_DIST_INLINE void for_vectors(int64_t channels, const Visit &visit) {
    for (int64_t channel = 0; channel < channels; channel += kLanes) visit(least(channel, channels - kLanes));
  }

  // The transform of one line of pixels, and of one line of products.
  static HIDET_DIST_INLINE void read_line(const Vector *d, Vector *t) {
    t[0] = Level::subtract(d[0], d[2]);
    t[1] = Level::add(d[1], d[2]);
    t[2] = Level::subtract(d[2], d[1]);
    t[3] = Level::subtract(d[1], d[3]);
  }
  static HIDET_DIST_INLINE void write_line(const Vector *m, Vector *t) {
    t[0] = Level::add(Level::add(m[0], m[1]), m[2]);
    t[1] = Level::subtract(Level::subtract(m[1], m[2]), m[3]);
  }

  HIDET_DIST_INLINE void read_channels(const float *const (*pixels)[kSide], int64_t channel, float *target) const {
    Vector half[kSide][kSide];  // transformed along columns
#pragma GCC unroll 4
    for (int j = 0; j < kSide; ++j) {
      Vector d[kSide], t[kSide];
#pragma GCC unroll 4
      for (int i = 0; i < kSide; ++i) d[i] = Level::load(pixels[i][j] + channel);
      read_line(d, t);
#pragma GCC unroll 4
      for (int i = 0; i < kSide; ++i) half[i][j] = t[i];
    }
#pragma GCC unroll 4
    for (int i = 0; i < kSide; ++i) {
      Vector t[kSide];
      read_line(half[i], t);
#pragma GCC unroll 4
      for (int j = 0; j < kSide; ++j) Level::store(target + (i * kSide + j) * p_.step, t[j]);
    }
  }

  HIDET_DIST_INLINE void write_channels(const float *source, int64_t rows, int64_t columns, float *target) const {
    Vector half[kTile][kSide];
#pragma GCC unroll 4
    for (int j = 0; j < kSide; ++j) {
      Vector m[kSide], t[kTile];
#pragma GCC unroll 4
      for (int i = 0; i < kSide; ++i) m[i] = Level::load(source + (i * kSide + j) * p_.step);
      write_line(m, t);
#pragma GCC unroll 2
      for (int i = 0; i < kTile; ++i) half[i][j] = t[i];
    }
    for (int64_t i = 0; i < rows; ++i) {
      Vector t[kTile];
      write_line(half[i], t);
      float *const pixel = target + i * v_.out[2] * p_.result_step;
      Level::store(pixel, t[0]);
      if (columns > 1) Level::store(pixel + p_.result_step, t[1]);
    }
  }

  const hidet_dist_convolution &v_;
  const hidet_dist_winograd_part &p_;
  const int64_t down_, across_;  // tiles of an image
};

template <class Level>
void read_tiles(const hidet_dist_convolution &convolution, const hidet_dist_winograd_part &part) {
  Winograd<Level>(convolution, part).read();
}

template <class Level>
void write_tiles(const hidet_dist_convolution &convolution, const hidet_dist_winograd_part &part) {
  Winograd<Level>(convolution, part).write();
}

}  // namespace
