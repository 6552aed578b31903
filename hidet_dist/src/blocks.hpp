// The blocks that a tensor's last rows are cut into, one for each rank of a group, where they lie side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hidet_dist/collectives.h"

namespace hidet_dist {

// `rows` rows of `whole` bytes; the block of group rank p has `row` bytes of each, from p * row on, as far as there are any.
struct Blocks {
  int64_t rows, row, whole;

  int64_t bytes() const { return rows * row; }

  static Blocks of(const hidet_dist_blocks &blocks, int32_t dtype) {
    const int64_t element = hidet_dist_dtype_size(dtype);
    return {blocks.rows, blocks.row * element, blocks.whole * element};
  }

  // Blocks of so many elements that lie one behind the other.
  static Blocks behind(int64_t count, int32_t dtype, int64_t ranks) { return of({1, count, count * ranks}, dtype); }

  // Visits the runs that bytes `begin` to `begin + size` of a block lie in: visit(where in the tensor, where in these
  // bytes, how many).
  template <class Visit>
  void runs(int64_t group_rank, int64_t begin, int64_t size, Visit visit) const {
    for (int64_t done = 0; done < size;) {
      const int64_t at = (begin + done) / row, column = (begin + done) % row;
      const int64_t count = std::min(row - column, size - done);
      const int64_t first = group_rank * row + column;
      if (first < whole) visit(at * whole + first, done, std::min(count, whole - first));
      done += count;
    }
  }

  // Copies bytes `begin` to `begin + size` of a block from `tensor` to `packed`.
  void take(const void *tensor, int64_t group_rank, int64_t begin, int64_t size, void *packed) const {
    runs(group_rank, begin, size, [&](int64_t from, int64_t to, int64_t count) {
      std::memcpy(static_cast<char *>(packed) + to, static_cast<const char *>(tensor) + from,
                  static_cast<size_t>(count));
    });
  }

  // The same, from `packed` to `tensor`.
  void put(void *tensor, int64_t group_rank, int64_t begin, int64_t size, const void *packed) const {
    runs(group_rank, begin, size, [&](int64_t to, int64_t from, int64_t count) {
      std::memcpy(static_cast<char *>(tensor) + to, static_cast<const char *>(packed) + from,
                  static_cast<size_t>(count));
    });
  }
};

// Collectives of a group of `ranks` on blocks, by a transport that may have none of its own: the blocks are copied then,
// to lie one behind the other, and back.
int32_t all_gather_blocks(const hidet_dist_transport &transport, int64_t ranks, const void *send, void *recv,
                          const hidet_dist_blocks *received, int32_t dtype, int32_t group);
int32_t reduce_scatter_blocks(const hidet_dist_transport &transport, int64_t ranks, const void *send, void *recv,
                              const hidet_dist_blocks *sent, int32_t dtype, int32_t reduce_op, int32_t group);
int32_t all_to_all_blocks(const hidet_dist_transport &transport, int64_t ranks, const void *send,
                          const hidet_dist_blocks *sent, void *recv, const hidet_dist_blocks *received, int32_t dtype,
                          int32_t group);

}  // namespace hidet_dist
