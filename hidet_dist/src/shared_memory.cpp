// The transport between ranks of one host: it routes each group through a segment or to a fallback transport, and
// messages with each other rank through inboxes or to the fallback.
#include "hidet_dist/shared_memory.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "blocks.hpp"
#include "communicator.hpp"
#include "exchange.hpp"
#include "mailbox.hpp"
#include "row_exchange.hpp"
#include "segment.hpp"
#include "segment_collectives.hpp"
#include "transport.hpp"

namespace {

using hidet_dist::Blocks;
using hidet_dist::check_files;
using hidet_dist::LocalFailure;
using hidet_dist::Mailbox;
using hidet_dist::Message;
using hidet_dist::OutOfStep;
using hidet_dist::Peer;
using hidet_dist::PeerFailure;
using hidet_dist::Segment;

int64_t size_of(int32_t group) { return hidet_dist::current()->mesh().group_size(group); }

// Contiguous blocks of so many elements, for the ranks of a group.
Blocks behind(const Segment &segment, int64_t count, int32_t dtype) {
  return Blocks::behind(count, dtype, segment.ranks());
}

// The bytes of the parts of a group's ranks, of so many units of elements.
std::vector<int64_t> part_bytes(const Segment &segment, const int64_t *sizes, int64_t unit, int32_t dtype) {
  std::vector<int64_t> bytes(sizes, sizes + segment.ranks());
  for (int64_t &each : bytes) each *= unit * hidet_dist_dtype_size(dtype);
  return bytes;
}

}  // namespace

struct hidet_dist_shm final : hidet_dist::HostTransport {
 public:
  hidet_dist_shm(const hidet_dist_transport &fallback, hidet_dist_shm_connect connect,
                 hidet_dist_shm_connect connect_peer, int32_t rank, int32_t ranks, std::chrono::nanoseconds timeout)
      : HostTransport(timeout),
        fallback_(fallback),
        connect_(connect),
        connect_peer_(connect_peer),
        rank_(rank),
        ranks_(ranks) {}

  int32_t all_reduce(const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, int32_t group) override {
    return run(
        group, [&](Segment &segment) { hidet_dist::all_reduce(segment, send, recv, count, dtype, op); },
        [&] { return fallback_.all_reduce(fallback_.context, send, recv, count, dtype, op, group); });
  }

  int32_t all_gather(const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) override {
    return run(
        group, [&](Segment &segment) { hidet_dist::all_gather(segment, send, recv, behind(segment, count, dtype)); },
        [&] { return fallback_.all_gather(fallback_.context, send, recv, count, dtype, group); });
  }

  int32_t reduce_scatter(const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                         int32_t group) override {
    return run(
        group,
        [&](Segment &segment) {
          hidet_dist::reduce_scatter(segment, send, recv, behind(segment, count, dtype), dtype, op);
        },
        [&] { return fallback_.reduce_scatter(fallback_.context, send, recv, count, dtype, op, group); });
  }

  int32_t all_to_all(const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) override {
    return run(
        group,
        [&](Segment &segment) {
          const Blocks blocks = behind(segment, count, dtype);
          hidet_dist::all_to_all(segment, send, blocks, recv, blocks);
        },
        [&] { return fallback_.all_to_all(fallback_.context, send, recv, count, dtype, group); });
  }

  int32_t all_gather_blocks(const void *send, void *recv, const hidet_dist_blocks *received, int32_t dtype,
                            int32_t group) override {
    return run(
        group, [&](Segment &segment) { hidet_dist::all_gather(segment, send, recv, Blocks::of(*received, dtype)); },
        [&] { return hidet_dist::all_gather_blocks(fallback_, size_of(group), send, recv, received, dtype, group); });
  }

