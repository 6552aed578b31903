#include "segment.hpp"

#include <unistd.h>

#include <string>
#include <utility>

#include "communicator.hpp"
#include "exchange.hpp"

namespace {

constexpr uint64_t kMagic = 0x686964646973746e;

}  // namespace

namespace hidet_dist {

FileHeader Segment::header(int32_t ranks) { return {kMagic, kSlotBytes, ranks}; }

size_t Segment::header_bytes(int32_t ranks) { return whole_pages(kLine + static_cast<size_t>(ranks) * sizeof(Member)); }

size_t Segment::file_bytes(int32_t ranks) {
  return header_bytes(ranks) + static_cast<size_t>(ranks) * kSlots * kSlotBytes;
}

int Segment::make(int32_t ranks) { return ranks < 2 ? -1 : new_file(header(ranks), file_bytes(ranks)); }

std::unique_ptr<Segment> Segment::attach(int descriptor, int32_t group_rank, int32_t ranks,
                                         std::chrono::nanoseconds timeout) {
  if (ranks < 2 || group_rank < 0 || group_rank >= ranks) return nullptr;
  auto mapping = Mapping::of(descriptor, header(ranks), file_bytes(ranks));
  if (mapping == nullptr) return nullptr;
  return std::make_unique<Segment>(std::move(mapping), group_rank, ranks, timeout);
}

Segment::Segment(std::shared_ptr<Mapping> mapping, int32_t group_rank, int32_t ranks, std::chrono::nanoseconds timeout)
    : mapping_(std::move(mapping)),
      memory_(mapping_->memory()),
      group_rank_(group_rank),
      ranks_(ranks),
      timeout_(timeout),
      patience_(ranks) {
  member(group_rank).process.store(getpid(), std::memory_order_release);
}

void Segment::close() {
  Member &self = member(group_rank_);
  self.closed.store(1, std::memory_order_seq_cst);
  wake_all(&self.written);
}

char *Segment::begin_turn() {
  if (processes_.empty()) watch_processes();
  ++turn_;
  member(group_rank_).envelopes[turn_ % kSlots] = own_envelope();
  return slot(group_rank_);
}

void Segment::exchange() {
  check_files();
  ++pieces_;
  advance(&member(group_rank_).written, pieces_);
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    if (rank != group_rank_) wait(rank, pieces_);
  }
  const hidet_dist_envelope &ours = member(group_rank_).envelopes[turn_ % kSlots];
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    const hidet_dist_envelope &theirs = member(rank).envelopes[turn_ % kSlots];
    if (!equal(ours, theirs)) check_envelope(theirs, current()->mesh_rank(rank));
  }
}

char *Segment::slot(int32_t rank) {
  const size_t number = static_cast<size_t>(rank) * kSlots + turn_ % kSlots;
  return memory_ + header_bytes(ranks_) + number * kSlotBytes;
}

void Segment::watch_processes() {
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    processes_.emplace_back(member(rank).process.load(std::memory_order_acquire));
  }
}

void Segment::wait(int32_t rank, uint32_t value) {
  Counter &counter = member(rank).written;
  if (patience_.look([&] { return reached(counter, value); })) return;
  ActiveTime waited;
  counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
  std::string failure;
  while (failure.empty()) {
    const uint32_t now = counter.value.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(now - value) >= 0) break;
    patience_.sleep(&counter, now);
    const std::string who = "group rank " + std::to_string(rank) + " of the group of " + std::to_string(ranks_);
    failure = why_not(who, member(rank).closed, processes_[static_cast<size_t>(rank)], &waited, timeout_);
  }
  counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  // A rank may have finished its part and ended since.
  if (!failure.empty() && !reached(counter, value)) throw PeerFailure{failure};
}

}  // namespace hidet_dist
