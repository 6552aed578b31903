// The collectives, sends and receives: each checks its arguments, then calls the current communicator's transport.
#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "blocks.hpp"
#include "communicator.hpp"
#include "row_exchange.hpp"

namespace {

using hidet_dist::Blocks;

struct Call {
  hidet_dist_collective kind;
  const char *name;
  const void *send;
  void *recv;
  int64_t count;  // elements of the smaller of the two buffers, of the data for one rank, or of the sent data
  int32_t dtype;
  int32_t reduce_op;
  int32_t group;
  int32_t root = 0;  // a group rank, like the next two; for rows, the checksum of the mask
  int64_t recv_count = 0;
  int32_t to = HIDET_DIST_NOBODY;
  int32_t from = HIDET_DIST_NOBODY;
  const hidet_dist_blocks *sent = nullptr;  // null for contiguous blocks
  const hidet_dist_blocks *received = nullptr;
  const int64_t *split = nullptr;  // sizes by group rank, in units; null for parts of equal size
  const int64_t *joined = nullptr;
  int64_t unit = 0;                 // elements; for rows, those of a row
  const uint8_t *wanted = nullptr;  // the mask of an exchange of rows
  int64_t rows = 0;
  bool is_packed = false;  // whether the buffers have the rows alone that are sent and received

  bool has_blocks() const { return sent != nullptr || received != nullptr; }
  bool has_parts() const { return split != nullptr || joined != nullptr; }
  bool has_rows() const { return kind == HIDET_DIST_GATHER_ROWS || kind == HIDET_DIST_REDUCE_SCATTER_ROWS; }

