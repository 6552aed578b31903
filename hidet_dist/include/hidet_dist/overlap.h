/*
 * Overlap of collectives with computation.
 *
 * A kernel that starts a collective without waiting for it calls hidet_dist_start, the collective, and
 * hidet_dist_started. A later kernel, before the first one that reads the result, calls hidet_dist_wait. A collective
 * is identified by the buffer that it receives in. Nothing else may use this buffer or the sent one in between.
 *
 * The communicator's overlap, a table of functions, implements this: with streams, the collective runs on a separate
 * one. Without such a table, as for transports in host memory, a collective ends before hidet_dist_started returns, and
 * waiting for it does nothing. Collectives end in the order in which they were started.
 */
#ifndef HIDET_DIST_OVERLAP_H
#define HIDET_DIST_OVERLAP_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each function returns 0, or another number after it has recorded the reason by hidet_dist_fail. */
typedef struct hidet_dist_overlap {
  void *context;
  /* Further collectives begin when all earlier launches have ended, and later launches do not wait for them. */
  int32_t (*fork)(void *context);
  /* Ends what fork began; this ticket marks the end of the collectives since then. Tickets increase. */
  int32_t (*mark)(void *context, int64_t ticket);
  /* Further launches begin when the collectives up to this ticket have ended. */
  int32_t (*wait)(void *context, int64_t ticket);
} hidet_dist_overlap;

/* ---- Called by compiled kernels, on the calling thread's current communicator. ---- */

HIDET_DIST_API int32_t hidet_dist_start(const void *recv);
HIDET_DIST_API int32_t hidet_dist_started(const void *recv);

/* Fails the communicator if no collective that receives there was started since the last wait for it. */
HIDET_DIST_API int32_t hidet_dist_wait(const void *recv);

/* ---- Called by the process that launches them. ---- */

/* Sets a communicator's overlap, whose table is copied, or removes it with null. Must not be called during a
 * collective. */
HIDET_DIST_API void hidet_dist_communicator_set_overlap(hidet_dist_communicator *communicator,
                                                        const hidet_dist_overlap *overlap);

/* The number of collectives started on a communicator without waiting, and the number of these waited for since. From
 * the thread that runs them. */
HIDET_DIST_API int64_t hidet_dist_communicator_started(const hidet_dist_communicator *communicator);
HIDET_DIST_API int64_t hidet_dist_communicator_waited(const hidet_dist_communicator *communicator);

#ifdef __cplusplus
}
#endif

#endif
