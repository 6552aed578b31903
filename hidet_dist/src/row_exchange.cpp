#include "row_exchange.hpp"

#include <cstring>
#include <memory>

#include "reduce.hpp"

namespace hidet_dist {

namespace {

using Memory = std::unique_ptr<char[]>;

Memory allocate(int64_t bytes) { return Memory(new char[static_cast<size_t>(bytes)]); }

void copy(void *target, const void *source, int64_t bytes) { std::memcpy(target, source, static_cast<size_t>(bytes)); }

const char *at(const void *buffer, int64_t offset) { return static_cast<const char *>(buffer) + offset; }
char *at(void *buffer, int64_t offset) { return static_cast<char *>(buffer) + offset; }

// The rows that each rank sends to each other one; see exchange_packed_rows.
std::vector<int64_t> sent_rows(const WantedRows &wanted, bool to_owners) {
  const int64_t ranks = wanted.ranks;
  std::vector<int64_t> counts(static_cast<size_t>(ranks * ranks), 0);
  for (int64_t from = 0; from < ranks; ++from) {
    for (int64_t to = 0; to < ranks; ++to) {
      if (from == to) continue;
      const int64_t rank = to_owners ? from : to, of = to_owners ? to : from;
      counts[static_cast<size_t>(from * ranks + to)] = wanted.count(rank, of, 0, wanted.rows);
    }
  }
  return counts;
}

// The rows that a rank sends, or receives.
int64_t rows_from(const std::vector<int64_t> &counts, int64_t ranks, int64_t from) {
  int64_t sum = 0;
  for (int64_t to = 0; to < ranks; ++to) sum += counts[static_cast<size_t>(from * ranks + to)];
  return sum;
}

int64_t rows_to(const std::vector<int64_t> &counts, int64_t ranks, int64_t to) {
  int64_t sum = 0;
  for (int64_t from = 0; from < ranks; ++from) sum += counts[static_cast<size_t>(from * ranks + to)];
  return sum;
}

// Packs the rows of `rows` that have a flag behind `packed`, and returns the end.
char *pack(const uint8_t *flags, int64_t count, const char *rows, int64_t bytes, char *packed) {
  for (int64_t s = 0; s < count; ++s) {
    if (flags[s] == 0) continue;
    copy(packed, rows + s * bytes, bytes);
    packed += bytes;
  }
  return packed;
}

int32_t exchange(const hidet_dist_transport &transport, const std::vector<int64_t> &counts, const void *send,
                 void *recv, int64_t row, int32_t dtype, int32_t group) {
  return transport.all_to_all_v(transport.context, send, recv, counts.data(), row, dtype, group);
}

}  // namespace

int64_t WantedRows::moved() const {
  int64_t sum = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t of = 0; of < ranks; ++of) {
      if (rank != of) sum += count(rank, of, 0, rows);
    }
  }
  return sum;
}

int32_t WantedRows::checksum() const {
  // FNV-1a over words instead of bytes, with the high bits, which depend on all others, folded into the low ones.
  constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t sum = 0xcbf29ce484222325;
  const int64_t bytes = ranks * ranks * rows;
  for (int64_t offset = 0; offset < bytes; offset += 8) {
    uint64_t word = 0;
    std::memcpy(&word, mask + offset, static_cast<size_t>(std::min<int64_t>(8, bytes - offset)));
    sum = (sum ^ word) * kPrime;
    sum ^= sum >> 32;
  }
  return static_cast<int32_t>(sum & 0x7fffffff);
}

void gather_own_rows(const WantedRows &wanted, int64_t own, const void *send, void *recv, int64_t row_bytes) {
  for (int64_t of = 0; of < wanted.ranks; ++of) {
    const uint8_t *const flags = wanted.by(own, of);
    for (int64_t s = 0; s < wanted.rows; ++s) {
      char *const row = at(recv, (of * wanted.rows + s) * row_bytes);
      if (flags[s] == 0) {
        std::memset(row, 0, static_cast<size_t>(row_bytes));
      } else if (of == own) {
        copy(row, at(send, s * row_bytes), row_bytes);
      }
    }
  }
}