  hidet_dist_envelope envelope(int64_t program_call, int64_t elements) const {
    return {program_call,
            elements,
            root,
            static_cast<uint8_t>(kind),
            static_cast<uint8_t>(dtype),
            static_cast<uint8_t>(reduce_op),
            0};
  }
};

std::string in_words(const hidet_dist_blocks &blocks, int64_t group_size) {
  return std::to_string(blocks.rows) + " rows of " + std::to_string(blocks.whole) + " elements, " +
         std::to_string(blocks.row) + " a rank of " + std::to_string(group_size);
}

// The error in blocks, or an empty string.
std::string check_blocks(const Call &call, const hidet_dist_transport &transport, int64_t group_size) {
  for (const hidet_dist_blocks *blocks : {call.sent, call.received}) {
    if (blocks == nullptr) continue;
    const auto [rows, row, whole] = *blocks;
    if (rows < 0 || row < 0 || whole < 0) return "a negative size: " + in_words(*blocks, group_size);
    if (row > 0 && rows > std::numeric_limits<int64_t>::max() / row)
      return "too large: " + in_words(*blocks, group_size);
    if (rows * row != call.count) return "blocks of different sizes are sent and received";
    const int64_t all = group_size * row;
    if (whole > all) return "blocks leave room between them: " + in_words(*blocks, group_size);
    if (blocks == call.sent && whole < all) {
      return "there is less to send than the blocks have: " + in_words(*blocks, group_size);
    }
  }
  if (call.has_blocks() && transport.copy != nullptr) return "blocks side by side are for host memory only";
  return "";
}

// Sets the count of a call on parts to that of the whole tensor within the group. Returns the error, or an empty string.
std::string count_parts(Call *call, int64_t group_size) {
  call->count = call->unit;
  for (const int64_t *sizes : {call->split, call->joined}) {
    if (sizes == nullptr) continue;
    int64_t sum = 0;
    for (int64_t group_rank = 0; group_rank < group_size; ++group_rank) {
      if (sizes[group_rank] < 0) return "a part of negative size " + std::to_string(sizes[group_rank]);
      if (__builtin_add_overflow(sum, sizes[group_rank], &sum)) return "the parts are too large";
    }
    if (__builtin_mul_overflow(call->count, sum, &call->count)) return "the parts are too large";
  }
  return "";
}

// Sets the count of an exchange of rows to that of all rows of the group. Returns the error, or an empty string.
std::string count_rows(Call *call, const hidet_dist_transport &transport, int64_t group_size) {
  if (!call->is_packed && transport.copy != nullptr) return "on devices, rows are packed before they are exchanged";
  if (call->rows < 0 || call->unit < 0) {
    return "a negative size: " + std::to_string(call->rows) + " rows of " + std::to_string(call->unit) + " elements";
  }
  // Group sizes of -1 are refused later.
  if (__builtin_mul_overflow(call->rows, call->unit, &call->count) ||
      __builtin_mul_overflow(call->count, std::max<int64_t>(group_size, 1), &call->count)) {
    return "the rows are too large";
  }
  return call->count > 0 && call->wanted == nullptr ? "null mask" : "";
}

std::string check_group_ranks(const Call &call, int64_t group_rank, int64_t group_size) {
  for (const int32_t peer : {call.root, call.to, call.from}) {
    if (peer >= group_size || (peer < 0 && peer != HIDET_DIST_NOBODY)) {
      return "there is no group rank " + std::to_string(peer) + " in a group of " + std::to_string(group_size);
    }
  }
  if (call.root == HIDET_DIST_NOBODY) return "no root";
  if ((call.to == group_rank) != (call.from == group_rank)) {
    return "a rank sends to itself only while it receives from itself";
  }
  if (call.to == group_rank && call.count != call.recv_count) {
    return "a rank sends " + std::to_string(call.count) + " elements to itself, but receives " +
           std::to_string(call.recv_count);
  }
  return "";
}

// The error in a call's arguments, or an empty string. A group size of -1 stands for an unknown mesh axis.
std::string check(const Call &call, const hidet_dist_transport &transport, int64_t group_rank, int64_t group_size) {
  const int64_t element = hidet_dist_dtype_size(call.dtype);
  if (element == 0) return "unknown dtype " + std::to_string(call.dtype);
  if (call.reduce_op < HIDET_DIST_SUM || call.reduce_op > HIDET_DIST_MEAN) {
    return "unknown reduce operation " + std::to_string(call.reduce_op);
  }
  if (call.reduce_op == HIDET_DIST_MEAN && call.dtype == HIDET_DIST_BOOL) {
    return "bools have no mean: convert them to a number type first";
  }
  if (group_size < 0) return "group mask " + std::to_string(call.group) + " names an axis that the mesh does not have";
  for (const int64_t count : {call.count, call.recv_count}) {
    if (count < 0) return "negative count " + std::to_string(count);
    if (count > std::numeric_limits<int64_t>::max() / element / group_size) {
      return "count " + std::to_string(count) + " is too large";
    }
  }
  std::string problem = check_group_ranks(call, group_rank, group_size);
  if (problem.empty()) problem = check_blocks(call, transport, group_size);
  if (!problem.empty()) return problem;
  bool sends = call.count > 0;
  bool receives = call.count > 0;
  if (call.kind == HIDET_DIST_BROADCAST) sends = sends && call.root == group_rank;
  if (call.kind == HIDET_DIST_MESSAGE) {
    sends = sends && call.to != HIDET_DIST_NOBODY;
    receives = call.recv_count > 0 && call.from != HIDET_DIST_NOBODY;
  }
  if ((sends && call.send == nullptr) || (receives && call.recv == nullptr)) return "null buffer";
  return "";
}

// Any collective of a rank with itself.
int32_t copy(const hidet_dist_transport &transport, const Call &call) {
  if (call.send == call.recv) return HIDET_DIST_OK;
  const int64_t bytes = call.count * hidet_dist_dtype_size(call.dtype);
  if (transport.copy != nullptr) return transport.copy(transport.context, call.send, call.recv, bytes);
  std::memmove(call.recv, call.send, static_cast<size_t>(bytes));
  return HIDET_DIST_OK;
}

// A collective on blocks that lie side by side.
int32_t run_on_blocks(const hidet_dist_transport &transport, const Call &call, int64_t ranks) {
  if (ranks == 1) {  // the sent data is a single block
    const hidet_dist_blocks behind{1, call.count, call.count};
    const Blocks received = Blocks::of(call.received == nullptr ? behind : *call.received, call.dtype);
    received.put(call.recv, 0, 0, received.bytes(), call.send);
    return HIDET_DIST_OK;
  }
  switch (call.kind) {
    case HIDET_DIST_ALL_GATHER:
      return hidet_dist::all_gather_blocks(transport, ranks, call.send, call.recv, call.received, call.dtype,
                                           call.group);
    case HIDET_DIST_REDUCE_SCATTER:
      return hidet_dist::reduce_scatter_blocks(transport, ranks, call.send, call.recv, call.sent, call.dtype,
                                               call.reduce_op, call.group);
    case HIDET_DIST_ALL_TO_ALL:
      return hidet_dist::all_to_all_blocks(transport, ranks, call.send, call.sent, call.recv, call.received, call.dtype,
                                           call.group);
    default:
      return HIDET_DIST_FAILED;
  }
}

// A collective on parts of unequal size.
int32_t run_on_parts(const hidet_dist_transport &transport, const Call &call, int64_t ranks) {
  void *context = transport.context;
  switch (call.kind) {
    case HIDET_DIST_ALL_GATHER:
      return transport.all_gather_parts(context, call.send, call.recv, call.joined, call.unit, call.dtype, call.group);
    case HIDET_DIST_REDUCE_SCATTER:
      return transport.reduce_scatter_parts(context, call.send, call.recv, call.split, call.unit, call.dtype,
                                            call.reduce_op, call.group);
    case HIDET_DIST_ALL_TO_ALL: {
      std::vector<int64_t> counts;
      for (int64_t from = 0; from < ranks; ++from) {
        for (int64_t to = 0; to < ranks; ++to) counts.push_back(call.joined[from] * call.split[to]);
      }
      return transport.all_to_all_v(context, call.send, call.recv, counts.data(), call.unit, call.dtype, call.group);
    }
    default:
      return HIDET_DIST_FAILED;
  }
}

// An exchange of rows, which is known to the other ranks by what is sent of them.
int32_t run_on_rows(hidet_dist_communicator &communicator, Call call, int64_t ranks, int64_t own) {
  const bool is_empty = call.count == 0 || (call.is_packed && ranks == 1);
  const hidet_dist_transport &transport = communicator.transport();
  std::vector<uint8_t> mask;
  if (!is_empty && transport.read != nullptr) {
    mask.resize(static_cast<size_t>(ranks * ranks * call.rows));
    const auto bytes = static_cast<int64_t>(mask.size());
    const int32_t status = transport.read(transport.context, call.wanted, mask.data(), bytes);
    if (status != HIDET_DIST_OK) return status;
    call.wanted = mask.data();
  }
  const hidet_dist::WantedRows wanted{call.wanted, ranks, call.rows};
  call.count = is_empty ? 0 : wanted.moved() * call.unit;
  call.root = is_empty ? 0 : wanted.checksum();
  communicator.begin(call.group, call.envelope(communicator.call(), call.count));
  if (is_empty) return HIDET_DIST_OK;
  const bool gathers = call.kind == HIDET_DIST_GATHER_ROWS;
  if (call.is_packed) {
    return hidet_dist::exchange_packed_rows(transport, wanted, !gathers, call.send, call.recv, call.unit, call.dtype,
                                            call.group);
  }
  const auto exchange = gathers ? hidet_dist::gather_rows : hidet_dist::reduce_scatter_rows;
  return exchange(transport, wanted, own, call.send, call.recv, call.unit, call.dtype, call.group);
}

// The collectives that all ranks of the group take part in.
int32_t run_in_group(hidet_dist_communicator &communicator, const Call &call, int64_t group_size, int64_t group_rank) {
  if (call.has_rows()) return run_on_rows(communicator, call, group_size, group_rank);
  communicator.begin(call.group, call.envelope(communicator.call(), call.count));
  const hidet_dist_transport &transport = communicator.transport();
  if (call.count == 0) return HIDET_DIST_OK;
  if (call.has_blocks()) return run_on_blocks(transport, call, group_size);
  if (group_size == 1) return copy(transport, call);
  if (call.has_parts()) return run_on_parts(transport, call, group_size);
  void *context = transport.context;
  switch (call.kind) {
    case HIDET_DIST_ALL_REDUCE:
      return transport.all_reduce(context, call.send, call.recv, call.count, call.dtype, call.reduce_op, call.group);
    case HIDET_DIST_ALL_GATHER:
      return transport.all_gather(context, call.send, call.recv, call.count, call.dtype, call.group);
    case HIDET_DIST_REDUCE_SCATTER:
      return transport.reduce_scatter(context, call.send, call.recv, call.count, call.dtype, call.reduce_op,
                                      call.group);
    case HIDET_DIST_ALL_TO_ALL:
      return transport.all_to_all(context, call.send, call.recv, call.count, call.dtype, call.group);
    case HIDET_DIST_BROADCAST:
      return transport.broadcast(context, call.send, call.recv, call.count, call.dtype, call.root, call.group);
    default:
      break;
  }
  return HIDET_DIST_FAILED;
}

int32_t run_between_two(hidet_dist_communicator &communicator, const Call &call, int64_t group_rank) {
  const hidet_dist_transport &transport = communicator.transport();
  const bool sends = call.to != HIDET_DIST_NOBODY && call.count > 0;
  const bool receives = call.from != HIDET_DIST_NOBODY && call.recv_count > 0;
  const hidet_dist_envelope sent = call.envelope(communicator.call(), call.count);
  const hidet_dist_envelope received = call.envelope(communicator.call(), call.recv_count);
  if (!sends && !receives) {
    communicator.begin(HIDET_DIST_NOBODY, sent, HIDET_DIST_NOBODY, received);
    return HIDET_DIST_OK;
  }
  const std::vector<int64_t> ranks = communicator.mesh().group_ranks(call.group);
  const int64_t to = sends ? ranks[static_cast<size_t>(call.to)] : HIDET_DIST_NOBODY;
  const int64_t from = receives ? ranks[static_cast<size_t>(call.from)] : HIDET_DIST_NOBODY;
  communicator.begin(to, sent, from, received);
  if (call.to == group_rank) return copy(transport, call);
  return transport.send_recv(transport.context, call.send, sends ? call.count : 0, static_cast<int32_t>(to), call.recv,
                             receives ? call.recv_count : 0, static_cast<int32_t>(from), call.dtype);
}

int32_t run(Call call) {
  hidet_dist_communicator *communicator = hidet_dist::current();
  if (communicator == nullptr) {
    hidet_dist::set_last_error(std::string(call.name) + ": this thread has no current communicator");
    return HIDET_DIST_NO_COMMUNICATOR;
  }
  if (const char *error = communicator->error()) {
    hidet_dist::set_last_error(error);
    return HIDET_DIST_FAILED;
  }
  const int64_t group_size = communicator->mesh().group_size(call.group);
  const int64_t group_rank = communicator->mesh().group_rank(call.group);
  std::string problem;
  if (call.has_parts()) problem = count_parts(&call, group_size);
  if (call.has_rows()) problem = count_rows(&call, communicator->transport(), group_size);
  if (problem.empty()) problem = check(call, communicator->transport(), group_rank, group_size);
  if (!problem.empty()) {
    // Kernels may ignore the status of a collective, so this error must be recorded on the communicator too.
    communicator->fail(std::string(call.name) + ": " + problem);
    hidet_dist::set_last_error(communicator->error());
    return HIDET_DIST_INVALID_ARGUMENT;
  }
  const int32_t status = call.kind == HIDET_DIST_MESSAGE ? run_between_two(*communicator, call, group_rank)
                                                         : run_in_group(*communicator, call, group_size, group_rank);
  if (status == HIDET_DIST_OK) {
    communicator->end();
    return HIDET_DIST_OK;
  }
  communicator->fail(std::string(call.name) + ": the transport failed with status " + std::to_string(status));
  hidet_dist::set_last_error(communicator->error());
  return HIDET_DIST_FAILED;
}

int32_t refuse(const char *name, const char *problem) {
  const std::string message = std::string(name) + ": " + problem;
  if (hidet_dist_communicator *communicator = hidet_dist::current()) communicator->fail(message);
  hidet_dist::set_last_error(message);
  return HIDET_DIST_INVALID_ARGUMENT;
}

int32_t run_on_blocks(hidet_dist_collective kind, const char *name, const void *send, const hidet_dist_blocks *sent,
                      void *recv, const hidet_dist_blocks *received, int32_t dtype, int32_t reduce_op, int32_t group) {
  const hidet_dist_blocks *const known = sent != nullptr ? sent : received;
  if (known == nullptr) return refuse(name, "null blocks");
  // The check of the blocks detects a product that is too large.
  const int64_t count = static_cast<int64_t>(static_cast<uint64_t>(known->rows) * static_cast<uint64_t>(known->row));
  Call call{kind, name, send, recv, count, dtype, reduce_op, group};
  call.sent = sent;
  call.received = received;
  return run(call);
}

int32_t run_on_parts(hidet_dist_collective kind, const char *name, const void *send, void *recv, const int64_t *split,
                     const int64_t *joined, int64_t unit, int32_t dtype, int32_t reduce_op, int32_t group) {
  const bool splits = kind != HIDET_DIST_ALL_GATHER;
  const bool joins = kind != HIDET_DIST_REDUCE_SCATTER;
  if (splits != (split != nullptr) || joins != (joined != nullptr)) return refuse(name, "null sizes of parts");
  Call call{kind, name, send, recv, 0, dtype, reduce_op, group};
  call.split = split;
  call.joined = joined;
  call.unit = unit;
  return run(call);
}

int32_t run_on_rows(hidet_dist_collective kind, const char *name, const void *send, const uint8_t *wanted, void *recv,
                    int64_t rows, int64_t row, int32_t dtype, int32_t group, bool is_packed = false) {
  Call call{kind, name, send, recv, 0, dtype, HIDET_DIST_SUM, group};
  call.is_packed = is_packed;
  call.wanted = wanted;
  call.rows = rows;
  call.unit = row;
  return run(call);
}

int32_t run_send_recv(const char *name, const void *send, int64_t send_count, int32_t to, void *recv,
                      int64_t recv_count, int32_t from, int32_t dtype, int32_t group) {
  Call call{HIDET_DIST_MESSAGE, name, send, recv, send_count, dtype, HIDET_DIST_SUM, group};
  call.recv_count = recv_count;
  call.to = to;
  call.from = from;
  return run(call);
}

}  // namespace

