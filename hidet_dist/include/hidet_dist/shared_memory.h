/*
 * A transport for ranks on one host: they exchange data through memory that they share.
 *
 * The transport routes each group of ranks one of two ways: through a shared segment, or to another transport, for
 * groups with ranks that cannot map the same memory. Which way is found out when a group is first used: the transport
 * then calls the process back, which meets the other ranks by its own means and calls hidet_dist_shm_attach or
 * hidet_dist_shm_delegate. All ranks of a group must decide the same.
 *
 * Two ranks that send to each other need no other rank for it. Each rank has an inbox that others map; which way two
 * ranks' messages go is found out the same way when the first one is sent or received, with hidet_dist_shm_attach_peer
 * or hidet_dist_shm_delegate_peer. Ranks meet in the order of the lower rank of the two, then of the higher one.
 *
 * Segments and inboxes are files without a name (memfd_create), which go when the last process that has them goes, however
 * that ends. A rank that waits sleeps in the kernel (futex) after some microseconds; it fails when its time-out has
 * passed, when a process that it waits for has ended, or when one has closed its transport.
 */
#ifndef HIDET_DIST_SHARED_MEMORY_H
#define HIDET_DIST_SHARED_MEMORY_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hidet_dist_shm hidet_dist_shm;

/* Decides how a group communicates, or this rank and another rank of the mesh. Returns 0 once it has, or another number
 * after hidet_dist_fail. */
typedef int32_t (*hidet_dist_shm_connect)(int32_t group_or_rank);

/*
 * The transport of one of `ranks` ranks of a mesh, which hands groups without a segment, and messages from and to ranks
 * without an inbox, to `fallback`, whose table is copied. The fallback's send_recv may be called from another thread
 * than the other functions, but from one at a time. Null for a time-out that is not above 0.
 */
HIDET_DIST_API hidet_dist_shm *hidet_dist_shm_create(const hidet_dist_transport *fallback,
                                                     hidet_dist_shm_connect connect,
                                                     hidet_dist_shm_connect connect_peer, int32_t rank, int32_t ranks,
                                                     double timeout_seconds);

/* The table to make a communicator with. */
HIDET_DIST_API void hidet_dist_shm_table(hidet_dist_shm *transport, hidet_dist_transport *table);

/* A descriptor of a new segment for a group of so many ranks, for one of them to pass on; -1 where there is none. */
HIDET_DIST_API int32_t hidet_dist_shm_segment(int32_t ranks);

/*
 * Routes a group through a segment, in which this rank has the rank `group_rank`. Does not keep the descriptor. Returns
 * HIDET_DIST_INVALID_ARGUMENT for a descriptor of anything but a segment for `ranks` ranks.
 */
HIDET_DIST_API int32_t hidet_dist_shm_attach(hidet_dist_shm *transport, int32_t group, int32_t descriptor,
                                             int32_t group_rank, int32_t ranks);

/* Routes a group to the other transport. A segment that it was attached to is given up. */
HIDET_DIST_API void hidet_dist_shm_delegate(hidet_dist_shm *transport, int32_t group);

/* A descriptor of this rank's inbox, which the transport keeps; -1 where there is none. */
HIDET_DIST_API int32_t hidet_dist_shm_inbox(hidet_dist_shm *transport);

/* Exchanges messages with a rank through inboxes, given a descriptor of its own, which is not kept. Returns
 * HIDET_DIST_INVALID_ARGUMENT for a descriptor of anything but an inbox in a mesh of as many ranks. */
HIDET_DIST_API int32_t hidet_dist_shm_attach_peer(hidet_dist_shm *transport, int32_t rank, int32_t descriptor);

/* Hands messages from and to a rank to the other transport. */
HIDET_DIST_API void hidet_dist_shm_delegate_peer(hidet_dist_shm *transport, int32_t rank);

/* Whether a collective failed because of another rank, through a segment. */
HIDET_DIST_API int32_t hidet_dist_shm_failed_by_peer(const hidet_dist_shm *transport);

/* Fails collectives of other ranks that wait for this one, now and later. From any thread. */
HIDET_DIST_API void hidet_dist_shm_close(hidet_dist_shm *transport);

/* Frees it. No communicator may use it any more. */
HIDET_DIST_API void hidet_dist_shm_destroy(hidet_dist_shm *transport);

#ifdef __cplusplus
}
#endif

#endif
