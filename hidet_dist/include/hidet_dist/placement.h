/*
 * The placement of buffers in a workspace: each goes into the first free range that is large enough (first fit; D. E.
 * Knuth, The Art of Computer Programming, volume 1, section 2.5), and ranges that are freed merge with their neighbours.
 *
 * hidet's own planner does the same (hidet 0.6.1, memory_planner.h) with lists and maps of the C++ library, whose headers
 * take most of the time in which a launcher compiles.
 */
#ifndef HIDET_DIST_PLACEMENT_H
#define HIDET_DIST_PLACEMENT_H

#include <stdint.h>

namespace {

constexpr int64_t kBufferAlignment = 128; /* bytes */

/* Rounds the bytes of a buffer up to those of whole aligned units. */
inline int64_t aligned(int64_t nbytes) { return (nbytes + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment; }

/* The free ranges of a workspace in which at most `kMost` buffers lie at a time. */
template <int kMost>
class Placement {
 public:
  /* Frees everything. */
  void clear() {
    count_ = 1;
    free_[0].begin = 0;
    free_[0].end = INT64_MAX;
  }

  /* Places a buffer; returns its offset in bytes, 0 for an empty one, which takes no room. */
  int64_t place(int64_t nbytes) {
    if (nbytes == 0) return 0;
    const int64_t size = aligned(nbytes);
    int at = 0;
    while (free_[at].end - free_[at].begin < size) ++at; /* the last range has no end */
    const int64_t begin = free_[at].begin;
    free_[at].begin += size;
    if (free_[at].begin == free_[at].end) remove(at);
    return begin;
  }

  /* Frees the range of a buffer of `nbytes` at the offset `begin`. */
  void free(int64_t begin, int64_t nbytes) {
    if (nbytes == 0) return;
    const int64_t end = begin + aligned(nbytes);
    int next = 0; /* the first free range behind the buffer */
    while (free_[next].begin < end) ++next;
    const bool joins_previous = next > 0 && free_[next - 1].end == begin;
    if (free_[next].begin == end) {
      free_[next].begin = joins_previous ? free_[next - 1].begin : begin;
      if (joins_previous) remove(next - 1);
    } else if (joins_previous) {
      free_[next - 1].end = end;
    } else {
      for (int i = count_; i > next; --i) free_[i] = free_[i - 1];
      ++count_;
      free_[next].begin = begin;
      free_[next].end = end;
    }
  }

  /* Returns the end of the last buffer in bytes. */
  int64_t used() const { return free_[count_ - 1].begin; }

 private:
  struct Range {
    int64_t begin, end;
  };

  void remove(int at) {
    --count_;
    for (int i = at; i < count_; ++i) free_[i] = free_[i + 1];
  }

  Range free_[kMost + 1]; /* in ascending order; there is a buffer between each two */
  int count_;
};

}  // namespace

#endif
