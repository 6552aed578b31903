/*
 * Included by the library that launches a whole graph: when each of its kernels began and ended, if asked for.
 *
 * The launch function calls hidet_dist_mark before and after the kernel of each node. While nobody records, that is a
 * load and a branch; the times themselves come from the clock that Python's time.perf_counter_ns reads on Linux.
 */
#ifndef HIDET_DIST_LAUNCH_H
#define HIDET_DIST_LAUNCH_H

#include <stdint.h>
#include <time.h>

/* Where the times go, in nanoseconds of CLOCK_MONOTONIC: two for each node, in execution order; or null. */
static int64_t *hidet_dist_times;

/* Records into `times` from the next launch on; null ends that. Not while the graph runs. */
extern "C" __attribute__((visibility("default"))) void hidet_dist_record(int64_t *times) { hidet_dist_times = times; }

static inline void hidet_dist_mark(int64_t place) {
  if (__builtin_expect(hidet_dist_times != nullptr, 0)) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    hidet_dist_times[place] = static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
  }
}

#endif
