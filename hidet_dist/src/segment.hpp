// The memory that the ranks of a group share. Each rank owns two slots of the group's segment, which it fills in turns:
// it writes a piece of its data into one, announces it, waits until the others have written theirs, and reads what it
// needs. When all have written in a turn, all have finished reading the slots of the turn before, which can therefore
// be written again in the next turn.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hidet_dist/collectives.h"
#include "shared_file.hpp"
#include "waiting.hpp"

namespace hidet_dist {

// One rank's view of a group's segment.
class Segment {
 public:
  static constexpr int64_t kSlotBytes = 256 * 1024;  // large against the cost of a hand-over, small against caches

  // Makes a segment for a group of so many ranks, and returns its descriptor, or -1.
  static int make(int32_t ranks);

  // Opens the segment of a descriptor, in which this rank is `group_rank`; null if it is not such a segment.
  static std::unique_ptr<Segment> attach(int descriptor, int32_t group_rank, int32_t ranks,
                                         std::chrono::nanoseconds timeout);

  Segment(std::shared_ptr<Mapping> mapping, int32_t group_rank, int32_t ranks, std::chrono::nanoseconds timeout);
  Segment(const Segment &) = delete;
  Segment &operator=(const Segment &) = delete;
  ~Segment() { close(); }

  int32_t ranks() const { return ranks_; }
  int32_t group_rank() const { return group_rank_; }

  // Makes ranks fail that wait for this one, now and later.
  void close();

  // This rank's slot for the next turn.
  char *begin_turn();

  // Announces that this rank has written its slot, and waits for all others. Throws the errors of exchange.hpp; if a
  // rank is in a different collective, all of them detect it. May be called several times a turn.
  void exchange();

  // The slot of a rank in this turn.
  char *slot(int32_t rank);

 private:
  static constexpr int kSlots = 2;

  struct Member {
    Counter written;  // how often this rank has announced a slot
    std::atomic<int32_t> process;
    std::atomic<uint32_t> closed;
    hidet_dist_envelope envelopes[kSlots];  // of the data in each slot
  };
  static_assert(sizeof(Member) == 2 * kLine, "the envelopes are to be in one line");

  static FileHeader header(int32_t ranks);
  static size_t header_bytes(int32_t ranks);
  static size_t file_bytes(int32_t ranks);

  Member &member(int32_t rank) { return reinterpret_cast<Member *>(memory_ + kLine)[rank]; }
  void watch_processes();
  void wait(int32_t rank, uint32_t value);

  const std::shared_ptr<Mapping> mapping_;
  char *const memory_;
  const int32_t group_rank_;
  const int32_t ranks_;
  const std::chrono::nanoseconds timeout_;
  Patience patience_;
  uint32_t turn_ = 0;
  uint32_t pieces_ = 0;
  std::vector<Process> processes_;
};

}  // namespace hidet_dist
