/*
 * Files that are mapped into memory, such as weights, and what may become of them meanwhile.
 *
 * Another program may write to a mapped file, or make it shorter. Reading a page beyond its new end, or one that the disk
 * does not give, is a bus error (SIGBUS), which ends the process: no check before can rule that out. So this library
 * handles the signal for files that are watched. The page, and all those behind it, become zeros, the file counts as
 * changed from then on, and the thread goes on, whichever it is. What it computes is worth nothing: whoever uses it asks
 * hidet_dist_mapped_file_changed first, once it is computed. Communicators that rely on a file do so before they send.
 *
 * Bus errors elsewhere go to the handler that there was before, or end the process.
 */
#ifndef HIDET_DIST_MAPPED_FILE_H
#define HIDET_DIST_MAPPED_FILE_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hidet_dist_mapped_file hidet_dist_mapped_file;

/*
 * Watches a file that is mapped to `bytes` of `memory`, which begin with a page. The descriptor stays open, and the memory
 * mapped, until it is forgotten. `name` is what to call it in errors; it is copied. Null (see hidet_dist_last_error) where
 * the descriptor is not that of a file.
 */
HIDET_DIST_API hidet_dist_mapped_file *hidet_dist_mapped_file_watch(int32_t descriptor, void *memory, int64_t bytes,
                                                                   const char *name);

/* 1 if its size or the time of its last change are not what they were at first, or a page of it could not be read. From any
 * thread. */
HIDET_DIST_API int32_t hidet_dist_mapped_file_changed(const hidet_dist_mapped_file *file);

/* Ends the watch. Not while anyone relies on it. */
HIDET_DIST_API void hidet_dist_mapped_file_forget(hidet_dist_mapped_file *file);

/* What is sent through the communicator from now on is made of the file: once that was changed, the communicator fails
 * instead of sending. Not while it is in use. Transports to and from CUDA devices, which have copies, do not look. */
HIDET_DIST_API void hidet_dist_communicator_rely_on(hidet_dist_communicator *communicator,
                                                   const hidet_dist_mapped_file *file);

#ifdef __cplusplus
}
#endif

#endif
