#include "segment_collectives.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "reduce.hpp"

namespace {

using hidet_dist::Blocks;
using hidet_dist::Segment;

constexpr int64_t kShareBytes = 4 * 1024;  // reducing less than this takes no longer than an exchange of turns

void copy(void *target, const void *source, int64_t bytes) { std::memcpy(target, source, static_cast<size_t>(bytes)); }

const char *at(const void *buffer, int64_t offset) { return static_cast<const char *>(buffer) + offset; }
char *at(void *buffer, int64_t offset) { return static_cast<char *>(buffer) + offset; }

// Reduces the elements [begin, begin + count) of all ranks' slots into `result`.
void reduce_slots(Segment &segment, int64_t begin_bytes, void *result, int64_t count, int32_t dtype, int32_t op) {
  std::vector<const void *> sources;
  for (int32_t rank = 0; rank < segment.ranks(); ++rank) sources.push_back(segment.slot(rank) + begin_bytes);
  hidet_dist::reduce(sources.data(), segment.ranks(), result, count, dtype, op);
}

// A slot holds the same range of the data for each rank.
int64_t stretch(const Segment &segment, int64_t element) { return Segment::kSlotBytes / element / segment.ranks(); }

void write_stretches(Segment &segment, const void *send, const Blocks &sent, int64_t done, int64_t size) {
  char *slot = segment.begin_turn();
  for (int32_t rank = 0; rank < segment.ranks(); ++rank) sent.take(send, rank, done, size, slot + rank * size);
  segment.exchange();
}

// Visits the stretches behind the first `done` bytes of parts that lie one after the other, of up to `most` bytes each:
// visit(group rank, offset in the tensor, bytes).
template <class Visit>
void stretches(const std::vector<int64_t> &parts, int64_t done, int64_t most, Visit visit) {
  int64_t begin = 0;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank] > done) visit(static_cast<int32_t>(rank), begin + done, std::min(most, parts[rank] - done));
    begin += parts[rank];
  }
}

// Writes a stretch of `room` bytes at most for each rank.
void write_parts(Segment &segment, const void *send, const std::vector<int64_t> &sent, int64_t done, int64_t room) {
  char *slot = segment.begin_turn();
  stretches(sent, done, room,
            [&](int32_t rank, int64_t offset, int64_t size) { copy(slot + rank * room, at(send, offset), size); });
  segment.exchange();
}

// How many rows with each number a rank writes to its slot, of any of the ranks whose rows it has: [rank][row].
using Written = std::vector<std::vector<int32_t>>;

// The end of the rows from `begin` on of which each rank writes no more than its slot has room for; of the first row
// it always has.
int64_t end_of_turn(const Written &written, int64_t begin, int64_t rows, int64_t room) {
  std::vector<int64_t> sums(written.size(), 0);
  for (int64_t s = begin; s < rows; ++s) {
    for (size_t rank = 0; rank < written.size(); ++rank) {
      sums[rank] += written[rank][static_cast<size_t>(s)];
      if (sums[rank] > room && s > begin) return s;
    }
  }
  return rows;
}

// Whether any rank writes one of these rows.
bool any_written(const Written &written, int64_t begin, int64_t end) {
  return std::any_of(written.begin(), written.end(), [&](const std::vector<int32_t> &counts) {
    return std::any_of(counts.begin() + begin, counts.begin() + end, [](int32_t count) { return count > 0; });
  });
}

// Visits what is exchanged in one turn each, in the same order on all ranks: pieces of `size` bytes, from `column` on,
// of the rows `begin` to `end`. `most` are the bytes of a piece at most.
template <class Visit>
void turns(const Written &written, int64_t rows, int64_t row_bytes, int64_t most, Visit visit) {
  for (int64_t column = 0; column < row_bytes; column += most) {
    const int64_t size = std::min(most, row_bytes - column);
    for (int64_t begin = 0; begin < rows;) {
      const int64_t end = end_of_turn(written, begin, rows, Segment::kSlotBytes / size);
      visit(column, size, begin, end);
      begin = end;
    }
  }
}

}  // namespace

