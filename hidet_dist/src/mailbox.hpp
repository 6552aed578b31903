// Messages between two ranks of one host, for which no other rank may be needed: each rank owns an inbox, with a channel
// for each rank that sends to it. A rank that waits, to receive or for room in another's inbox, waits for its own bell,
// which the others ring whenever they have put something into its inbox or taken something out of theirs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "hidet_dist/collectives.h"
#include "shared_file.hpp"
#include "waiting.hpp"

namespace hidet_dist {

// A rank's inbox, as this process sees it: its own, or another's.
class Inbox {
 public:
  static constexpr int64_t kPieceBytes = 64 * 1024;  // of a message: two of them fit into a second-level cache, twice
  static constexpr uint32_t kPieces = 2;  // in a channel at a time

  // The owner of an inbox, as the others see it.
  struct Owner {
    Counter bell;
    std::atomic<int32_t> process;
    std::atomic<uint32_t> closed;
  };

  // The pieces that one rank has put into another's inbox. Only the sender writes `put`, only the receiver `taken`.
  struct Channel {
    alignas(kLine) std::atomic<uint32_t> put;
    alignas(kLine) std::atomic<uint32_t> taken;
    alignas(kLine) hidet_dist_envelope envelopes[kPieces];  // of the message that the piece belongs to
  };

  // A descriptor of a new inbox in a mesh of so many ranks, or -1.
  static int make(int32_t ranks);

  // The memory of a descriptor, or null where it is not of such an inbox.
  static std::shared_ptr<Mapping> map(int descriptor, int32_t ranks);

  Inbox(std::shared_ptr<Mapping> mapping, int32_t ranks);

  Owner &owner() { return *reinterpret_cast<Owner *>(memory_ + kLine); }

  // What a rank has sent to the owner.
  Channel &channel(int32_t sender) { return reinterpret_cast<Channel *>(memory_ + kLine + sizeof(Owner))[sender]; }

  char *piece(int32_t sender, uint32_t number);

 private:
  static FileHeader header(int32_t ranks);
  static size_t header_bytes(int32_t ranks);
  static size_t file_bytes(int32_t ranks);

  const std::shared_ptr<Mapping> mapping_;
  char *const memory_;
  const int32_t ranks_;
};

// Another rank that this one exchanges messages with.
struct Peer {
  Peer(int32_t number, std::shared_ptr<Mapping> mapping, int32_t ranks);

  const int32_t rank;
  Inbox inbox;
  const Process process;
};

// A message on its way, in one direction.
struct Message {
  Peer *peer = nullptr;  // null for none
  int64_t bytes = 0;
  int64_t done = 0;

  bool over() const { return done == bytes; }
};

// The messages between this rank and others.
class Mailbox {
 public:
  // With a new inbox of this rank; null where there can be none.
  static std::unique_ptr<Mailbox> open(int32_t rank, int32_t ranks, std::chrono::nanoseconds timeout);

  Mailbox(int32_t descriptor, std::shared_ptr<Mapping> mapping, int32_t rank, int32_t ranks,
          std::chrono::nanoseconds timeout);
  Mailbox(const Mailbox &) = delete;
  Mailbox &operator=(const Mailbox &) = delete;
  ~Mailbox();

  // Of the inbox.
  int32_t descriptor() const { return descriptor_; }

  // Fails the peers that wait for this rank, now and later.
  void close(const std::map<int32_t, std::unique_ptr<Peer>> &peers);

  // Sends and receives at once; returns when both are over. Throws what exchange.hpp has.
  void exchange(const void *send, Message out, void *recv, Message in);

 private:
  // Each puts, or takes, one piece of a message, if that can be done now.
  bool put(const void *send, Message *message);
  bool take(void *recv, Message *message);

  // Returns once the bell was rung after `heard`.
  void listen(uint32_t heard, const Message &out, const Message &in, Clock::time_point start);

  const int32_t descriptor_;
  const int32_t rank_;
  const std::chrono::nanoseconds timeout_;
  Patience patience_;
  Inbox own_;
};

}  // namespace hidet_dist
