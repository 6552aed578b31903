/*
 * A transport for ranks on one host: they exchange data through memory that they share.
 *
 * The transport routes each group of ranks either through a shared segment, or to a fallback transport if its ranks
 * cannot map the same memory. The route is decided when a group is first used: the transport calls a callback, which
 * meets the other ranks by other means and calls hidet_dist_shm_attach or hidet_dist_shm_delegate. All ranks of a group
 * must decide the same.
 *
 * Messages between two ranks need no other rank. Each rank has an inbox that others map. The route of two ranks'
 * messages is decided in the same way when the first one is sent or received, by hidet_dist_shm_attach_peer or
 * hidet_dist_shm_delegate_peer. Pairs meet in the order of their lower rank, then of the higher one.
 *
 * Segments and inboxes are unnamed files (memfd_create), which disappear with the last process that has them open. A
 * waiting rank sleeps in the kernel (futex) after some microseconds. It fails when its time-out has passed, when a
 * process that it waits for has ended, or when such a process has closed its transport.
 */
#ifndef HIDET_DIST_SHARED_MEMORY_H
#define HIDET_DIST_SHARED_MEMORY_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hidet_dist_shm hidet_dist_shm;

/* Decides the route of a group, or of messages with another rank of the mesh. Returns 0, or another number after
 * hidet_dist_fail. */
typedef int32_t (*hidet_dist_shm_connect)(int32_t group_or_rank);

/*
 * The transport of one of `ranks` ranks of a mesh. Groups without a segment, and messages with ranks without an inbox,
 * are routed to `fallback`, whose table is copied. The fallback's send_recv may be called from a different thread than
 * its other functions, but from one at a time. Null for a time-out that is not above 0.
 */
HIDET_DIST_API hidet_dist_shm *hidet_dist_shm_create(const hidet_dist_transport *fallback,
                                                     hidet_dist_shm_connect connect,
                                                     hidet_dist_shm_connect connect_peer, int32_t rank, int32_t ranks,
                                                     double timeout_seconds);

/* The table to make a communicator with. */
HIDET_DIST_API void hidet_dist_shm_table(hidet_dist_shm *transport, hidet_dist_transport *table);

/* Makes a segment for a group of `ranks` ranks, and returns its descriptor, which one of them passes to the others; -1
 * on failure. */
HIDET_DIST_API int32_t hidet_dist_shm_segment(int32_t ranks);

/*
 * Routes a group through a segment, in which this rank is `group_rank`. Does not keep the descriptor. Returns
 * HIDET_DIST_INVALID_ARGUMENT for a descriptor of anything but a segment for `ranks` ranks.
 */
HIDET_DIST_API int32_t hidet_dist_shm_attach(hidet_dist_shm *transport, int32_t group, int32_t descriptor,
                                             int32_t group_rank, int32_t ranks);

/* Routes a group to the fallback. A segment that it was attached to is released. */
HIDET_DIST_API void hidet_dist_shm_delegate(hidet_dist_shm *transport, int32_t group);

/* The descriptor of this rank's inbox, which the transport keeps open; -1 on failure. */
HIDET_DIST_API int32_t hidet_dist_shm_inbox(hidet_dist_shm *transport);

/* Routes messages with a rank through inboxes, given the descriptor of that rank's inbox, which is not kept. Returns
 * HIDET_DIST_INVALID_ARGUMENT for a descriptor of anything but an inbox in a mesh of as many ranks. */
HIDET_DIST_API int32_t hidet_dist_shm_attach_peer(hidet_dist_shm *transport, int32_t rank, int32_t descriptor);

/* Routes messages with a rank to the fallback. */
HIDET_DIST_API void hidet_dist_shm_delegate_peer(hidet_dist_shm *transport, int32_t rank);

/* Whether a collective failed because of another rank, through a segment. */
HIDET_DIST_API int32_t hidet_dist_shm_failed_by_peer(const hidet_dist_shm *transport);

/* Makes collectives of other ranks fail that wait for this one, now and later. From any thread. */
HIDET_DIST_API void hidet_dist_shm_close(hidet_dist_shm *transport);

/* Frees the transport, which no communicator may use any more. */
HIDET_DIST_API void hidet_dist_shm_destroy(hidet_dist_shm *transport);

#ifdef __cplusplus
}
#endif

#endif