namespace hidet_dist {

void all_reduce(Segment &segment, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op) {
  const int64_t element = hidet_dist_dtype_size(dtype);
  const int64_t most = Segment::kSlotBytes / element;
  const int32_t ranks = segment.ranks();
  for (int64_t done = 0; done < count;) {
    const int64_t size = std::min(most, count - done);
    char *slot = segment.begin_turn();
    copy(slot, at(send, done * element), size * element);
    segment.exchange();
    // Either every rank reduces all of the data, or each reduces a share, which the others then read: one more
    // exchange, but only a share of the additions. With two ranks, sharing would move as many bytes.
    if (ranks == 2 || size * element < ranks * kShareBytes) {
      reduce_slots(segment, 0, at(recv, done * element), size, dtype, op);
    } else {
      const auto first = [&](int64_t rank) { return size * rank / ranks; };
      const int64_t begin = first(segment.group_rank());
      reduce_slots(segment, begin * element, slot + begin * element, first(segment.group_rank() + 1) - begin, dtype,
                   op);
      segment.exchange();
      for (int32_t rank = 0; rank < ranks; ++rank) {
        copy(at(recv, (done + first(rank)) * element), segment.slot(rank) + first(rank) * element,
             (first(rank + 1) - first(rank)) * element);
      }
    }
    done += size;
  }
}

void all_gather(Segment &segment, const void *send, void *recv, const Blocks &received) {
  const int64_t bytes = received.bytes();
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(Segment::kSlotBytes, bytes - done);
    copy(segment.begin_turn(), at(send, done), size);
    segment.exchange();
    for (int32_t rank = 0; rank < segment.ranks(); ++rank) {
      const char *source = rank == segment.group_rank() ? at(send, done) : segment.slot(rank);
      received.put(recv, rank, done, size, source);
    }
    done += size;
  }
}

void all_gather_parts(Segment &segment, const void *send, void *recv, const std::vector<int64_t> &received) {
  const int32_t own = segment.group_rank();
  const int64_t most = *std::max_element(received.begin(), received.end());
  for (int64_t done = 0; done < most; done += Segment::kSlotBytes) {
    char *slot = segment.begin_turn();
    const int64_t left = received[static_cast<size_t>(own)] - done;
    if (left > 0) copy(slot, at(send, done), std::min(Segment::kSlotBytes, left));
    segment.exchange();
    stretches(received, done, Segment::kSlotBytes, [&](int32_t rank, int64_t offset, int64_t size) {
      copy(at(recv, offset), rank == own ? at(send, done) : segment.slot(rank), size);
    });
  }
}

void reduce_scatter_parts(Segment &segment, const void *send, void *recv, const std::vector<int64_t> &sent,
                          int32_t dtype, int32_t op) {
  const int64_t element = hidet_dist_dtype_size(dtype);
  const int64_t room = stretch(segment, element) * element;
  const int64_t most = *std::max_element(sent.begin(), sent.end());
  for (int64_t done = 0; done < most; done += room) {
    write_parts(segment, send, sent, done, room);
    const int64_t left = sent[static_cast<size_t>(segment.group_rank())] - done;
    if (left <= 0) continue;
    reduce_slots(segment, segment.group_rank() * room, at(recv, done), std::min(room, left) / element, dtype, op);
  }
}

void all_to_all_v(Segment &segment, const void *send, const std::vector<int64_t> &sent, void *recv,
                  const std::vector<int64_t> &received, int64_t most) {
  const int64_t room = stretch(segment, 1);
  for (int64_t done = 0; done < most; done += room) {
    write_parts(segment, send, sent, done, room);
    stretches(received, done, room, [&](int32_t rank, int64_t offset, int64_t size) {
      copy(at(recv, offset), segment.slot(rank) + segment.group_rank() * room, size);
    });
  }
}

void gather_rows(Segment &segment, const WantedRows &wanted, const void *send, void *recv, int64_t row_bytes) {
  const auto ranks = static_cast<size_t>(segment.ranks()), own = static_cast<size_t>(segment.group_rank());
  Written written(ranks, std::vector<int32_t>(static_cast<size_t>(wanted.rows), 0));
  for (size_t of = 0; of < ranks; ++of) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      const uint8_t *const flags = wanted.by(static_cast<int64_t>(rank), static_cast<int64_t>(of));
      for (size_t s = 0; rank != of && s < written[of].size(); ++s) written[of][s] |= flags[s] != 0 ? 1 : 0;
    }
  }
  const auto is_written = [&](size_t of, int64_t s) { return written[of][static_cast<size_t>(s)] != 0; };
  const int64_t most = std::min(row_bytes, Segment::kSlotBytes);
  turns(written, wanted.rows, row_bytes, most, [&](int64_t column, int64_t size, int64_t begin, int64_t end) {
    if (!any_written(written, begin, end)) return;
    char *slot = segment.begin_turn();
    for (int64_t s = begin; s < end; ++s) {
      if (!is_written(own, s)) continue;
      copy(slot, at(send, s * row_bytes + column), size);
      slot += size;
    }
    segment.exchange();
    for (size_t of = 0; of < ranks; ++of) {
      if (of == own) continue;
      const uint8_t *const flags = wanted.by(static_cast<int64_t>(own), static_cast<int64_t>(of));
      char *const rows = at(recv, static_cast<int64_t>(of) * wanted.rows * row_bytes + column);
      const char *source = segment.slot(static_cast<int32_t>(of));
      for (int64_t s = begin; s < end; ++s) {
        if (!is_written(of, s)) continue;
        if (flags[s] != 0) copy(rows + s * row_bytes, source, size);
        source += size;
      }
    }
  });
  gather_own_rows(wanted, static_cast<int64_t>(own), send, recv, row_bytes);
}

