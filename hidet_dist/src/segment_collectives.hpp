// The collectives of a group whose ranks share a segment. All throw the errors of exchange.hpp.
#pragma once

#include <cstdint>

#include "blocks.hpp"
#include "segment.hpp"

namespace hidet_dist {

void all_reduce(Segment &segment, const void *send, void *recv, int64_t count, int32_t dtype, int32_t reduce_op);

void all_gather(Segment &segment, const void *send, void *recv, const Blocks &received);

void reduce_scatter(Segment &segment, const void *send, void *recv, const Blocks &sent, int32_t dtype,
                    int32_t reduce_op);

void all_to_all(Segment &segment, const void *send, const Blocks &sent, void *recv, const Blocks &received);

void broadcast(Segment &segment, const void *send, void *recv, int64_t bytes, int32_t root);

}  // namespace hidet_dist
