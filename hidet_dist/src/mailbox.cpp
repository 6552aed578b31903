#include "mailbox.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "exchange.hpp"

namespace {

constexpr uint64_t kMagic = 0x686964646973746a;

}  // namespace

namespace hidet_dist {

FileHeader Inbox::header(int32_t ranks) { return {kMagic, kPieceBytes, ranks}; }

size_t Inbox::header_bytes(int32_t ranks) {
  return whole_pages(kLine + sizeof(Owner) + static_cast<size_t>(ranks) * sizeof(Channel));
}

// Channels that no rank sends through are never touched, so they take no memory.
size_t Inbox::file_bytes(int32_t ranks) {
  return header_bytes(ranks) + static_cast<size_t>(ranks) * kPieces * static_cast<size_t>(kPieceBytes);
}

int Inbox::make(int32_t ranks) { return new_file(header(ranks), file_bytes(ranks)); }

std::shared_ptr<Mapping> Inbox::map(int descriptor, int32_t ranks) {
  return Mapping::of(descriptor, header(ranks), file_bytes(ranks));
}

Inbox::Inbox(std::shared_ptr<Mapping> mapping, int32_t ranks)
    : mapping_(std::move(mapping)), memory_(mapping_->memory()), ranks_(ranks) {}

char *Inbox::piece(int32_t sender, uint32_t number) {
  const size_t index = static_cast<size_t>(sender) * kPieces + number % kPieces;
  return memory_ + header_bytes(ranks_) + index * static_cast<size_t>(kPieceBytes);
}

Peer::Peer(int32_t number, std::shared_ptr<Mapping> mapping, int32_t ranks)
    : rank(number), inbox(std::move(mapping), ranks), process(inbox.owner().process.load(std::memory_order_acquire)) {}

std::unique_ptr<Mailbox> Mailbox::open(int32_t rank, int32_t ranks, std::chrono::nanoseconds timeout) {
  const int descriptor = Inbox::make(ranks);
  if (descriptor < 0) return nullptr;
  auto mapping = Inbox::map(descriptor, ranks);
  if (mapping == nullptr) {
    ::close(descriptor);
    return nullptr;
  }
  return std::make_unique<Mailbox>(descriptor, std::move(mapping), rank, ranks, timeout);
}

Mailbox::Mailbox(int32_t descriptor, std::shared_ptr<Mapping> mapping, int32_t rank, int32_t ranks,
                 std::chrono::nanoseconds timeout)
    : descriptor_(descriptor), rank_(rank), timeout_(timeout), patience_(ranks), inbox_(std::move(mapping), ranks) {
  inbox_.owner().process.store(getpid(), std::memory_order_release);
}

Mailbox::~Mailbox() {
  inbox_.owner().closed.store(1, std::memory_order_seq_cst);
  ::close(descriptor_);
}

void Mailbox::close(const std::map<int32_t, std::unique_ptr<Peer>> &peers) {
  inbox_.owner().closed.store(1, std::memory_order_seq_cst);
  for (const auto &[rank, peer] : peers) {
    if (peer != nullptr) ring(&peer->inbox.owner().bell);
  }
}

void Mailbox::exchange(const void *send, Message out, void *recv, Message in) {
  ActiveTime waited;
  while (!out.over() || !in.over()) {
    const uint32_t heard = inbox_.owner().bell.value.load(std::memory_order_seq_cst);
    const bool sent = put(send, &out);
    const bool received = take(recv, &in);
    if (sent || received) {
      waited = ActiveTime();
    } else {
      listen(heard, out, in, &waited);
    }
  }
}

bool Mailbox::put(const void *send, Message *message) {
  if (message->over()) return false;
  Inbox::Channel &channel = message->peer->inbox.channel(rank_);
  const uint32_t number = channel.put.load(std::memory_order_relaxed);
  if (number - channel.taken.load(std::memory_order_acquire) >= Inbox::kPieces) return false;
  const int64_t size = std::min(Inbox::kPieceBytes, message->bytes - message->done);
  channel.envelopes[number % Inbox::kPieces] = own_envelope();
  std::memcpy(message->peer->inbox.piece(rank_, number), static_cast<const char *>(send) + message->done,
              static_cast<size_t>(size));
  check_files();
  message->done += size;
  channel.put.store(number + 1, std::memory_order_release);
  ring(&message->peer->inbox.owner().bell);
  return true;
}

bool Mailbox::take(void *recv, Message *message) {
  if (message->over()) return false;
  const int32_t sender = message->peer->rank;
  Inbox::Channel &channel = inbox_.channel(sender);
  const uint32_t number = channel.taken.load(std::memory_order_relaxed);
  if (channel.put.load(std::memory_order_acquire) == number) return false;
  check_envelope(channel.envelopes[number % Inbox::kPieces], sender);
  const int64_t size = std::min(Inbox::kPieceBytes, message->bytes - message->done);
  std::memcpy(static_cast<char *>(recv) + message->done, inbox_.piece(sender, number), static_cast<size_t>(size));
  message->done += size;
  channel.taken.store(number + 1, std::memory_order_release);
  ring(&message->peer->inbox.owner().bell);
  return true;
}

void Mailbox::listen(uint32_t heard, const Message &out, const Message &in, ActiveTime *waited) {
  Counter &bell = inbox_.owner().bell;
  const auto rung = [&] { return bell.value.load(std::memory_order_seq_cst) != heard; };
  if (patience_.look(rung)) return;
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  std::string failure;
  while (failure.empty() && !rung()) {
    patience_.sleep(&bell, heard);
    for (const Message *message : {&out, &in}) {
      if (!failure.empty() || message->over()) continue;
      Peer &peer = *message->peer;
      failure = why_not("rank " + std::to_string(peer.rank), peer.inbox.owner().closed, peer.process, waited, timeout_);
    }
  }
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  // A rank may have finished its part and ended since.
  if (!failure.empty() && !rung()) throw PeerFailure{failure};
}

}  // namespace hidet_dist
