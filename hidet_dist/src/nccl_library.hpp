// NCCL and the CUDA driver, loaded at run time. The declarations here are the used part of their documented interfaces:
// NCCL 2.18's user guide, and the CUDA driver API reference.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

struct ncclComm;

namespace hidet_dist::nccl {

using Comm = ncclComm *;
using Stream = void *;
using Event = void *;
using DevicePointer = unsigned long long;

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9
};

enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

struct UniqueId {
  char internal[128];
};

// As of 2.18. Later versions append fields, and treat missing ones as not set.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = INT_MIN;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char *net_name = nullptr;
  int split_share = INT_MIN;
};

struct Library {
  // Of NCCL.
  Result (*get_version)(int *version);
  Result (*get_unique_id)(UniqueId *id);
  Result (*comm_init_rank_config)(Comm *comm, int ranks, UniqueId id, int rank, Config *config);
  Result (*comm_split)(Comm comm, int color, int key, Comm *split, Config *config);
  Result (*comm_get_async_error)(Comm comm, Result *state);
  Result (*comm_abort)(Comm comm);
  Result (*comm_finalize)(Comm comm);
  Result (*comm_destroy)(Comm comm);
  Result (*all_reduce)(const void *send, void *recv, size_t count, DataType, RedOp, Comm, Stream);
  Result (*all_gather)(const void *send, void *recv, size_t send_count, DataType, Comm, Stream);
  Result (*reduce_scatter)(const void *send, void *recv, size_t recv_count, DataType, RedOp, Comm, Stream);
  Result (*broadcast)(const void *send, void *recv, size_t count, DataType, int root, Comm, Stream);
  Result (*reduce)(const void *send, void *recv, size_t count, DataType, RedOp, int root, Comm, Stream);
  Result (*send)(const void *buffer, size_t count, DataType, int peer, Comm, Stream);
  Result (*recv)(void *buffer, size_t count, DataType, int peer, Comm, Stream);
  Result (*group_start)();
  Result (*group_end)();
  const char *(*get_error_string)(Result);
  const char *(*get_last_error)(Comm);
  // Of the CUDA driver; each returns 0 or an error.
  int (*cu_init)(unsigned int flags);
  int (*cu_device_get_count)(int *count);
  int (*cu_device_get)(int *device, int ordinal);
  int (*cu_device_get_uuid)(char *uuid, int device);
  int (*cu_device_primary_ctx_retain)(void **context, int device);
  int (*cu_device_primary_ctx_release)(int device);
  int (*cu_ctx_set_current)(void *context);
  int (*cu_stream_create)(Stream *stream, unsigned int flags);
  int (*cu_stream_destroy)(Stream stream);
  int (*cu_stream_query)(Stream stream);
  int (*cu_stream_is_capturing)(Stream stream, int *status);
  int (*cu_stream_wait_event)(Stream stream, Event event, unsigned int flags);
  int (*cu_event_create)(Event *event, unsigned int flags);
  int (*cu_event_query)(Event event);
  int (*cu_event_record)(Event event, Stream stream);
  int (*cu_event_destroy)(Event event);
  int (*cu_memcpy_async)(DevicePointer target, DevicePointer source, size_t bytes, Stream stream);
  int (*cu_memcpy_dtoh_async)(void *target, DevicePointer source, size_t bytes, Stream stream);
  int (*cu_mem_alloc)(DevicePointer *pointer, size_t bytes);
  int (*cu_mem_free)(DevicePointer pointer);
  int (*cu_get_error_string)(int error, const char **text);
};

constexpr int kCudaNotReady = 600;
constexpr unsigned int kNonBlockingStream = 1;
constexpr unsigned int kNoTiming = 2;

// Loads them, unless they are loaded. Returns NCCL's version, or 0, then `problem` is set.
int load(const std::string &nccl_path, const std::string &driver_path, std::string *problem);

// The loaded libraries, or null.
const Library *library();

}  // namespace hidet_dist::nccl
