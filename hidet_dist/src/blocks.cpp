#include "blocks.hpp"

#include <vector>

namespace hidet_dist {

namespace {

// Runs `exchange(send, recv)` on contiguous copies of blocks; null where the blocks are contiguous already.
template <class Exchange>
int32_t on_copies(const void *send, const hidet_dist_blocks *sent, void *recv, const hidet_dist_blocks *received,
                  int64_t ranks, int32_t dtype, Exchange exchange) {
  std::vector<char> outgoing, incoming;
  if (sent != nullptr) {
    const Blocks blocks = Blocks::of(*sent, dtype);
    outgoing.resize(static_cast<size_t>(blocks.bytes() * ranks));
    for (int64_t group_rank = 0; group_rank < ranks; ++group_rank) {
      blocks.take(send, group_rank, 0, blocks.bytes(), outgoing.data() + group_rank * blocks.bytes());
    }
    send = outgoing.data();
  }
  if (received == nullptr) return exchange(send, recv);
  const Blocks blocks = Blocks::of(*received, dtype);
  incoming.resize(static_cast<size_t>(blocks.bytes() * ranks));
  const int32_t status = exchange(send, static_cast<void *>(incoming.data()));
  if (status != HIDET_DIST_OK) return status;
  for (int64_t group_rank = 0; group_rank < ranks; ++group_rank) {
    blocks.put(recv, group_rank, 0, blocks.bytes(), incoming.data() + group_rank * blocks.bytes());
  }
  return HIDET_DIST_OK;
}

}  // namespace

int32_t all_gather_blocks(const hidet_dist_transport &transport, int64_t ranks, const void *send, void *recv,
                          const hidet_dist_blocks *received, int32_t dtype, int32_t group) {
  if (transport.all_gather_blocks != nullptr) {
    return transport.all_gather_blocks(transport.context, send, recv, received, dtype, group);
  }
  const int64_t count = received->rows * received->row;
  return on_copies(send, nullptr, recv, received, ranks, dtype, [&](const void *from, void *to) {
    return transport.all_gather(transport.context, from, to, count, dtype, group);
  });
}

int32_t reduce_scatter_blocks(const hidet_dist_transport &transport, int64_t ranks, const void *send, void *recv,
                              const hidet_dist_blocks *sent, int32_t dtype, int32_t reduce_op, int32_t group) {
  if (transport.reduce_scatter_blocks != nullptr) {
    return transport.reduce_scatter_blocks(transport.context, send, recv, sent, dtype, reduce_op, group);
  }
  const int64_t count = sent->rows * sent->row;
  return on_copies(send, sent, recv, nullptr, ranks, dtype, [&](const void *from, void *to) {
    return transport.reduce_scatter(transport.context, from, to, count, dtype, reduce_op, group);
  });
}

int32_t all_to_all_blocks(const hidet_dist_transport &transport, int64_t ranks, const void *send,
                          const hidet_dist_blocks *sent, void *recv, const hidet_dist_blocks *received, int32_t dtype,
                          int32_t group) {
  if (transport.all_to_all_blocks != nullptr) {
    return transport.all_to_all_blocks(transport.context, send, sent, recv, received, dtype, group);
  }
  const hidet_dist_blocks &known = sent != nullptr ? *sent : *received;
  return on_copies(send, sent, recv, received, ranks, dtype, [&](const void *from, void *to) {
    return transport.all_to_all(transport.context, from, to, known.rows * known.row, dtype, group);
  });
}

}  // namespace hidet_dist
