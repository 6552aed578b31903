// Reduction of equally long runs of elements, one per rank, to one run.
#pragma once

#include <cstdint>

namespace hidet_dist {

// Reduces `count` elements of each of the `sources` into `result`, in the order of the sources, so that every rank that
// reduces the same runs gets the same bits. Half types are summed up in binary32 and rounded once. `result` may be one
// of the sources.
void reduce(const void *const *sources, int32_t source_count, void *result, int64_t count, int32_t dtype,
            int32_t reduce_op);

}  // namespace hidet_dist
