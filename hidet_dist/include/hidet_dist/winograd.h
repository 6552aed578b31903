/*
 * Convolutions of images by filters of 3 x 3 taps with Winograd's minimal filtering F(2 x 2, 3 x 3): 2 x 2 pixels take
 * 16 multiplications for an input and an output channel, instead of 36 (Lavin and Gray, Fast Algorithms for
 * Convolutional Neural Networks, 2015, https://arxiv.org/abs/1509.09308).
 *
 * The result is cut into tiles of 2 x 2 pixels, line by line; the last ones of an image may be smaller. Each tile is read
 * from 4 x 4 pixels of the input. Transformed, these are a row in each of 16 matrices [tiles, channels]. The products of
 * these matrices by 16 matrices of transformed filters [channels, out_channels] (in panels, see panels.h) are 16 matrices
 * [tiles, out_channels], from which the pixels of the tiles follow.
 *
 * The convolution has one group, a stride and a dilation of 1, float32 elements, and the channels last (convolution.h).
 */
#ifndef HIDET_DIST_WINOGRAD_H
#define HIDET_DIST_WINOGRAD_H

#include "hidet_dist/convolution.h"

#ifdef __cplusplus
extern "C" {
#endif

enum hidet_dist_winograd {
  HIDET_DIST_WINOGRAD_TILE = 2,         /* pixels along each side of a tile, */
  HIDET_DIST_WINOGRAD_MATRICES = 16,    /* elements of a transformed tile, */
  HIDET_DIST_WINOGRAD_LEAST_CHANNELS = 16 /* of the input and of the result */
};

/* Some lines of tiles, counted over all images. */
typedef struct hidet_dist_winograd_part {
  int64_t line; /* the first one */
  int64_t lines;
  float *matrices;     /* the row of the part's first tile in the first matrix; rows lie one after the other */
  int64_t step;        /* elements from one matrix to the next */
  const float *zeros;  /* as many as there are channels: what lies beside the input */
  float *result;       /* the part's first pixel; lines of pixels lie one after the other */
  int64_t result_step; /* elements from one pixel to the next, at least `out_channels` */
} hidet_dist_winograd_part;

/*
 * Transforms the part's tiles of the input, and writes them to matrices [tiles, channels]. Returns
 * HIDET_DIST_INVALID_ARGUMENT for an unknown level and for other convolutions than those above.
 */
HIDET_DIST_API int32_t hidet_dist_winograd_read(int32_t level, const hidet_dist_convolution *convolution,
                                                const hidet_dist_winograd_part *part);

/*
 * Computes the part's pixels from the products, matrices [tiles, out_channels], and writes them to the result. Returns
 * HIDET_DIST_INVALID_ARGUMENT as above.
 */
HIDET_DIST_API int32_t hidet_dist_winograd_write(int32_t level, const hidet_dist_convolution *convolution,
                                                 const hidet_dist_winograd_part *part);

#ifdef __cplusplus
}
#endif

#endif
