/*
 * Optional records of the begin and end of each kernel, by the host's clock or by events of a CUDA stream, for the
 * library that launches a whole graph.
 *
 * The launch function calls hidet_dist_mark before and after the kernel of each node. Without a recording, that is a
 * load and a branch. The host's clock is the one that Python's time.perf_counter_ns reads on Linux.
 */
#ifndef HIDET_DIST_LAUNCH_H
#define HIDET_DIST_LAUNCH_H

#include <stdint.h>
#include <time.h>

/* The recorded times, in nanoseconds of CLOCK_MONOTONIC: two for each node, in execution order; or null. */
static int64_t *hidet_dist_times;

/* Records into `times` from the next launch on; null ends the recording. Must not be called while the graph runs. */
extern "C" __attribute__((visibility("default"))) void hidet_dist_record(int64_t *times) { hidet_dist_times = times; }

/* The function cuEventRecord, two events for each node in execution order, and the stream of the records; or null. */
static int (*hidet_dist_record_event)(void *event, void *stream);
static void **hidet_dist_events;
static void *hidet_dist_stream;

/* Records events from the next launch on; null ends the recording. Must not be called while the graph runs. */
extern "C" __attribute__((visibility("default"))) void hidet_dist_record_events(int (*record)(void *event,
                                                                                              void *stream),
                                                                                void **events, void *stream) {
  hidet_dist_record_event = record;
  hidet_dist_events = events;
  hidet_dist_stream = stream;
}

static inline void hidet_dist_mark(int64_t place) {
  if (__builtin_expect(hidet_dist_record_event != nullptr, 0)) {
    hidet_dist_record_event(hidet_dist_events[place], hidet_dist_stream);
  }
  if (__builtin_expect(hidet_dist_times != nullptr, 0)) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    hidet_dist_times[place] = static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
  }
}

#endif
