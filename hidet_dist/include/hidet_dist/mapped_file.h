/*
 * Watches over files that are mapped into memory, such as weights.
 *
 * Another program may write to a mapped file, or truncate it. Reading a page beyond its new end, or one that the disk
 * fails to read, is a bus error (SIGBUS), which ends the process; no check beforehand can rule that out. So this
 * library handles the signal for watched files, in any thread: the page and all pages behind it are replaced by zeros,
 * the file counts as changed from then on, and the thread continues. Its results are invalid. Users of results must
 * therefore call hidet_dist_mapped_file_change after computing them. Communicators that rely on a file do so before
 * they send.
 *
 * Bus errors elsewhere are passed to the earlier handler, or end the process.
 */
#ifndef HIDET_DIST_MAPPED_FILE_H
#define HIDET_DIST_MAPPED_FILE_H

#include "hidet_dist/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hidet_dist_mapped_file hidet_dist_mapped_file;

/*
 * Watches a file that is mapped to `bytes` of `memory`, which begins at a page. The descriptor must stay open, and the
 * memory mapped, until the watch ends. `name` is the file's name in errors; it is copied. Returns null (see
 * hidet_dist_last_error) if the descriptor is not that of a file.
 */
HIDET_DIST_API hidet_dist_mapped_file *hidet_dist_mapped_file_watch(int32_t descriptor, void *memory, int64_t bytes,
                                                                    const char *name);

/*
 * Returns the change of a watched file: 0 for none; 1 if its size, the time of its last modification or its inode has
 * changed, or if a page of it could not be read; 2 if only the time of its last status change has changed. The latter
 * happens when the file is renamed or deleted or its permissions change, but also when it is written to and its
 * modification time is reset: only its content tells these apart. From any thread.
 */
HIDET_DIST_API int32_t hidet_dist_mapped_file_change(const hidet_dist_mapped_file *file);

/* Accepts the file's present status as the reference, if only the time of its last status change has changed. The
 * caller must then check the content. Must not be called while a communicator that relies on the file is in use. */
HIDET_DIST_API void hidet_dist_mapped_file_renew(hidet_dist_mapped_file *file);

/* Counts the file as changed from now on, because its content differs. */
HIDET_DIST_API void hidet_dist_mapped_file_condemn(hidet_dist_mapped_file *file);

/* Ends the watch. Must not be called while a communicator relies on it. */
HIDET_DIST_API void hidet_dist_mapped_file_forget(hidet_dist_mapped_file *file);

/* Declares that data sent through the communicator depends on the file: once the file has changed, the communicator
 * fails instead of sending. A status change counts as a change, because there is no time to read the content, unless
 * the number of links, the owner or the permissions have changed too, as when the file is deleted. Must not be called
 * while the communicator is in use. Transports of CUDA devices, which have copies of the data, do not check files. */
HIDET_DIST_API void hidet_dist_communicator_rely_on(hidet_dist_communicator *communicator,
                                                    const hidet_dist_mapped_file *file);

#ifdef __cplusplus
}
#endif

#endif
