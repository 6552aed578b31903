// Exchanges of the rows that the ranks of a group want of each other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "hidet_dist/collectives.h"

namespace hidet_dist {

// A mask of wanted rows: each rank has `rows` of them, and of the row `s` of group rank `of`, the byte
// by(rank, of)[s] says whether `rank` wants it.
struct WantedRows {
  const uint8_t *mask;
  int64_t ranks, rows;

  const uint8_t *by(int64_t rank, int64_t of) const { return mask + (rank * ranks + of) * rows; }

  // How many of the rows `begin` to `end` of a rank are wanted by another, or by itself.
  int64_t count(int64_t rank, int64_t of, int64_t begin, int64_t end) const {
    const uint8_t *const flags = by(rank, of);
    return std::count_if(flags + begin, flags + end, [](uint8_t flag) { return flag != 0; });
  }

  // The rows that ranks want of other ranks; one that several want counts several times.
  int64_t moved() const;

  // A number that other masks do not have, or hardly any.
  int32_t checksum() const;
};

// The exchanges of collectives.h for a group of ranks, of which this is `own`. If the transport has no such functions,
// rows are packed for an exchange of parts of any size.
int32_t gather_rows(const hidet_dist_transport &transport, const WantedRows &wanted, int64_t own, const void *send,
                    void *recv, int64_t row, int32_t dtype, int32_t group);
int32_t reduce_scatter_rows(const hidet_dist_transport &transport, const WantedRows &wanted, int64_t own,
                            const void *send, void *recv, int64_t row, int32_t dtype, int32_t group);

// The exchange alone, of rows that are packed. Each rank sends to the others those of its rows that they want, or with
// `to_owners` those of their rows that it wants.
int32_t exchange_packed_rows(const hidet_dist_transport &transport, const WantedRows &wanted, bool to_owners,
                             const void *send, void *recv, int64_t row, int32_t dtype, int32_t group);

// Writes the rows of the result of gather_rows that no other rank has: this rank's own, and zeros.
void gather_own_rows(const WantedRows &wanted, int64_t own, const void *send, void *recv, int64_t row_bytes);

// Adds up so many rows, or pieces of rows, of `count` elements.
void add_rows(const std::vector<const void *> &rows, void *result, int64_t count, int32_t dtype);

}  // namespace hidet_dist