  int32_t reduce_scatter_blocks(const void *send, void *recv, const hidet_dist_blocks *sent, int32_t dtype, int32_t op,
                                int32_t group) override {
    return run(
        group,
        [&](Segment &segment) { hidet_dist::reduce_scatter(segment, send, recv, Blocks::of(*sent, dtype), dtype, op); },
        [&] {
          return hidet_dist::reduce_scatter_blocks(fallback_, size_of(group), send, recv, sent, dtype, op, group);
        });
  }

  int32_t all_to_all_blocks(const void *send, const hidet_dist_blocks *sent, void *recv,
                            const hidet_dist_blocks *received, int32_t dtype, int32_t group) override {
    return run(
        group,
        [&](Segment &segment) {
          const hidet_dist_blocks &known = sent != nullptr ? *sent : *received;
          const Blocks plain = behind(segment, known.rows * known.row, dtype);
          hidet_dist::all_to_all(segment, send, sent != nullptr ? Blocks::of(*sent, dtype) : plain, recv,
                                 received != nullptr ? Blocks::of(*received, dtype) : plain);
        },
        [&] {
          return hidet_dist::all_to_all_blocks(fallback_, size_of(group), send, sent, recv, received, dtype, group);
        });
  }

  int32_t all_gather_parts(const void *send, void *recv, const int64_t *joined, int64_t unit, int32_t dtype,
                           int32_t group) override {
    return run(
        group,
        [&](Segment &segment) {
          hidet_dist::all_gather_parts(segment, send, recv, part_bytes(segment, joined, unit, dtype));
        },
        [&] { return fallback_.all_gather_parts(fallback_.context, send, recv, joined, unit, dtype, group); });
  }

  int32_t reduce_scatter_parts(const void *send, void *recv, const int64_t *split, int64_t unit, int32_t dtype,
                               int32_t op, int32_t group) override {
    return run(
        group,
        [&](Segment &segment) {
          hidet_dist::reduce_scatter_parts(segment, send, recv, part_bytes(segment, split, unit, dtype), dtype, op);
        },
        [&] { return fallback_.reduce_scatter_parts(fallback_.context, send, recv, split, unit, dtype, op, group); });
  }

  int32_t all_to_all_v(const void *send, void *recv, const int64_t *counts, int64_t unit, int32_t dtype,
                       int32_t group) override {
    return run(
        group,
        [&](Segment &segment) {
          const int32_t ranks = segment.ranks(), own = segment.group_rank();
          std::vector<int64_t> received;
          for (int32_t rank = 0; rank < ranks; ++rank) received.push_back(counts[rank * ranks + own]);
          hidet_dist::all_to_all_v(
              segment, send, part_bytes(segment, counts + own * ranks, unit, dtype), recv,
              part_bytes(segment, received.data(), unit, dtype),
              *std::max_element(counts, counts + ranks * ranks) * unit * hidet_dist_dtype_size(dtype));
        },
        [&] { return fallback_.all_to_all_v(fallback_.context, send, recv, counts, unit, dtype, group); });
  }

