/*
 * A transport for ranks with a CUDA device each, through NVIDIA's NCCL.
 *
 * NCCL and the CUDA driver are loaded on request: this library is built and linked without them. A collective is
 * enqueued on the current CUDA stream and returns; hidet_dist_nccl_wait waits for its end. A collective never waits for
 * the device, so it can be captured into a CUDA graph.
 *
 * The mesh has one NCCL communicator, which is split for groups of ranks. All ranks of the mesh must make a
 * communicator at the same program point: by hidet_dist_nccl_begin, then hidet_dist_nccl_progress until it is complete.
 * A group's communicator is made by a callback at the group's first use, unless it exists; it must exist before a
 * stream is captured. Messages between two ranks use the mesh's communicator.
 *
 * After a failure (an error that NCCL reports, a time-out, a failed communicator) all are aborted, so that no kernel of
 * NCCL remains on the device.
 */
#ifndef HIDET_DIST_NCCL_H
#define HIDET_DIST_NCCL_H

#include "hidet_dist/collectives.h"
#include "hidet_dist/overlap.h"

/* The bytes of the identifier with which the ranks make the mesh's communicator. */
#define HIDET_DIST_NCCL_ID_BYTES 128

/* The oldest supported version of NCCL, encoded as NCCL does: 2.18.0, the first with ncclCommSplit. */
#define HIDET_DIST_NCCL_OLDEST 21800

/* A status beside those of hidet_dist_status: still in progress. */
#define HIDET_DIST_NCCL_IN_PROGRESS 16

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hidet_dist_nccl hidet_dist_nccl;

/* Makes a group's communicator. Returns 0, or another number after hidet_dist_fail. */
typedef int32_t (*hidet_dist_nccl_connect)(int32_t group);

/* Returns the CUDA stream on which the calling thread launches kernels. */
typedef void *(*hidet_dist_nccl_stream)(void);

/* Waits for the work on that stream, as by hidet_dist_nccl_wait. Returns 0 on success. */
typedef int32_t (*hidet_dist_nccl_settle)(void);

/* Loads NCCL and the CUDA driver from these files, once per process. Returns NCCL's version, such as 23203 for 2.32.3,
 * or 0 (see hidet_dist_last_error). */
HIDET_DIST_API int32_t hidet_dist_nccl_load(const char *nccl_path, const char *driver_path);

/* The number of CUDA devices, or -1 (see hidet_dist_last_error). */
HIDET_DIST_API int32_t hidet_dist_nccl_device_count(void);

/* Writes the 16 bytes of a CUDA device's UUID. */
HIDET_DIST_API int32_t hidet_dist_nccl_device_uuid(int32_t device, char *uuid);

/* Writes an identifier of HIDET_DIST_NCCL_ID_BYTES bytes, which one rank makes and passes to all others. */
HIDET_DIST_API int32_t hidet_dist_nccl_unique_id(char *id);

/* The transport of one rank of a mesh on a CUDA device, or null (see hidet_dist_last_error). */
HIDET_DIST_API hidet_dist_nccl *hidet_dist_nccl_create(const int64_t *mesh_shape, int32_t mesh_axes, int64_t rank,
                                                       int32_t device, hidet_dist_nccl_stream stream,
                                                       hidet_dist_nccl_connect connect, hidet_dist_nccl_settle settle,
                                                       double timeout_seconds);

/* The table to make a communicator with. */
HIDET_DIST_API void hidet_dist_nccl_table(hidet_dist_nccl *transport, hidet_dist_transport *table);

/* The overlap for a communicator of this transport: started collectives run on a separate CUDA stream, ordered by
 * events, so that a CUDA graph captures them too. All must be waited for before a capture ends, and before
 * hidet_dist_nccl_wait. */
HIDET_DIST_API void hidet_dist_nccl_overlap(hidet_dist_nccl *transport, hidet_dist_overlap *overlap);

/* Whether a group's communicator exists. Groups of the same ranks share one. */
HIDET_DIST_API int32_t hidet_dist_nccl_has(const hidet_dist_nccl *transport, int32_t group);

/* Records on the current communicator that its rank waits for all others of the mesh, until its next collective or wait
 * is over. Ranks that make a communicator call this. */
HIDET_DIST_API void hidet_dist_nccl_await(const hidet_dist_nccl *transport);

/* Begins to make the communicator of the mesh, given its id, or of a group, by splitting that of the mesh; then `id` is
 * null. One at a time. */
HIDET_DIST_API int32_t hidet_dist_nccl_begin(hidet_dist_nccl *transport, int32_t group, const char *id);

/* The state of the communicator in the making: HIDET_DIST_OK, HIDET_DIST_NCCL_IN_PROGRESS, or another number after
 * hidet_dist_fail. */
HIDET_DIST_API int32_t hidet_dist_nccl_progress(hidet_dist_nccl *transport);

/*
 * Begins a group of messages: what this thread sends and receives until its end is one operation of NCCL, whose messages
 * proceed at the same time and in any order. Nothing is enqueued before the end. The mesh's communicator must exist, and
 * all messages must be on one stream. Both return a hidet_dist_status, and the end must be called after a begin that
 * succeeded, also when a message failed.
 */
HIDET_DIST_API int32_t hidet_dist_nccl_group_begin(hidet_dist_nccl *transport);
HIDET_DIST_API int32_t hidet_dist_nccl_group_end(hidet_dist_nccl *transport);

/* Exchanges a few bytes among the ranks of a group, so that NCCL sets up its connections now. */
HIDET_DIST_API int32_t hidet_dist_nccl_warm_up(hidet_dist_nccl *transport, int32_t group);

/* The stream on which hidet_dist_nccl_warm_up exchanges bytes. */
HIDET_DIST_API void *hidet_dist_nccl_internal_stream(const hidet_dist_nccl *transport);

/*
 * Waits until all work on a stream is over, or `seconds` have passed: HIDET_DIST_OK, HIDET_DIST_NCCL_IN_PROGRESS, or
 * another number after hidet_dist_fail. It fails, and aborts all communicators, after the transport's time-out since
 * the first of successive calls, when NCCL reports an error, or when the current communicator has failed. The stream
 * must not be in capture.
 */
HIDET_DIST_API int32_t hidet_dist_nccl_wait(hidet_dist_nccl *transport, void *stream, double seconds);

/* The same for the work before an event, while later work of its stream may be pending. */
HIDET_DIST_API int32_t hidet_dist_nccl_wait_event(hidet_dist_nccl *transport, void *event, double seconds);

/* Whether a failure was caused by another rank, as far as NCCL can tell. */
HIDET_DIST_API int32_t hidet_dist_nccl_failed_by_peer(const hidet_dist_nccl *transport);

/* Frees NCCL's communicators, or aborts them after a failure or if they cannot be freed within seconds. */
HIDET_DIST_API void hidet_dist_nccl_close(hidet_dist_nccl *transport);

/* Frees the transport, which no communicator may use any more. */
HIDET_DIST_API void hidet_dist_nccl_destroy(hidet_dist_nccl *transport);

#ifdef __cplusplus
}
#endif

#endif