void reduce_scatter_rows(Segment &segment, const WantedRows &wanted, const void *send, void *recv, int64_t row,
                         int32_t dtype) {
  const int64_t element = hidet_dist_dtype_size(dtype), row_bytes = row * element;
  const int64_t ranks = segment.ranks(), own = segment.group_rank();
  Written written(static_cast<size_t>(ranks), std::vector<int32_t>(static_cast<size_t>(wanted.rows), 0));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::vector<int32_t> &counts = written[static_cast<size_t>(rank)];
    for (int64_t of = 0; of < ranks; ++of) {
      const uint8_t *const flags = wanted.by(rank, of);
      for (size_t s = 0; rank != of && s < counts.size(); ++s) counts[s] += flags[s] != 0 ? 1 : 0;
    }
  }
  std::vector<const char *> next(static_cast<size_t>(ranks), nullptr);
  std::vector<const void *> sources;
  // A slot has room for a piece for each of the others, so that every sum is of one turn.
  const int64_t most = std::min(row_bytes, Segment::kSlotBytes / (ranks - 1) / element * element);
  turns(written, wanted.rows, row_bytes, most, [&](int64_t column, int64_t size, int64_t begin, int64_t end) {
    if (any_written(written, begin, end)) {
      char *slot = segment.begin_turn();
      for (int64_t of = 0; of < ranks; ++of) {
        const uint8_t *const flags = wanted.by(own, of);
        for (int64_t s = begin; of != own && s < end; ++s) {
          if (flags[s] == 0) continue;
          copy(slot, at(send, (of * wanted.rows + s) * row_bytes + column), size);
          slot += size;
        }
      }
      segment.exchange();
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const char *source = segment.slot(static_cast<int32_t>(rank));
        for (int64_t of = 0; of < own; ++of) {
          if (of != rank) source += wanted.count(rank, of, begin, end) * size;
        }
        next[static_cast<size_t>(rank)] = source;
      }
    }
    for (int64_t s = begin; s < end; ++s) {
      sources.clear();
      for (int64_t rank = 0; rank < ranks; ++rank) {
        if (wanted.by(rank, own)[s] == 0) continue;
        const char *&source = next[static_cast<size_t>(rank)];
        sources.push_back(rank == own ? at(send, (own * wanted.rows + s) * row_bytes + column) : source);
        if (rank != own) source += size;
      }
      add_rows(sources, at(recv, s * row_bytes + column), size / element, dtype);
    }
  });
}

void broadcast(Segment &segment, const void *send, void *recv, int64_t bytes, int32_t root) {
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(Segment::kSlotBytes, bytes - done);
    char *slot = segment.begin_turn();
    if (segment.group_rank() == root) copy(slot, at(send, done), size);
    segment.exchange();
    if (segment.group_rank() != root) copy(at(recv, done), segment.slot(root), size);
    done += size;
  }
  if (segment.group_rank() == root && send != recv) copy(recv, send, bytes);
}

void reduce_scatter(Segment &segment, const void *send, void *recv, const Blocks &sent, int32_t dtype, int32_t op) {
  const int64_t element = hidet_dist_dtype_size(dtype);
  const int64_t bytes = sent.bytes();
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(stretch(segment, element) * element, bytes - done);
    write_stretches(segment, send, sent, done, size);
    reduce_slots(segment, segment.group_rank() * size, at(recv, done), size / element, dtype, op);
    done += size;
  }
}

void all_to_all(Segment &segment, const void *send, const Blocks &sent, void *recv, const Blocks &received) {
  const int64_t bytes = sent.bytes();
  for (int64_t done = 0; done < bytes;) {
    const int64_t size = std::min(stretch(segment, 1), bytes - done);
    write_stretches(segment, send, sent, done, size);
    for (int32_t rank = 0; rank < segment.ranks(); ++rank) {
      received.put(recv, rank, done, size, segment.slot(rank) + segment.group_rank() * size);
    }
    done += size;
  }
}

}  // namespace hidet_dist
