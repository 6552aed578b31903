/*
 * Products of a matrix by a weight, which lies in panels if it was brought into this layout once.
 *
 * A panel has `width` columns of a matrix of `depth` rows, row after row, and the panels lie one after the other: element
 * (k, j) of the matrix is at (j - j % width) * depth + k * w + j % width, where w is the width of its panel. That of the
 * last panel is what is left of the columns. The width of the others follows from the level of the processor that code
 * is compiled for.
 *
 * An element of a product is the sum over blocks of depth, each summed from its first product to its last. Neither
 * rows, nor columns, nor threads, nor the layout change this order, so a row's result does not depend on the rows beside
 * it.
 *
 * Products of bfloat16 rows by bfloat16 panels at the level x86-64-v4 are dot products of pairs where the processor has
 * instructions for these (AVX512_BF16). Each block is summed pair by pair then, and subnormal numbers count as 0, so that
 * the last bits are not those of other processors.
 */
#ifndef HIDET_DIST_PANELS_H
#define HIDET_DIST_PANELS_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The levels of x86-64 with kernels of their own; those of x86-64 serve x86-64-v2, too. */
enum hidet_dist_level { HIDET_DIST_X86_64 = 1, HIDET_DIST_X86_64_V3 = 3, HIDET_DIST_X86_64_V4 = 4 };

/* The layout of the right operand: in panels, row by row, or column by column. */
enum hidet_dist_layout { HIDET_DIST_IN_PANELS = 0, HIDET_DIST_IN_ROWS = 1, HIDET_DIST_IN_COLUMNS = 2 };

/* A part of a product, whose first column begins a panel. */
typedef struct hidet_dist_panel_product {
  const void *left;    /* element (0, 0) of the part's rows of the left operand */
  int64_t row_step;    /* elements from one row of the left operand to the next, */
  int64_t depth_step;  /* and from one column of it to the next; one of the two is 1 */
  int64_t rows;
  int64_t columns;
  int64_t depth;
  const void *right;   /* the part's first panel, or element (0, 0) of the part's columns of the right operand */
  int32_t layout;      /* of the right operand */
  int64_t right_step;  /* elements from one row of it, or one column, to the next; unused in panels */
  int32_t left_dtype;  /* HIDET_DIST_F32, or that of the right operand */
  int32_t right_dtype; /* HIDET_DIST_F32, _F16 or _BF16 */
  void *result;        /* floats */
  int64_t result_step; /* elements from one row of the result to the next */
  void *scratch;       /* as many bytes as hidet_dist_panels_scratch says, aligned to 64 bytes */
  const void *const *runs; /* null; or where the rows of the left operand lie, instead of `left` and its steps: */
  int64_t run;             /* elements [i * run, (i + 1) * run) of row r are at runs[i * rows + r] */
} hidet_dist_panel_product;

/*
 * The scales of a group: a number for each column. If they are affine, those of all columns of the panel are followed by
 * a minimum for each column, which is added to the multiples of the scale. The numbers are float16, and float32 if they
 * are wide.
 */
enum hidet_dist_scales {
  HIDET_DIST_SYMMETRIC = 0,
  HIDET_DIST_AFFINE = 1,
  HIDET_DIST_WIDE = 2,
  HIDET_DIST_WIDE_AFFINE = 3
};

/*
 * A part of a product by a weight of few bits. The depth is in groups, of which the last is padded with zeros, and the
 * columns are padded to whole panels. A panel has, group after group, the scales of its columns, then the elements. Those
 * of 8 bits are four rows of each column, column after column, then the next four rows. Those of 4 bits have 8 added if
 * there are no minimums, and are eight rows of each column: four bytes, with the first four rows in their low halves.
 *
 * Each group of a row of the left operand is rounded to 8 bits, with a float32 scale. The sums of its products are
 * exact. They are multiplied by both scales, and added group by group.
 */
typedef struct hidet_dist_quantized_product {
  const float *left;   /* element (0, 0) of the part's rows of the left operand */
  int64_t row_step;    /* elements from one row of it to the next, */
  int64_t depth_step;  /* and from one column of it to the next */
  int64_t rows;
  int64_t columns;
  int64_t depth;
  const void *panels;  /* the part's first panel */
  int32_t bits;        /* of an element: 8 or 4; 4 with minimums, 8 with wide scales without them */
  int32_t scales;      /* one of hidet_dist_scales */
  int64_t group;       /* rows of a group: 32, 64 or 128; 16 with 8 bits and wide scales */
  float *result;
  int64_t result_step; /* elements from one row of the result to the next */
  void *scratch;       /* as many bytes as hidet_dist_quantized_scratch says, aligned to 64 bytes */
} hidet_dist_quantized_product;

/* Returns the columns of a panel at a level, or 0 for an unknown level. */
HIDET_DIST_API int64_t hidet_dist_panel_width(int32_t level);

/* Returns the bytes of scratch memory that a part of a product needs at a level, or 0 for an unknown level. */
HIDET_DIST_API int64_t hidet_dist_panels_scratch(int32_t level);

/*
 * Computes a part of a product in the calling thread. The processor must have the features of the level. Returns
 * HIDET_DIST_INVALID_ARGUMENT for an unknown level, dtype or layout.
 */
HIDET_DIST_API int32_t hidet_dist_multiply_panels(int32_t level, const hidet_dist_panel_product *product);

/* Returns the bytes of scratch memory that a part of a product by a weight of few bits needs; 0 for an unknown level. */
HIDET_DIST_API int64_t hidet_dist_quantized_scratch(int32_t level, int64_t rows, int64_t depth, int64_t group);

/*
 * Computes a part of a product by a weight of few bits in the calling thread. Results are those of hidet_dist_level's
 * instructions: a processor with more may use them where results are the same. Returns HIDET_DIST_INVALID_ARGUMENT for
 * an unknown level, or other bits, scales or rows of a group than those above.
 */
HIDET_DIST_API int32_t hidet_dist_multiply_quantized(int32_t level, const hidet_dist_quantized_product *product);

#ifdef __cplusplus
}
#endif

#endif
