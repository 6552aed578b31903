/*
 * A transport for ranks with a CUDA device each, through NVIDIA's NCCL.
 *
 * NCCL and the CUDA driver are loaded when they are asked for: this library is built and linked without them. A
 * collective is put on the current CUDA stream and returns; it is not over before hidet_dist_nccl_wait says so. Nothing
 * that a collective does waits for the device, so that it can be captured into a CUDA graph.
 *
 * The mesh has one NCCL communicator, which is split for groups of ranks. Making one takes all ranks of the mesh, at the
 * same point of their programs: hidet_dist_nccl_begin, then hidet_dist_nccl_progress until it is there. A group's is made
 * when the process is called back at the group's first use, unless it was made before, as it must be where a stream is
 * captured. Messages between two ranks go through the mesh's own.
 *
 * After a failure (an error that NCCL reports, a time-out, a failed communicator) all are aborted, so that no kernel of
 * NCCL's stays on the device.
 */
#ifndef HIDET_DIST_NCCL_H
#define HIDET_DIST_NCCL_H

#include "hidet_dist/collectives.h"
#include "hidet_dist/overlap.h"

/* The bytes of what the ranks agree on to make the mesh's communicator. */
#define HIDET_DIST_NCCL_ID_BYTES 128

/* The oldest version of NCCL that will do, encoded as NCCL does: 2.18.0, the first with ncclCommSplit. */
#define HIDET_DIST_NCCL_OLDEST 21800

/* Beside hidet_dist_status: not over yet. */
#define HIDET_DIST_NCCL_IN_PROGRESS 16

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hidet_dist_nccl hidet_dist_nccl;

/* Makes a group's communicator. Returns 0 once it has, or another number after hidet_dist_fail. */
typedef int32_t (*hidet_dist_nccl_connect)(int32_t group);

/* The CUDA stream that the calling thread launches kernels on. */
typedef void *(*hidet_dist_nccl_stream)(void);

/* Loads NCCL and the CUDA driver from these files, once a process. Returns NCCL's version, such as 23203 for 2.32.3, or 0
 * (see hidet_dist_last_error). */
HIDET_DIST_API int32_t hidet_dist_nccl_load(const char *nccl_path, const char *driver_path);

/* The number of CUDA devices, or -1 (see hidet_dist_last_error). */
HIDET_DIST_API int32_t hidet_dist_nccl_device_count(void);

/* Writes the 16 bytes that tell a CUDA device from all others. */
HIDET_DIST_API int32_t hidet_dist_nccl_device_uuid(int32_t device, char *uuid);

/* Makes HIDET_DIST_NCCL_ID_BYTES bytes, for one rank to pass on to all others. */
HIDET_DIST_API int32_t hidet_dist_nccl_unique_id(char *id);

/* The transport of one rank of a mesh on a CUDA device, or null (see hidet_dist_last_error). */
HIDET_DIST_API hidet_dist_nccl *hidet_dist_nccl_create(const int64_t *mesh_shape, int32_t mesh_axes, int64_t rank,
                                                       int32_t device, hidet_dist_nccl_stream stream,
                                                       hidet_dist_nccl_connect connect, double timeout_seconds);

/* The table to make a communicator with. */
HIDET_DIST_API void hidet_dist_nccl_table(hidet_dist_nccl *transport, hidet_dist_transport *table);

/* The overlap to give a communicator of this transport: collectives that are only started go to a CUDA stream of their
 * own, by events, so that a CUDA graph captures them too. They must all be waited for before a capture ends, and before
 * hidet_dist_nccl_wait. */
HIDET_DIST_API void hidet_dist_nccl_overlap(hidet_dist_nccl *transport, hidet_dist_overlap *overlap);

/* Whether a group's communicator is there. Groups of the same ranks share one. */
HIDET_DIST_API int32_t hidet_dist_nccl_has(const hidet_dist_nccl *transport, int32_t group);

/* Says on the current communicator that its rank waits for all others of the mesh, until its next collective or wait is
 * over. Those that make a communicator do. */
HIDET_DIST_API void hidet_dist_nccl_await(const hidet_dist_nccl *transport);

/* Begins to make the communicator of the mesh, given its id, or of a group, by splitting that of the mesh; then `id` is
 * null. One at a time. */
HIDET_DIST_API int32_t hidet_dist_nccl_begin(hidet_dist_nccl *transport, int32_t group, const char *id);

/* How that stands: HIDET_DIST_OK, HIDET_DIST_NCCL_IN_PROGRESS, or another number after hidet_dist_fail. */
HIDET_DIST_API int32_t hidet_dist_nccl_progress(hidet_dist_nccl *transport);

/* Has the ranks of a group exchange a few bytes, so that NCCL sets up now what it needs for that. */
HIDET_DIST_API int32_t hidet_dist_nccl_warm_up(hidet_dist_nccl *transport, int32_t group);

/* The stream that it does so on, to wait for. */
HIDET_DIST_API void *hidet_dist_nccl_internal_stream(const hidet_dist_nccl *transport);

/*
 * Waits until all work on a stream is over, or `seconds` have passed: HIDET_DIST_OK, HIDET_DIST_NCCL_IN_PROGRESS, or
 * another number after hidet_dist_fail, and all communicators are aborted then: after the transport's time-out since the
 * first of successive calls, when NCCL reports an error, or when the current communicator has failed. The stream must not
 * be captured.
 */
HIDET_DIST_API int32_t hidet_dist_nccl_wait(hidet_dist_nccl *transport, void *stream, double seconds);

/* Whether something failed because of another rank, as far as NCCL can tell. */
HIDET_DIST_API int32_t hidet_dist_nccl_failed_by_peer(const hidet_dist_nccl *transport);

/* Frees NCCL's communicators, or aborts them after a failure or where they are not to be freed within seconds. */
HIDET_DIST_API void hidet_dist_nccl_close(hidet_dist_nccl *transport);

/* Frees it. No communicator may use it any more. */
HIDET_DIST_API void hidet_dist_nccl_destroy(hidet_dist_nccl *transport);

#ifdef __cplusplus
}
#endif

#endif
