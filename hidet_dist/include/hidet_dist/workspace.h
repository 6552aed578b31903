/*
 * Memory for what a kernel on the CPU keeps between its loops.
 */
#ifndef HIDET_DIST_WORKSPACE_H
#define HIDET_DIST_WORKSPACE_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Gives `nbytes` of memory, aligned to 64 bytes, to the calling thread until it asks again or ends; null where there is
 * none. Each thread has memory of its own: partitions may be called from several at once.
 */
HIDET_DIST_API void *hidet_dist_workspace(int64_t nbytes);

#ifdef __cplusplus
}
#endif

#endif
