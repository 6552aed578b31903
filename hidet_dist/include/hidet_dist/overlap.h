/*
 * Collectives beside computation.
 *
 * A kernel that only starts a collective calls hidet_dist_start, the collective, and hidet_dist_started; another one, in
 * front of the first that reads the result, calls hidet_dist_wait. A collective is named by the buffer that it receives
 * in, which nothing else may use in between, no more than the one that it sends.
 *
 * What that means is up to the communicator's overlap, a table of functions: with streams, the collective is put on one
 * of its own. Without such a table a collective is over when it was started, and waiting for it does nothing; so it is
 * for transports in host memory. Collectives end in the order in which they were started.
 */
#ifndef HIDET_DIST_OVERLAP_H
#define HIDET_DIST_OVERLAP_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each function returns 0, or another number after it has said why with hidet_dist_fail. */
typedef struct hidet_dist_overlap {
  void *context;
  /* Collectives from here on begin when what was launched before has ended, and nothing waits for them. */
  int32_t (*fork)(void *context);
  /* No more of them; those since fork end with this ticket. Tickets go up. */
  int32_t (*mark)(void *context, int64_t ticket);
  /* What is launched from here on begins when the collectives up to this ticket have ended. */
  int32_t (*wait)(void *context, int64_t ticket);
} hidet_dist_overlap;

/* ---- Called by compiled kernels, on the calling thread's current communicator. ---- */

HIDET_DIST_API int32_t hidet_dist_start(const void *recv);
HIDET_DIST_API int32_t hidet_dist_started(const void *recv);

/* Fails the communicator where nothing that is received there was started since it was last waited for. */
HIDET_DIST_API int32_t hidet_dist_wait(const void *recv);

/* ---- Called by the process that launches them. ---- */

/* Gives a communicator an overlap, whose table is copied, or with null none. No collective may be under way. */
HIDET_DIST_API void hidet_dist_communicator_set_overlap(hidet_dist_communicator *communicator,
                                                        const hidet_dist_overlap *overlap);

/* How many collectives were started in this way on it, and how many of these were waited for. From the thread that runs
 * them. */
HIDET_DIST_API int64_t hidet_dist_communicator_started(const hidet_dist_communicator *communicator);
HIDET_DIST_API int64_t hidet_dist_communicator_waited(const hidet_dist_communicator *communicator);

#ifdef __cplusplus
}
#endif

#endif
