// Messages between two ranks of one host, without any other rank: each rank owns an inbox, with a channel for each rank
// that sends to it. A rank that waits, for a message or for space in another's inbox, waits for its bell. The others
// ring it whenever they have put a piece into the rank's inbox or taken one of its pieces from theirs.
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

// This process's view of an inbox: this rank's, or another's.
class Inbox {
 public:
  static constexpr int64_t kPieceBytes = 64 * 1024;  // bytes of a piece of a message
  // The pieces in a channel at a time. A sender of 4 MiB or less need not wait for its receiver: stages of a pipeline
  // whose times vary would wait for each other.
  static constexpr uint32_t kPieces = 64;

  // The state of an inbox's owner that other ranks read.
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

  // Makes an inbox in a mesh of so many ranks, and returns its descriptor, or -1.
  static int make(int32_t ranks);

  // The memory of a descriptor, or null where it is not of such an inbox.
  static std::shared_ptr<Mapping> map(int descriptor, int32_t ranks);

  Inbox(std::shared_ptr<Mapping> mapping, int32_t ranks);

  Owner &owner() { return *reinterpret_cast<Owner *>(memory_ + kLine); }

  // The channel from a rank to the owner.
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
  // Makes an inbox of this rank; null on failure.
  static std::unique_ptr<Mailbox> open(int32_t rank, int32_t ranks, std::chrono::nanoseconds timeout);

  Mailbox(int32_t descriptor, std::shared_ptr<Mapping> mapping, int32_t rank, int32_t ranks,
          std::chrono::nanoseconds timeout);
  Mailbox(const Mailbox &) = delete;
  Mailbox &operator=(const Mailbox &) = delete;
  ~Mailbox();

  // The descriptor of the inbox.
  int32_t descriptor() const { return descriptor_; }

  // Makes peers fail that wait for this rank, now and later.
  void close(const std::map<int32_t, std::unique_ptr<Peer>> &peers);

  // Sends and receives at the same time; returns when both are done. Throws the errors of exchange.hpp.
  void exchange(const void *send, Message out, void *recv, Message in);

 private:
  // Put, or take, one piece of a message, if that is possible now.
  bool put(const void *send, Message *message);
  bool take(void *recv, Message *message);

  // Waits until the bell is rung after `heard`.
  void listen(uint32_t heard, const Message &out, const Message &in, ActiveTime *waited);

  const int32_t descriptor_;
  const int32_t rank_;
  const std::chrono::nanoseconds timeout_;
  Patience patience_;
  Inbox inbox_;
};

}  // namespace hidet_dist
