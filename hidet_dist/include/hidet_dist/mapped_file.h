/*
 * Files that are mapped into memory, such as weights, and what may become of them meanwhile.
 *
 * Another program may write to a mapped file, or make it shorter. Reading a page beyond its new end, or one that the disk
 * does not give, is a bus error (SIGBUS), which ends the process: no check before can rule that out. So this library
 * handles the signal for files that are watched. The page, and all those behind it, become zeros, the file counts as
 * changed from then on, and the thread goes on, whichever it is. What it computes is worth nothing: whoever uses it asks
 * hidet_dist_mapped_file_change first, once it is computed. Communicators that rely on a file do so before they send.
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

/*
 * What has become of it: 0 for nothing; 1 if its size, the time of its last modification or its inode are not what they
 * were, or a page of it could not be read; 2 if only the time of its last status change is another. That is so after the
 * file was renamed, deleted or given other permissions, but also after it was written to and its old modification time put
 * back: only its content tells. From any thread.
 */
HIDET_DIST_API int32_t hidet_dist_mapped_file_change(const hidet_dist_mapped_file *file);

/* Takes the file's status of now for the known one, if only the time of its last status change is another. The content is
 * to be checked after that. Not while a communicator that relies on it is in use. */
HIDET_DIST_API void hidet_dist_mapped_file_renew(hidet_dist_mapped_file *file);

/* Counts the file as changed from now on: its content is not what it was. */
HIDET_DIST_API void hidet_dist_mapped_file_condemn(hidet_dist_mapped_file *file);

/* Ends the watch. Not while anyone relies on it. */
HIDET_DIST_API void hidet_dist_mapped_file_forget(hidet_dist_mapped_file *file);

/* What is sent through the communicator from now on is made of the file: once that was changed, the communicator fails
 * instead of sending. A status change counts as one unless it also shows in the number of links, the owner or the
 * permissions, as deleting the file does: there is no time to read it. Not while it is in use. Transports to and from CUDA
 * devices, which have copies, do not look. */
HIDET_DIST_API void hidet_dist_communicator_rely_on(hidet_dist_communicator *communicator,
                                                    const hidet_dist_mapped_file *file);

#ifdef __cplusplus
}
#endif

#endif