  int32_t gather_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows, int64_t row, int32_t dtype,
                      int32_t group) override {
    return run(
        group,
        [&](Segment &segment) {
          hidet_dist::gather_rows(segment, {wanted, segment.ranks(), rows}, send, recv,
                                  row * hidet_dist_dtype_size(dtype));
        },
        [&] {
          return hidet_dist::gather_rows(fallback_, {wanted, size_of(group), rows}, hidet_dist_group_rank(group), send,
                                         recv, row, dtype, group);
        });
  }

  int32_t reduce_scatter_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows, int64_t row,
                              int32_t dtype, int32_t group) override {
    return run(
        group,
        [&](Segment &segment) {
          hidet_dist::reduce_scatter_rows(segment, {wanted, segment.ranks(), rows}, send, recv, row, dtype);
        },
        [&] {
          return hidet_dist::reduce_scatter_rows(fallback_, {wanted, size_of(group), rows},
                                                 hidet_dist_group_rank(group), send, recv, row, dtype, group);
        });
  }

  int32_t broadcast(const void *send, void *recv, int64_t count, int32_t dtype, int32_t root, int32_t group) override {
    return run(
        group,
        [&](Segment &segment) {
          hidet_dist::broadcast(segment, send, recv, count * hidet_dist_dtype_size(dtype), root);
        },
        [&] { return fallback_.broadcast(fallback_.context, send, recv, count, dtype, root, group); });
  }

  int32_t send_recv(const void *send, int64_t send_count, int32_t to, void *recv, int64_t recv_count, int32_t from,
                    int32_t dtype) override {
    // Pairs meet in the same order on all ranks, so that those of a ring do not deadlock.
    int32_t first = to;
    int32_t second = from;
    if (pair_with(second) < pair_with(first)) std::swap(first, second);
    for (const int32_t rank : {first, second}) {
      if (rank == HIDET_DIST_NOBODY || peers_.find(rank) != peers_.end()) continue;
      const int32_t status = connect_peer_(rank);
      if (status != HIDET_DIST_OK) return status;
      if (peers_.find(rank) == peers_.end()) {
        fail("the process did not decide how ranks " + std::to_string(rank_) + " and " + std::to_string(rank) +
             " communicate");
        return HIDET_DIST_FAILED;
      }
    }
    const int64_t element = hidet_dist_dtype_size(dtype);
    const Message out{to == HIDET_DIST_NOBODY ? nullptr : peers_[to].get(), send_count * element};
    const Message in{from == HIDET_DIST_NOBODY ? nullptr : peers_[from].get(), recv_count * element};
    const bool sends_here = out.peer != nullptr;
    const bool receives_here = in.peer != nullptr;
    const bool sends_there = to != HIDET_DIST_NOBODY && !sends_here;
    const bool receives_there = from != HIDET_DIST_NOBODY && !receives_here;
    const auto here = [&] {
      return guard(
          [&] { mailbox_->exchange(send, sends_here ? out : Message{}, recv, receives_here ? in : Message{}); });
    };
    const auto there = [&] {
      if (const int32_t status = guard(check_files); status != HIDET_DIST_OK) return status;
      return fallback_.send_recv(fallback_.context, send, sends_there ? send_count : 0,
                                 sends_there ? to : HIDET_DIST_NOBODY, recv, receives_there ? recv_count : 0,
                                 receives_there ? from : HIDET_DIST_NOBODY, dtype);
    };
    if (!sends_there && !receives_there) return here();
    if (!sends_here && !receives_here) return there();
    // Each direction has a thread, because neither may wait for the other.
    int32_t status = HIDET_DIST_FAILED;
    std::thread other([&, communicator = hidet_dist::current()] {
      hidet_dist_bind(communicator);
      status = there();
    });
    const int32_t own_status = here();
    other.join();
    return own_status != HIDET_DIST_OK ? own_status : status;
  }

  // This rank's inbox, which is made on first use.
  int32_t inbox() {
    if (mailbox_ == nullptr) mailbox_ = Mailbox::open(rank_, ranks_, timeout_);
    return mailbox_ == nullptr ? -1 : mailbox_->descriptor();
  }

  int32_t attach_peer(int32_t rank, int32_t descriptor) {
    if (rank < 0 || rank >= ranks_ || rank == rank_ || mailbox_ == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
    auto mapping = hidet_dist::Inbox::map(descriptor, ranks_);
    if (mapping == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
    peers_[rank] = std::make_unique<Peer>(rank, std::move(mapping), ranks_);
    return HIDET_DIST_OK;
  }

  void delegate_peer(int32_t rank) { peers_[rank] = nullptr; }

  int32_t attach(int32_t group, int32_t descriptor, int32_t group_rank, int32_t ranks) {
    auto segment = Segment::attach(descriptor, group_rank, ranks, timeout_);
    if (segment == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
    groups_[group] = std::move(segment);
    return HIDET_DIST_OK;
  }

  void delegate(int32_t group) { groups_[group] = nullptr; }

  void close() {
    for (auto &[group, segment] : groups_) {
      if (segment != nullptr) segment->close();
    }
    if (mailbox_ != nullptr) mailbox_->close(peers_);
  }

 private:
  // Runs a collective by the group's route, which is decided on first use.
  template <typename Shared, typename Other>
  int32_t run(int32_t group, Shared shared, Other other) {
    if (groups_.find(group) == groups_.end()) {
      const int32_t status = connect_(group);
      if (status != HIDET_DIST_OK) return status;
    }
    const auto entry = groups_.find(group);
    if (entry == groups_.end()) {
      fail("the process did not decide how group " + std::to_string(group) + " communicates");
      return HIDET_DIST_FAILED;
    }
    if (entry->second != nullptr) return guard([&] { shared(*entry->second); });
    const int32_t status = guard(check_files);
    return status == HIDET_DIST_OK ? other() : status;
  }

  template <typename Exchange>
  int32_t guard(Exchange exchange) {
    try {
      exchange();
      return HIDET_DIST_OK;
    } catch (const PeerFailure &failure) {
      blame_peer();
      fail(failure.message);
    } catch (const LocalFailure &failure) {
      fail(failure.message);
    } catch (const OutOfStep &) {
    }
    return HIDET_DIST_FAILED;
  }

  std::pair<int32_t, int32_t> pair_with(int32_t rank) const { return {std::min(rank, rank_), std::max(rank, rank_)}; }

  static void fail(const std::string &message) {
    if (auto *communicator = hidet_dist::current(); communicator != nullptr) communicator->fail(message);
  }

  const hidet_dist_transport fallback_;
  const hidet_dist_shm_connect connect_;
  const hidet_dist_shm_connect connect_peer_;
  const int32_t rank_;
  const int32_t ranks_;
  std::map<int32_t, std::unique_ptr<Segment>> groups_;  // by mask; null for groups of the fallback
  std::unique_ptr<Mailbox> mailbox_;
  std::map<int32_t, std::unique_ptr<Peer>> peers_;  // by rank; null for peers of the fallback
};

extern "C" {

hidet_dist_shm *hidet_dist_shm_create(const hidet_dist_transport *fallback, hidet_dist_shm_connect connect,
                                      hidet_dist_shm_connect connect_peer, int32_t rank, int32_t ranks,
                                      double timeout_seconds) {
  if (fallback == nullptr || connect == nullptr || connect_peer == nullptr || !(timeout_seconds > 0)) return nullptr;
  if (rank < 0 || rank >= ranks) return nullptr;
  return new hidet_dist_shm(*fallback, connect, connect_peer, rank, ranks, hidet_dist::from_seconds(timeout_seconds));
}

void hidet_dist_shm_table(hidet_dist_shm *transport, hidet_dist_transport *table) { *table = transport->table(); }

int32_t hidet_dist_shm_segment(int32_t ranks) { return Segment::make(ranks); }

int32_t hidet_dist_shm_attach(hidet_dist_shm *transport, int32_t group, int32_t descriptor, int32_t group_rank,
                              int32_t ranks) {
  return transport->attach(group, descriptor, group_rank, ranks);
}

void hidet_dist_shm_delegate(hidet_dist_shm *transport, int32_t group) { transport->delegate(group); }

int32_t hidet_dist_shm_inbox(hidet_dist_shm *transport) { return transport->inbox(); }

int32_t hidet_dist_shm_attach_peer(hidet_dist_shm *transport, int32_t rank, int32_t descriptor) {
  return transport->attach_peer(rank, descriptor);
}

void hidet_dist_shm_delegate_peer(hidet_dist_shm *transport, int32_t rank) { transport->delegate_peer(rank); }

int32_t hidet_dist_shm_failed_by_peer(const hidet_dist_shm *transport) { return transport->failed_by_peer() ? 1 : 0; }

void hidet_dist_shm_close(hidet_dist_shm *transport) { transport->close(); }

void hidet_dist_shm_destroy(hidet_dist_shm *transport) { delete transport; }

}  // extern "C"
