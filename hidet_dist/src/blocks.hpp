// The blocks of a group's ranks, side by side in the rows of a tensor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hidet_dist/collectives.h"

namespace hidet_dist {

// `rows` rows of `whole` bytes; the block of group rank p has `row` bytes of each, from p * row up to the end of the
// row.
struct Blocks {
  int64_t rows, row, whole;

  int64_t bytes() const { return rows * row; }

  static Blocks of(const hidet_dist_blocks &blocks, int32_t dtype) {
    const int64_t element = hidet_dist_dtype_size(dtype);
    return {blocks.rows, blocks.row * element, blocks.whole * element};
  }

  // Contiguous blocks of so many elements, one after the other.
  static Blocks behind(int64_t count, int32_t dtype, int64_t ranks) { return of({1, count, count * ranks}, dtype); }

  // Visits the contiguous runs of bytes `begin` to `begin + size` of a block: visit(offset in the tensor, offset in
  // these bytes, count).
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

// Collectives of a group of `ranks` on blocks. If the transport has no such functions, the blocks are copied to
// contiguous memory and back.
int32_t all_gather_blocks(const hidet_dist_transport &transport, int64_t ranks, const void *send, void *recv,
                          const hidet_dist_blocks *received, int32_t dtype, int32_t group);
int32_t reduce_scatter_blocks(const hidet_dist_transport &transport, int64_t ranks, const void *send, void *recv,
                              const hidet_dist_blocks *sent, int32_t dtype, int32_t reduce_op, int32_t group);
int32_t all_to_all_blocks(const hidet_dist_transport &transport, int64_t ranks, const void *send,
                          const hidet_dist_blocks *sent, void *recv, const hidet_dist_blocks *received, int32_t dtype,
                          int32_t group);

}  // namespace hidet_dist
