/*
 * The choices and conversions that no plan within a number of bytes contains (constraint propagation; Mackworth,
 * Artificial Intelligence 8, 1977).
 *
 * A plan takes a choice of each entity. A choice holds *resident* bytes at all points, and others during its entity's
 * live intervals. An entity has inputs, each from a producer: the choices of both have a spec each, and the conversion
 * from one to the other holds bytes during the input's interval, and working bytes at its first point.
 */
#ifndef HIDET_DIST_SEARCH_CAPACITY_H
#define HIDET_DIST_SEARCH_CAPACITY_H

#include "hidet_dist/search/elimination.h"

#ifdef __cplusplus
extern "C" {
#endif

enum hidet_dist_capacity_status {
  HIDET_DIST_CAPACITY_FITS = 0,
  HIDET_DIST_CAPACITY_STOPPED = 1,  /* the callback said so */
  HIDET_DIST_CAPACITY_EXCEEDED = 2, /* no plan fits */
  HIDET_DIST_CAPACITY_NO_MEMORY = 3
};

/* Bytes and specs are given by where they begin in `bytes` and `specs`: one for each choice of the entity. */
typedef struct hidet_dist_capacity_problem {
  int64_t entities;
  int64_t points;
  const int64_t *choices;        /* by entity: their number */
  const int64_t *resident;       /* by entity: its resident bytes */
  const int64_t *interval_begin; /* by entity, and the end: which of the next arrays' elements are its live intervals */
  const int64_t *interval_first; /* the first point */
  const int64_t *interval_last; /* the last point */
  const int64_t *interval_bytes; /* what is held then */
  const int64_t *input_begin; /* by entity, and the end: which of the next arrays' elements are its inputs */
  const int64_t *input_producer;
  const int64_t *input_first; /* the first point of the conversion's interval */
  const int64_t *input_last; /* the last one */
  const int64_t *input_produced; /* the specs of the producer's choices */
  const int64_t *input_consumed; /* the specs of the entity's own choices */
  const int64_t *input_rows; /* the number of specs that may be produced */
  const int64_t *input_columns; /* the number of specs that may be required */
  const int64_t *input_held; /* the bytes of each conversion, in row-major order; -1 for none */
  const int64_t *input_working; /* the working bytes; -1 for none, or if another input may have the conversion made */
  const int64_t *bytes;
  const int64_t *specs;
} hidet_dist_capacity_problem;

typedef struct hidet_dist_fitting hidet_dist_fitting;

/* Removes what no plan fits that contains it, in at most `rounds` rounds over all entities, of plans among the choices
 * with kept[e][k], entity after entity, whose resident bytes are from `least` to `most`. Returns NULL if there is none,
 * or it fails, and writes the status. */
HIDET_DIST_API hidet_dist_fitting *hidet_dist_fitting_create(const hidet_dist_capacity_problem *problem,
                                                             const uint8_t *kept, int64_t budget, int64_t least,
                                                             int64_t most, int64_t rounds,
                                                             hidet_dist_elimination_stop stop, int32_t *status);
HIDET_DIST_API void hidet_dist_fitting_destroy(hidet_dist_fitting *fitting);

/* Writes for each choice, entity after entity, whether it is left. */
HIDET_DIST_API void hidet_dist_fitting_kept(const hidet_dist_fitting *fitting, uint8_t *kept);

/* Writes the least and the most resident bytes of plans that fit. */
HIDET_DIST_API void hidet_dist_fitting_resident(const hidet_dist_fitting *fitting, int64_t *ends);

/* Returns for each conversion of an input, in row-major order, whether it is left; NULL if all are. */
HIDET_DIST_API const uint8_t *hidet_dist_fitting_allowed(const hidet_dist_fitting *fitting, int64_t input);

#ifdef __cplusplus
}
#endif

#endif
