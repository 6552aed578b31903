// The collectives of a group whose ranks share a segment. All throw the errors of exchange.hpp.
#pragma once

#include <cstdint>
#include <vector>

#include "blocks.hpp"
#include "row_exchange.hpp"
#include "segment.hpp"

namespace hidet_dist {

void all_reduce(Segment &segment, const void *send, void *recv, int64_t count, int32_t dtype, int32_t reduce_op);

void all_gather(Segment &segment, const void *send, void *recv, const Blocks &received);

void reduce_scatter(Segment &segment, const void *send, void *recv, const Blocks &sent, int32_t dtype,
                    int32_t reduce_op);

void all_to_all(Segment &segment, const void *send, const Blocks &sent, void *recv, const Blocks &received);

// The same for parts of unequal size, whose bytes are given by group rank.
void all_gather_parts(Segment &segment, const void *send, void *recv, const std::vector<int64_t> &received);

void reduce_scatter_parts(Segment &segment, const void *send, void *recv, const std::vector<int64_t> &sent,
                          int32_t dtype, int32_t reduce_op);

// `most` are the bytes of the largest part that a rank sends to another one.
void all_to_all_v(Segment &segment, const void *send, const std::vector<int64_t> &sent, void *recv,
                  const std::vector<int64_t> &received, int64_t most);

// Exchanges of wanted rows. A row is written to shared memory once, however many ranks want it.
void gather_rows(Segment &segment, const WantedRows &wanted, const void *send, void *recv, int64_t row_bytes);

void reduce_scatter_rows(Segment &segment, const WantedRows &wanted, const void *send, void *recv, int64_t row,
                         int32_t dtype);

void broadcast(Segment &segment, const void *send, void *recv, int64_t bytes, int32_t root);

}  // namespace hidet_dist
