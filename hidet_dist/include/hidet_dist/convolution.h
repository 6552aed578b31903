/*
 * Convolutions of images whose channels lie beside one another (channels last), by filters that lie in panels.
 *
 * The input is x[images, ...in, channels] and the result y[images, ...out, out_channels], with three spatial dims each.
 * The filters of a group of channels are a matrix in panels (see panels.h). Its columns are the output channels of the
 * group, and its rows are the input channels of the group for the first tap of the kernel, then for the next tap, and so
 * on. Where each channel is a group by itself (depthwise), the filters are one matrix: a column for each channel, a row
 * for each tap.
 *
 * An element of the result is summed in an order that neither the number of images nor that of threads changes.
 */
#ifndef HIDET_DIST_CONVOLUTION_H
#define HIDET_DIST_CONVOLUTION_H

#include "hidet_dist/panels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hidet_dist_convolution {
  int64_t images;
  int64_t channels;
  int64_t out_channels;
  int64_t groups;
  int64_t in[3];
  int64_t out[3];
  int64_t kernel[3];
  int64_t stride[3];
  int64_t dilation[3];
  int64_t pad[3];        /* zeros before the first element; those behind the last follow from `out` */
  const void *x;
  const void *filters;
  int32_t x_dtype;       /* HIDET_DIST_F32, or that of the filters */
  int32_t filters_dtype; /* HIDET_DIST_F32, _F16 or _BF16 */
} hidet_dist_convolution;

/* A part of the result: of the pixels of all images, counted on, and of the channels of a group. */
typedef struct hidet_dist_convolution_part {
  int64_t group;
  int64_t pixel; /* the first one */
  int64_t pixels;
  int64_t channel; /* the first one in the group, a multiple of the width of a panel */
  int64_t channels;
  float *result;       /* element (0, 0) of the part */
  int64_t result_step; /* elements from one pixel to the next: a multiple of 16, at least `channels` */
  void *scratch;       /* as many bytes as hidet_dist_convolution_scratch says, aligned to 64 bytes */
} hidet_dist_convolution_part;

/* Whether each channel is a group by itself: then a part may have the channels of several groups, from group 0 on. */
HIDET_DIST_API int32_t hidet_dist_is_depthwise(const hidet_dist_convolution *convolution);

/* Returns the bytes of scratch memory that a part of so many pixels needs at a level; 0 for an unknown level. */
HIDET_DIST_API int64_t hidet_dist_convolution_scratch(int32_t level, const hidet_dist_convolution *convolution,
                                                      int64_t pixels);

/*
 * Computes a part of a convolution in the calling thread. The processor must have the features of the level. Returns
 * HIDET_DIST_INVALID_ARGUMENT for an unknown level or dtype.
 */
HIDET_DIST_API int32_t hidet_dist_convolve(int32_t level, const hidet_dist_convolution *convolution,
                                           const hidet_dist_convolution_part *part);

#ifdef __cplusplus
}
#endif

#endif
