/*
 * A transport for ranks on one host: they exchange data through memory that they share.
 *
 * The transport routes each group of ranks one of two ways: through a shared segment, or to another transport, for
 * groups with ranks that cannot map the same memory. Which way is found out when a group is first used: the transport
 * then calls the process back, which meets the other ranks by its own means and calls hidet_dist_shm_attach or
 * hidet_dist_shm_delegate. All ranks of a group must decide the same.
 *
 * A segment is a file without a name (memfd_create): it goes when the last process that has it goes, however that ends.
 * A rank that waits sleeps in the kernel (futex) after some microseconds; it fails when its time-out has passed, when a
 * process of the group has ended, or when one has closed its transport.
 */
#ifndef HIDET_DIST_SHARED_MEMORY_H
#define HIDET_DIST_SHARED_MEMORY_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hidet_dist_shm hidet_dist_shm;

/* Decides how a group communicates. Returns 0 once it has, or another number after hidet_dist_fail. */
typedef int32_t (*hidet_dist_shm_connect)(int32_t group);

/* A transport that hands groups without a segment to `fallback`, whose table is copied. Null for a time-out that is not
 * above 0. */
HIDET_DIST_API hidet_dist_shm *hidet_dist_shm_create(const hidet_dist_transport *fallback,
                                                     hidet_dist_shm_connect connect, double timeout_seconds);

/* The table to make a communicator with. */
HIDET_DIST_API void hidet_dist_shm_table(hidet_dist_shm *transport, hidet_dist_transport *table);

/* A descriptor of a new segment for a group of so many ranks, for one of them to pass on; -1 where there is none. */
HIDET_DIST_API int32_t hidet_dist_shm_segment(int32_t ranks);

/*
 * Routes a group through a segment, of which this rank is the `place`-th. Does not keep the descriptor. Returns
 * HIDET_DIST_INVALID_ARGUMENT for a descriptor of anything but a segment for `ranks` ranks.
 */
HIDET_DIST_API int32_t hidet_dist_shm_attach(hidet_dist_shm *transport, int32_t group, int32_t descriptor,
                                             int32_t place, int32_t ranks);

/* Routes a group to the other transport. A segment that it was attached to is given up. */
HIDET_DIST_API void hidet_dist_shm_delegate(hidet_dist_shm *transport, int32_t group);

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
