// The four collectives: each checks its arguments, then hands over to the current communicator's transport.
#include <cstring>
#include <limits>
#include <string>

#include "communicator.hpp"

namespace {

enum class Kind { kAllReduce, kAllGather, kReduceScatter, kAllToAll };

struct Call {
  Kind kind;
  const char *name;
  const void *send;
  void *recv;
  int64_t count;  // of the smaller of the two buffers, or of what goes to one rank, in elements
  int32_t dtype;
  int32_t reduce_op;
  int32_t group;
};

// What is wrong with a call, or an empty string. A group size of -1 stands for an unknown mesh axis.
std::string check(const Call &call, int64_t group_size) {
  if (call.count < 0) return "negative count " + std::to_string(call.count);
  const int64_t element = hidet_dist_dtype_size(call.dtype);
  if (element == 0) return "unknown dtype " + std::to_string(call.dtype);
  if (call.reduce_op < HIDET_DIST_SUM || call.reduce_op > HIDET_DIST_PRODUCT) {
    return "unknown reduce operation " + std::to_string(call.reduce_op);
  }
  if (group_size < 0) return "group mask " + std::to_string(call.group) + " names an axis that the mesh does not have";
  if (call.count > std::numeric_limits<int64_t>::max() / element / group_size) {
    return "count " + std::to_string(call.count) + " is too large";
  }
  if (call.count > 0 && (call.send == nullptr || call.recv == nullptr)) return "null buffer";
  return "";
}

int32_t transfer(const hidet_dist_transport &transport, const Call &call) {
  switch (call.kind) {
    case Kind::kAllReduce:
      return transport.all_reduce(transport.context, call.send, call.recv, call.count, call.dtype, call.reduce_op,
                                  call.group);
    case Kind::kAllGather:
      return transport.all_gather(transport.context, call.send, call.recv, call.count, call.dtype, call.group);
    case Kind::kReduceScatter:
      return transport.reduce_scatter(transport.context, call.send, call.recv, call.count, call.dtype, call.reduce_op,
                                      call.group);
    case Kind::kAllToAll:
      return transport.all_to_all(transport.context, call.send, call.recv, call.count, call.dtype, call.group);
  }
  return HIDET_DIST_FAILED;
}

// Any collective of a rank with itself.
int32_t copy(const hidet_dist_transport &transport, const Call &call) {
  if (call.send == call.recv) return HIDET_DIST_OK;
  const int64_t bytes = call.count * hidet_dist_dtype_size(call.dtype);
  if (transport.copy != nullptr) return transport.copy(transport.context, call.send, call.recv, bytes);
  std::memmove(call.recv, call.send, static_cast<size_t>(bytes));
  return HIDET_DIST_OK;
}

int32_t run(const Call &call) {
  hidet_dist_communicator *communicator = hidet_dist::current();
  if (communicator == nullptr) {
    hidet_dist::set_last_error(std::string(call.name) + ": this thread has no current communicator");
    return HIDET_DIST_NO_COMMUNICATOR;
  }
  if (const char *error = communicator->error()) {
    hidet_dist::set_last_error(error);
    return HIDET_DIST_FAILED;
  }
  const int64_t group_size = communicator->group_size(call.group);
  const std::string problem = check(call, group_size);
  if (!problem.empty()) {
    // Kernels need not look at what a collective returns, so this too must stay on the communicator.
    communicator->fail(std::string(call.name) + ": " + problem);
    hidet_dist::set_last_error(communicator->error());
    return HIDET_DIST_INVALID_ARGUMENT;
  }
  communicator->start_collective();
  if (call.count == 0) return HIDET_DIST_OK;
  const hidet_dist_transport &transport = communicator->transport();
  const int32_t status = group_size == 1 ? copy(transport, call) : transfer(transport, call);
  if (status == HIDET_DIST_OK) return HIDET_DIST_OK;
  communicator->fail(std::string(call.name) + ": the transport failed with status " + std::to_string(status));
  hidet_dist::set_last_error(communicator->error());
  return HIDET_DIST_FAILED;
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
  return run({Kind::kAllReduce, "all_reduce", send, recv, count, dtype, reduce_op, group});
}

int32_t hidet_dist_all_gather(const void *send, void *recv, int64_t send_count, int32_t dtype, int32_t group) {
  return run({Kind::kAllGather, "all_gather", send, recv, send_count, dtype, HIDET_DIST_SUM, group});
}

int32_t hidet_dist_reduce_scatter(const void *send, void *recv, int64_t recv_count, int32_t dtype, int32_t reduce_op,
                                  int32_t group) {
  return run({Kind::kReduceScatter, "reduce_scatter", send, recv, recv_count, dtype, reduce_op, group});
}

int32_t hidet_dist_all_to_all(const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) {
  return run({Kind::kAllToAll, "all_to_all", send, recv, count, dtype, HIDET_DIST_SUM, group});
}

}  // extern "C"
