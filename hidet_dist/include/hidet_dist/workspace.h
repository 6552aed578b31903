/*
 * Memory for intermediate values of CPU kernels.
 */
#ifndef HIDET_DIST_WORKSPACE_H
#define HIDET_DIST_WORKSPACE_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Returns `nbytes` of memory, aligned to 64 bytes, which the calling thread may use until its next call or its end;
 * null on failure. Each thread has separate memory, so that partitions may be called from several threads at once.
 */
HIDET_DIST_API void *hidet_dist_workspace(int64_t nbytes);

#ifdef __cplusplus
}
#endif

#endif