extern "C" {

int64_t hidet_dist_dtype_size(int32_t dtype) {
  switch (dtype) {
    case HIDET_DIST_F64:
    case HIDET_DIST_I64:
      return 8;
    case HIDET_DIST_F32:
    case HIDET_DIST_I32:
      return 4;
    case HIDET_DIST_F16:
    case HIDET_DIST_BF16:
      return 2;
    case HIDET_DIST_I8:
    case HIDET_DIST_U8:
    case HIDET_DIST_BOOL:
      return 1;
    default:
      return 0;
  }
}

int32_t hidet_dist_all_reduce(const void *send, void *recv, int64_t count, int32_t dtype, int32_t reduce_op,
                              int32_t group) {
  return run({HIDET_DIST_ALL_REDUCE, "all_reduce", send, recv, count, dtype, reduce_op, group});
}

int32_t hidet_dist_all_gather(const void *send, void *recv, int64_t send_count, int32_t dtype, int32_t group) {
  return run({HIDET_DIST_ALL_GATHER, "all_gather", send, recv, send_count, dtype, HIDET_DIST_SUM, group});
}

int32_t hidet_dist_reduce_scatter(const void *send, void *recv, int64_t recv_count, int32_t dtype, int32_t reduce_op,
                                  int32_t group) {
  return run({HIDET_DIST_REDUCE_SCATTER, "reduce_scatter", send, recv, recv_count, dtype, reduce_op, group});
}

int32_t hidet_dist_all_to_all(const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) {
  return run({HIDET_DIST_ALL_TO_ALL, "all_to_all", send, recv, count, dtype, HIDET_DIST_SUM, group});
}

int32_t hidet_dist_all_gather_blocks(const void *send, void *recv, const hidet_dist_blocks *received, int32_t dtype,
                                     int32_t group) {
  return run_on_blocks(HIDET_DIST_ALL_GATHER, "all_gather_blocks", send, nullptr, recv, received, dtype, HIDET_DIST_SUM,
                       group);
}

int32_t hidet_dist_reduce_scatter_blocks(const void *send, void *recv, const hidet_dist_blocks *sent, int32_t dtype,
                                         int32_t reduce_op, int32_t group) {
  return run_on_blocks(HIDET_DIST_REDUCE_SCATTER, "reduce_scatter_blocks", send, sent, recv, nullptr, dtype, reduce_op,
                       group);
}

int32_t hidet_dist_all_to_all_blocks(const void *send, const hidet_dist_blocks *sent, void *recv,
                                     const hidet_dist_blocks *received, int32_t dtype, int32_t group) {
  return run_on_blocks(HIDET_DIST_ALL_TO_ALL, "all_to_all_blocks", send, sent, recv, received, dtype, HIDET_DIST_SUM,
                       group);
}

int32_t hidet_dist_all_gather_parts(const void *send, void *recv, const int64_t *joined, int64_t unit, int32_t dtype,
                                    int32_t group) {
  return run_on_parts(HIDET_DIST_ALL_GATHER, "all_gather_parts", send, recv, nullptr, joined, unit, dtype,
                      HIDET_DIST_SUM, group);
}

int32_t hidet_dist_reduce_scatter_parts(const void *send, void *recv, const int64_t *split, int64_t unit, int32_t dtype,
                                        int32_t reduce_op, int32_t group) {
  return run_on_parts(HIDET_DIST_REDUCE_SCATTER, "reduce_scatter_parts", send, recv, split, nullptr, unit, dtype,
                      reduce_op, group);
}

int32_t hidet_dist_all_to_all_parts(const void *send, void *recv, const int64_t *split, const int64_t *joined,
                                    int64_t unit, int32_t dtype, int32_t group) {
  return run_on_parts(HIDET_DIST_ALL_TO_ALL, "all_to_all_parts", send, recv, split, joined, unit, dtype, HIDET_DIST_SUM,
                      group);
}

int32_t hidet_dist_gather_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows, int64_t row,
                               int32_t dtype, int32_t group) {
  return run_on_rows(HIDET_DIST_GATHER_ROWS, "gather_rows", send, wanted, recv, rows, row, dtype, group);
}