void add_rows(const std::vector<const void *> &rows, void *result, int64_t count, int32_t dtype) {
  const int64_t bytes = count * hidet_dist_dtype_size(dtype);
  if (rows.empty()) {
    std::memset(result, 0, static_cast<size_t>(bytes));
  } else if (rows.size() == 1) {
    copy(result, rows[0], bytes);
  } else {
    reduce(rows.data(), static_cast<int32_t>(rows.size()), result, count, dtype, HIDET_DIST_SUM);
  }
}

int32_t gather_rows(const hidet_dist_transport &transport, const WantedRows &wanted, int64_t own, const void *send,
                    void *recv, int64_t row, int32_t dtype, int32_t group) {
  const int64_t bytes = row * hidet_dist_dtype_size(dtype);
  const bool moves = wanted.moved() > 0;
  if (moves && transport.gather_rows != nullptr) {
    return transport.gather_rows(transport.context, send, wanted.mask, recv, wanted.rows, row, dtype, group);
  }
  if (moves) {
    const std::vector<int64_t> counts = sent_rows(wanted, false);
    const Memory outgoing = allocate(rows_from(counts, wanted.ranks, own) * bytes);
    const Memory incoming = allocate(rows_to(counts, wanted.ranks, own) * bytes);
    char *end = outgoing.get();
    for (int64_t to = 0; to < wanted.ranks; ++to) {
      if (to != own) end = pack(wanted.by(to, own), wanted.rows, at(send, 0), bytes, end);
    }
    const int32_t status = exchange(transport, counts, outgoing.get(), incoming.get(), row, dtype, group);
    if (status != HIDET_DIST_OK) return status;
    const char *next = incoming.get();
    for (int64_t of = 0; of < wanted.ranks; ++of) {
      for (int64_t s = 0; s < wanted.rows; ++s) {
        if (of == own || wanted.by(own, of)[s] == 0) continue;
        copy(at(recv, (of * wanted.rows + s) * bytes), next, bytes);
        next += bytes;
      }
    }
  }
  gather_own_rows(wanted, own, send, recv, bytes);
  return HIDET_DIST_OK;
}

int32_t reduce_scatter_rows(const hidet_dist_transport &transport, const WantedRows &wanted, int64_t own,
                            const void *send, void *recv, int64_t row, int32_t dtype, int32_t group) {
  const int64_t bytes = row * hidet_dist_dtype_size(dtype);
  const bool moves = wanted.moved() > 0;
  if (moves && transport.reduce_scatter_rows != nullptr) {
    return transport.reduce_scatter_rows(transport.context, send, wanted.mask, recv, wanted.rows, row, dtype, group);
  }
  const std::vector<int64_t> counts = sent_rows(wanted, true);
  const Memory incoming = allocate(rows_to(counts, wanted.ranks, own) * bytes);
  if (moves) {
    const Memory outgoing = allocate(rows_from(counts, wanted.ranks, own) * bytes);
    char *end = outgoing.get();
    for (int64_t to = 0; to < wanted.ranks; ++to) {
      if (to != own) end = pack(wanted.by(own, to), wanted.rows, at(send, to * wanted.rows * bytes), bytes, end);
    }
    const int32_t status = exchange(transport, counts, outgoing.get(), incoming.get(), row, dtype, group);
    if (status != HIDET_DIST_OK) return status;
  }
  std::vector<const char *> next;
  const char *begin = incoming.get();
  for (int64_t rank = 0; rank < wanted.ranks; ++rank) {
    next.push_back(begin);
    begin += counts[static_cast<size_t>(rank * wanted.ranks + own)] * bytes;
  }
  std::vector<const void *> sources;
  for (int64_t s = 0; s < wanted.rows; ++s) {
    sources.clear();
    for (int64_t rank = 0; rank < wanted.ranks; ++rank) {
      if (wanted.by(rank, own)[s] == 0) continue;
      const char *&source = next[static_cast<size_t>(rank)];
      sources.push_back(rank == own ? at(send, (own * wanted.rows + s) * bytes) : source);
      if (rank != own) source += bytes;
    }
    add_rows(sources, at(recv, s * bytes), row, dtype);
  }
  return HIDET_DIST_OK;
}

int32_t exchange_packed_rows(const hidet_dist_transport &transport, const WantedRows &wanted, bool to_owners,
                             const void *send, void *recv, int64_t row, int32_t dtype, int32_t group) {
  if (wanted.moved() == 0) return HIDET_DIST_OK;
  return exchange(transport, sent_rows(wanted, to_owners), send, recv, row, dtype, group);
}

}  // namespace hidet_dist