int32_t hidet_dist_reduce_scatter_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows, int64_t row,
                                       int32_t dtype, int32_t group) {
  return run_on_rows(HIDET_DIST_REDUCE_SCATTER_ROWS, "reduce_scatter_rows", send, wanted, recv, rows, row, dtype,
                     group);
}

int32_t hidet_dist_gather_packed_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows, int64_t row,
                                      int32_t dtype, int32_t group) {
  return run_on_rows(HIDET_DIST_GATHER_ROWS, "gather_packed_rows", send, wanted, recv, rows, row, dtype, group, true);
}

int32_t hidet_dist_reduce_scatter_packed_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows,
                                              int64_t row, int32_t dtype, int32_t group) {
  return run_on_rows(HIDET_DIST_REDUCE_SCATTER_ROWS, "reduce_scatter_packed_rows", send, wanted, recv, rows, row, dtype,
                     group, true);
}

int32_t hidet_dist_broadcast(const void *send, void *recv, int64_t count, int32_t dtype, int32_t root, int32_t group) {
  return run({HIDET_DIST_BROADCAST, "broadcast", send, recv, count, dtype, HIDET_DIST_SUM, group, root});
}

int32_t hidet_dist_send(const void *send, int64_t count, int32_t dtype, int32_t to, int32_t group) {
  return run_send_recv("send", send, count, to, nullptr, 0, HIDET_DIST_NOBODY, dtype, group);
}

int32_t hidet_dist_recv(void *recv, int64_t count, int32_t dtype, int32_t from, int32_t group) {
  return run_send_recv("recv", nullptr, 0, HIDET_DIST_NOBODY, recv, count, from, dtype, group);
}

int32_t hidet_dist_send_recv(const void *send, int64_t send_count, int32_t to, void *recv, int64_t recv_count,
                             int32_t from, int32_t dtype, int32_t group) {
  return run_send_recv("send_recv", send, send_count, to, recv, recv_count, from, dtype, group);
}

}  // extern "C"
