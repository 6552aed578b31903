// The transport between ranks with a CUDA device each. See nccl.h. NCCL's communicators are called Comm here.
#include "hidet_dist/nccl.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "active_time.hpp"
#include "communicator.hpp"
#include "nccl_library.hpp"
#include "transport.hpp"

namespace {

namespace nccl = hidet_dist::nccl;
using hidet_dist::ActiveTime;
using hidet_dist::Clock;
using hidet_dist::failed_meanwhile;
using hidet_dist::in_seconds;
using nccl::Comm;
using nccl::Event;
using nccl::Library;
using nccl::Result;
using nccl::Stream;

static_assert(sizeof(nccl::UniqueId) == HIDET_DIST_NCCL_ID_BYTES, "an id of NCCL's");

constexpr auto kSpin = std::chrono::microseconds(100);   // how long a waiting thread only yields
constexpr auto kPause = std::chrono::microseconds(20);  // how long it then sleeps at a time: short against a collective
constexpr auto kClosing = std::chrono::seconds(5);  // the time for communicators to be freed or aborted
constexpr int kWarmUpBytesARank = 8;
constexpr const char *kMessages = "ncclSend and ncclRecv";
constexpr const char *kBroadcasts = "a group of ncclBroadcast";
constexpr const char *kReductions = "a group of ncclReduce";

struct DataType {
  nccl::DataType type;
  size_t bytes;
};

DataType data_type(int32_t dtype) {
  switch (dtype) {
    case HIDET_DIST_F32:
      return {nccl::kFloat32, 4};
    case HIDET_DIST_F64:
      return {nccl::kFloat64, 8};
    case HIDET_DIST_F16:
      return {nccl::kFloat16, 2};
    case HIDET_DIST_BF16:
      return {nccl::kBfloat16, 2};
    case HIDET_DIST_I8:
      return {nccl::kInt8, 1};
    case HIDET_DIST_I32:
      return {nccl::kInt32, 4};
    case HIDET_DIST_I64:
      return {nccl::kInt64, 8};
    default:  // bytes, and bools, which are bytes of 0 and 1
      return {nccl::kUint8, 1};
  }
}

// NCCL has no bools: of bytes of 0 and 1, the max is "or" and the min is "and". Its average of integers is their sum,
// divided and rounded towards zero. Its max and min of floats drop NaN: programs for GPUs have a kernel instead.
nccl::RedOp reduce_op_of(int32_t reduce_op, int32_t dtype) {
  if (dtype == HIDET_DIST_BOOL) {
    return reduce_op == HIDET_DIST_SUM || reduce_op == HIDET_DIST_MAX ? nccl::kMax : nccl::kMin;
  }
  switch (reduce_op) {
    case HIDET_DIST_SUM:
      return nccl::kSum;
    case HIDET_DIST_MAX:
      return nccl::kMax;
    case HIDET_DIST_MIN:
      return nccl::kMin;
    case HIDET_DIST_PRODUCT:
      return nccl::kProd;
    default:
      return nccl::kAvg;
  }
}

const char *at(const void *buffer, size_t offset) { return static_cast<const char *>(buffer) + offset; }
char *at(void *buffer, size_t offset) { return static_cast<char *>(buffer) + offset; }

// Yields or sleeps briefly, depending on how long the wait has lasted.
void pause(Clock::time_point start) {
  if (Clock::now() - start < kSpin) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

struct hidet_dist_nccl final : hidet_dist::DeviceTransport {
 public:
  hidet_dist_nccl(const Library &library, hidet_dist::Mesh mesh, void *context, int device,
                  hidet_dist_nccl_stream stream, hidet_dist_nccl_connect connect, hidet_dist_nccl_settle settle,
                  std::chrono::nanoseconds timeout)
      : DeviceTransport(timeout),
        library_(library),
        mesh_(std::move(mesh)),
        context_(context),
        device_(device),
        current_stream_(stream),
        connect_(connect),
        settle_(settle) {
    for (size_t axis = 0; axis < mesh_.shape.size(); ++axis) {
      if (mesh_.shape[axis] > 1) whole_ |= 1 << axis;
    }
  }
  ~hidet_dist_nccl() override {
    close();
    if (internal_stream_ != nullptr) library_.cu_stream_destroy(internal_stream_);
    if (side_stream_ != nullptr) library_.cu_stream_destroy(side_stream_);
    for (const auto &[ticket, event] : events_) library_.cu_event_destroy(event);
    for (const Event event : idle_events_) library_.cu_event_destroy(event);
    if (scratch_ != 0) library_.cu_mem_free(scratch_);
    library_.cu_device_primary_ctx_release(device_);
  }

  bool has(int32_t group) const {
    const auto entry = comms_.find(key(group));
    return entry != comms_.end() && entry->second->ready;
  }

  void await() const {
    if (auto *communicator = hidet_dist::current(); communicator != nullptr) communicator->await(whole_);
  }

  int32_t begin(int32_t group, const char *id) {
    if (pending_ != nullptr || closed_ || has(group) || (id == nullptr) != (has(whole_))) {
      return fail("a communicator of NCCL's cannot be made now", false);
    }
    library_.cu_ctx_set_current(context_);
    Result result;
    if (id != nullptr) {
      nccl::UniqueId unique;
      std::memcpy(unique.internal, id, sizeof unique.internal);
      nccl::Config config;
      config.blocking = 0;
      pending_ = add(whole_);
      pending_parent_ = nullptr;
      result = library_.comm_init_rank_config(&pending_->comm, static_cast<int>(mesh_.size()), unique,
                                              static_cast<int>(mesh_.rank), &config);
    } else {
      pending_parent_ = comms_[whole_]->comm;
      pending_ = add(group);
      const auto color = static_cast<int>(mesh_.group_ranks(group).front());
      result = library_.comm_split(pending_parent_, color, static_cast<int>(mesh_.rank), &pending_->comm, nullptr);
    }
    if (result == nccl::kSuccess || result == nccl::kInProgress) return HIDET_DIST_OK;
    return fail_with(result, id != nullptr ? "ncclCommInitRankConfig" : "ncclCommSplit", pending_parent_);
  }

  int32_t progress() {
    if (pending_ == nullptr) return fail("no communicator of NCCL's is being made", false);
    // NCCL does not return the new communicator before the split of the old one is complete.
    for (Comm *comm : {&pending_parent_, &pending_->comm}) {
      if (*comm == nullptr) continue;
      Result state = nccl::kSuccess;
      Result result = library_.comm_get_async_error(*comm, &state);
      if (result == nccl::kSuccess) result = state;
      if (result == nccl::kInProgress) return HIDET_DIST_NCCL_IN_PROGRESS;
      if (result != nccl::kSuccess) return fail_with(result, "making a communicator of NCCL's", *comm);
    }
    if (pending_->comm == nullptr) return HIDET_DIST_NCCL_IN_PROGRESS;
    pending_->ready = true;
    pending_ = nullptr;
    return HIDET_DIST_OK;
  }

  int32_t warm_up(int32_t group) {
    const Comm comm = comm_of(group);
    if (comm == nullptr) return HIDET_DIST_FAILED;
    library_.cu_ctx_set_current(context_);
    const auto ranks = static_cast<size_t>(mesh_.group_size(group));
    const auto bytes = static_cast<size_t>(mesh_.size()) * kWarmUpBytesARank;
    int error =
        internal_stream_ != nullptr ? 0 : library_.cu_stream_create(&internal_stream_, nccl::kNonBlockingStream);
    if (error == 0 && scratch_ == 0) error = library_.cu_mem_alloc(&scratch_, 2 * bytes);
    if (error != 0) return fail_with_cuda(error, "preparing to warm up");
    auto *send = reinterpret_cast<char *>(scratch_);
    char *recv = send + bytes;
    const Result result =
        library_.all_reduce(send, recv, kWarmUpBytesARank, nccl::kUint8, nccl::kMax, comm, internal_stream_);
    const int32_t status = settle(comm, result, "ncclAllReduce");
    if (status != HIDET_DIST_OK) return status;
    return exchange(comm, kMessages, [&](auto enqueue) {
      for (size_t group_rank = 0; group_rank < ranks; ++group_rank) {
        const int peer = static_cast<int>(group_rank);
        const size_t offset = group_rank * kWarmUpBytesARank;
        enqueue(library_.send(send + offset, kWarmUpBytesARank, nccl::kUint8, peer, comm, internal_stream_));
        enqueue(library_.recv(recv + offset, kWarmUpBytesARank, nccl::kUint8, peer, comm, internal_stream_));
      }
    });
  }

  int32_t wait(Stream stream, std::chrono::nanoseconds seconds) {
    return wait_while([&] { return library_.cu_stream_query(stream); }, "waiting for the stream", seconds);
  }

  int32_t wait_event(Event event, std::chrono::nanoseconds seconds) {
    return wait_while([&] { return library_.cu_event_query(event); }, "waiting for the event", seconds);
  }

  int32_t all_reduce(const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, int32_t group) override {
    return enqueue(group, "ncclAllReduce", [&](Comm comm, Stream stream) {
      return library_.all_reduce(send, recv, static_cast<size_t>(count), data_type(dtype).type, reduce_op_of(op, dtype),
                                 comm, stream);
    });
  }

  int32_t all_gather(const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) override {
    return enqueue(group, "ncclAllGather", [&](Comm comm, Stream stream) {
      return library_.all_gather(send, recv, static_cast<size_t>(count), data_type(dtype).type, comm, stream);
    });
  }

  int32_t reduce_scatter(const void *send, void *recv, int64_t count, int32_t dtype, int32_t op,
                         int32_t group) override {
    return enqueue(group, "ncclReduceScatter", [&](Comm comm, Stream stream) {
      return library_.reduce_scatter(send, recv, static_cast<size_t>(count), data_type(dtype).type,
                                     reduce_op_of(op, dtype), comm, stream);
    });
  }

  int32_t broadcast(const void *send, void *recv, int64_t count, int32_t dtype, int32_t root, int32_t group) override {
    // Only the root's buffer is read, but NCCL requires an address from all ranks.
    const void *source = send == nullptr ? recv : send;
    return enqueue(group, "ncclBroadcast", [&](Comm comm, Stream stream) {
      return library_.broadcast(source, recv, static_cast<size_t>(count), data_type(dtype).type, root, comm, stream);
    });
  }

  int32_t all_to_all(const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) override {
    const Comm comm = comm_of(group);
    if (comm == nullptr) return HIDET_DIST_FAILED;
    const Stream stream = here();
    const DataType type = data_type(dtype);
    const auto elements = static_cast<size_t>(count);
    return exchange(comm, kMessages, [&](auto enqueue) {
      for (int64_t group_rank = 0; group_rank < mesh_.group_size(group); ++group_rank) {
        const size_t offset = static_cast<size_t>(group_rank) * elements * type.bytes;
        enqueue(library_.send(at(send, offset), elements, type.type, static_cast<int>(group_rank), comm, stream));
        enqueue(library_.recv(at(recv, offset), elements, type.type, static_cast<int>(group_rank), comm, stream));
      }
    });
  }

  // A broadcast for each part: each byte passes each link of NCCL's ring once.
  int32_t all_gather_parts(const void *send, void *recv, const int64_t *joined, int64_t unit, int32_t dtype,
                           int32_t group) override {
    const auto own = static_cast<int>(mesh_.group_rank(group));
    return on_parts(group, joined, unit, dtype, kBroadcasts,
                    [&](int rank, size_t offset, size_t count, nccl::DataType type, Comm comm, Stream stream) {
                      char *part = at(recv, offset);
                      return library_.broadcast(rank == own ? send : part, part, count, type, rank, comm, stream);
                    });
  }

  // A reduction to each rank: each byte passes each link of NCCL's ring once.
  int32_t reduce_scatter_parts(const void *send, void *recv, const int64_t *split, int64_t unit, int32_t dtype,
                               int32_t op, int32_t group) override {
    const nccl::RedOp reduce_op = reduce_op_of(op, dtype);
    return on_parts(group, split, unit, dtype, kReductions,
                    [&](int rank, size_t offset, size_t count, nccl::DataType type, Comm comm, Stream stream) {
                      return library_.reduce(at(send, offset), recv, count, type, reduce_op, rank, comm, stream);
                    });
  }

  int32_t all_to_all_v(const void *send, void *recv, const int64_t *counts, int64_t unit, int32_t dtype,
                       int32_t group) override {
    const Comm comm = comm_of(group);
    if (comm == nullptr) return HIDET_DIST_FAILED;
    const Stream stream = here();
    const DataType type = data_type(dtype);
    const int64_t own = mesh_.group_rank(group), ranks = mesh_.group_size(group);
    return exchange(comm, kMessages, [&](auto enqueue) {
      size_t sent = 0, received = 0;
      for (int64_t group_rank = 0; group_rank < ranks; ++group_rank) {
        const auto peer = static_cast<int>(group_rank);
        const auto out = static_cast<size_t>(counts[own * ranks + group_rank] * unit);
        const auto in = static_cast<size_t>(counts[group_rank * ranks + own] * unit);
        if (out > 0) enqueue(library_.send(at(send, sent), out, type.type, peer, comm, stream));
        if (in > 0) enqueue(library_.recv(at(recv, received), in, type.type, peer, comm, stream));
        sent += out * type.bytes;
        received += in * type.bytes;
      }
    });
  }

  int32_t send_recv(const void *send, int64_t send_count, int32_t to, void *recv, int64_t recv_count, int32_t from,
                    int32_t dtype) override {
    const Comm comm = comm_of(whole_);
    if (comm == nullptr) return HIDET_DIST_FAILED;
    const Stream stream = here();
    const nccl::DataType type = data_type(dtype).type;
    return exchange(comm, kMessages, [&](auto enqueue) {
      if (to != HIDET_DIST_NOBODY)
        enqueue(library_.send(send, static_cast<size_t>(send_count), type, to, comm, stream));
      if (from != HIDET_DIST_NOBODY) {
        enqueue(library_.recv(recv, static_cast<size_t>(recv_count), type, from, comm, stream));
      }
    });
  }

  int32_t copy(const void *send, void *recv, int64_t bytes) override {
    const int error =
        library_.cu_memcpy_async(reinterpret_cast<nccl::DevicePointer>(recv),
                                 reinterpret_cast<nccl::DevicePointer>(send), static_cast<size_t>(bytes), here());
    return error == 0 ? HIDET_DIST_OK : fail_with_cuda(error, "cuMemcpyAsync");
  }

  // The process waits first, because it detects failures: the copy would wait for a kernel of NCCL's that hangs.
  int32_t read(const void *source, void *target, int64_t bytes) override {
    library_.cu_ctx_set_current(context_);
    const Stream stream = current_stream_();
    int capturing = 0;
    int error = library_.cu_stream_is_capturing(stream, &capturing);
    if (error != 0) return fail_with_cuda(error, "cuStreamIsCapturing");
    if (capturing != 0) return fail("the host cannot read what a stream computes while it is captured", false);
    if (const int32_t status = settle_(); status != HIDET_DIST_OK) return status;
    error = library_.cu_memcpy_dtoh_async(target, reinterpret_cast<nccl::DevicePointer>(source),
                                          static_cast<size_t>(bytes), stream);
    return error == 0 ? settle_() : fail_with_cuda(error, "cuMemcpyDtoHAsync");
  }

  // NCCL nests groups: a message within this one is enqueued at its end.
  int32_t group_begin() {
    if (closed_) return fail("the transport is closed", false);
    const Result result = library_.group_start();
    if (result != nccl::kSuccess) return fail_with(result, "ncclGroupStart", nullptr);
    grouped_ = true;
    return HIDET_DIST_OK;
  }

  int32_t group_end() {
    if (!grouped_) return fail("no group of messages was begun", false);
    const Result result = library_.group_end();
    grouped_ = false;
    if (closed_) {  // it failed meanwhile, while its communicators could not be aborted
      abort();
      return HIDET_DIST_FAILED;
    }
    return settle(comms_[whole_]->comm, result, kMessages);
  }

  Stream internal_stream() const { return internal_stream_; }

  // Collectives run on a separate stream, which first waits for the current one. The event may be recorded again at
  // once: the wait refers to its record at the time of the call.
  int32_t fork() {
    library_.cu_ctx_set_current(context_);
    if (side_stream_ == nullptr) {
      const int error = library_.cu_stream_create(&side_stream_, nccl::kNonBlockingStream);
      if (error != 0) return fail_with_cuda(error, "cuStreamCreate");
    }
    const Event event = recorded(current_stream_());
    if (event == nullptr) return HIDET_DIST_FAILED;
    idle_events_.push_back(event);
    const int error = library_.cu_stream_wait_event(side_stream_, event, 0);
    if (error != 0) return fail_with_cuda(error, "cuStreamWaitEvent");
    forked_ = true;
    return HIDET_DIST_OK;
  }

  int32_t mark(int64_t ticket) {
    forked_ = false;
    const Event event = recorded(side_stream_);
    if (event == nullptr) return HIDET_DIST_FAILED;
    events_[ticket] = event;
    return HIDET_DIST_OK;
  }

  int32_t wait_for(int64_t ticket) {
    const auto end = events_.upper_bound(ticket);
    const auto entry = events_.find(ticket);
    if (entry == events_.end()) return fail("there is no ticket " + std::to_string(ticket), false);
    const int error = library_.cu_stream_wait_event(current_stream_(), entry->second, 0);
    for (auto each = events_.begin(); each != end; ++each) idle_events_.push_back(each->second);
    events_.erase(events_.begin(), end);
    return error == 0 ? HIDET_DIST_OK : fail_with_cuda(error, "cuStreamWaitEvent");
  }

  void close() {
    if (closed_) return;
    closed_ = true;
    library_.cu_ctx_set_current(context_);
    // A communicator in the making can only be aborted.
    if (pending_ != nullptr || failed_meanwhile()) return abort();
    std::vector<Comm> comms = take_comms();
    std::vector<Comm> left;
    const auto start = Clock::now();
    for (const Comm comm : comms) {
      Result state = library_.comm_finalize(comm);
      while (state == nccl::kInProgress && Clock::now() - start < kClosing) {
        pause(start);
        if (library_.comm_get_async_error(comm, &state) != nccl::kSuccess) state = nccl::kInternalError;
      }
      if (state == nccl::kSuccess) {
        library_.comm_destroy(comm);
      } else {
        left.push_back(comm);
      }
    }
    abort(left);
  }

  static void fail_current(const std::string &message) {
    if (auto *communicator = hidet_dist::current(); communicator != nullptr) communicator->fail(message);
    hidet_dist::set_last_error(message);
  }

 private:
  struct Slot {
    Comm comm = nullptr;  // written by NCCL, so it stays where it is
    bool ready = false;
  };

  Slot *add(int32_t group) {
    std::unique_ptr<Slot> &slot = comms_[key(group)];
    slot = std::make_unique<Slot>();
    return slot.get();
  }

  // The stream on which a collective is enqueued.
  Stream here() const { return forked_ ? side_stream_ : current_stream_(); }

  // Records an event behind the present work of a stream; null after a failure.
  Event recorded(Stream stream) {
    Event event = nullptr;
    if (!idle_events_.empty()) {
      event = idle_events_.back();
      idle_events_.pop_back();
    } else if (const int error = library_.cu_event_create(&event, nccl::kNoTiming); error != 0) {
      fail_with_cuda(error, "cuEventCreate");
      return nullptr;
    }
    const int error = library_.cu_event_record(event, stream);
    if (error == 0) return event;
    idle_events_.push_back(event);
    fail_with_cuda(error, "cuEventRecord");
    return nullptr;
  }

  // Axes of one device make no difference between groups.
  int32_t key(int32_t group) const { return group & whole_; }

  // The communicator of a group, made now if need be, or null after a failure.
  Comm comm_of(int32_t group) {
    if (!has(group)) {
      int capturing = 0;
      const int error = library_.cu_stream_is_capturing(here(), &capturing);
      if (closed_ || error != 0 || capturing != 0) {
        fail(closed_ ? "the transport is closed"
                     : "group " + std::to_string(group) +
                           " has no communicator of NCCL's, and none can be made while a stream is captured: warm up",
             false);
        return nullptr;
      }
      if (connect_(group) != HIDET_DIST_OK) return nullptr;
      if (!has(group)) {
        fail("the process did not make the communicator of group " + std::to_string(group), false);
        return nullptr;
      }
    }
    used_ |= group;
    recent_ |= group;
    library_.cu_ctx_set_current(context_);
    return comms_[key(group)]->comm;
  }

  template <typename Call>
  int32_t enqueue(int32_t group, const char *what, Call call) {
    const Comm comm = comm_of(group);
    return comm == nullptr ? HIDET_DIST_FAILED : settle(comm, call(comm, here()), what);
  }

  // Waits until CUDA reports, by `query`, that work is over.
  template <typename Query>
  int32_t wait_while(Query query, const char *what, std::chrono::nanoseconds seconds) {
    // The peers of the failed collective are kept.
    if (failed_meanwhile()) return fail("the communicator failed meanwhile", false);
    const auto start = Clock::now();
    if (!waits_) waited_ = ActiveTime();
    waits_ = true;
    auto *communicator = hidet_dist::current();
    // A graph that is launched again uses groups without calling the transport.
    if (communicator != nullptr && used_ != 0) communicator->await(recent_ != 0 ? recent_ : used_);
    library_.cu_ctx_set_current(context_);
    while (true) {
      const int state = closed_ ? 0 : query();
      if (state != 0 && state != nccl::kCudaNotReady) return fail_with_cuda(state, what);
      const int32_t status = check();
      if (status != HIDET_DIST_OK) return status;
      if (state == 0) break;
      if (waited_.so_far() > timeout_) {
        return fail("timed out after " + in_seconds(timeout_) + ", " + what, true);
      }
      if (Clock::now() - start > seconds) return HIDET_DIST_NCCL_IN_PROGRESS;
      pause(start);
    }
    waits_ = false;
    recent_ = 0;
    if (communicator != nullptr) communicator->end();
    return HIDET_DIST_OK;
  }

  // Runs calls as one operation of NCCL.
  template <typename Calls>
  int32_t exchange(Comm comm, const char *what, Calls calls) {
    Result first = library_.group_start();
    calls([&](Result result) {
      if (first == nccl::kSuccess && result != nccl::kInProgress) first = result;
    });
    const Result end = library_.group_end();
    return settle(comm, first == nccl::kSuccess ? end : first, what);
  }

  // Runs a collective for each part, as one operation of NCCL: call(group rank, offset in bytes, elements, ...).
  template <typename Call>
  int32_t on_parts(int32_t group, const int64_t *sizes, int64_t unit, int32_t dtype, const char *what, Call call) {
    const Comm comm = comm_of(group);
    if (comm == nullptr) return HIDET_DIST_FAILED;
    const Stream stream = here();
    const DataType type = data_type(dtype);
    return exchange(comm, what, [&](auto enqueue) {
      size_t offset = 0;
      for (int64_t group_rank = 0; group_rank < mesh_.group_size(group); ++group_rank) {
        const auto count = static_cast<size_t>(sizes[group_rank] * unit);
        if (count > 0) enqueue(call(static_cast<int>(group_rank), offset, count, type.type, comm, stream));
        offset += count * type.bytes;
      }
    });
  }

  // Waits until NCCL has enqueued an operation on its stream, so that later work cannot overtake it.
  int32_t settle(Comm comm, Result result, const char *what) {
    const auto start = Clock::now();
    ActiveTime waited;
    while (result == nccl::kInProgress) {
      Result state = nccl::kSuccess;
      const Result polled = library_.comm_get_async_error(comm, &state);
      result = polled == nccl::kSuccess ? state : polled;
      if (result != nccl::kInProgress) break;
      if (failed_meanwhile()) return fail("the communicator failed meanwhile", false);
      if (waited.so_far() > timeout_) {
        return fail(std::string(what) + " timed out after " + in_seconds(timeout_), true);
      }
      pause(start);
    }
    return result == nccl::kSuccess ? HIDET_DIST_OK : fail_with(result, what, comm);
  }

  // Whether no failure is known.
  int32_t check() {
    if (failed_meanwhile()) return fail("the communicator failed meanwhile", false);
    for (auto &[group, slot] : comms_) {
      if (!slot->ready) continue;
      Result state = nccl::kSuccess;
      const Result polled = library_.comm_get_async_error(slot->comm, &state);
      const Result result = polled == nccl::kSuccess ? state : polled;
      if (result != nccl::kSuccess && result != nccl::kInProgress) return fail_with(result, "a collective", slot->comm);
    }
    return HIDET_DIST_OK;
  }

  int32_t fail(const std::string &message, bool by_peer) {
    waits_ = false;
    if (by_peer && !failed_meanwhile()) blame_peer();
    fail_current(message);
    if (grouped_) {  // NCCL may use them until the group's end
      closed_ = true;
    } else {
      abort();
    }
    return HIDET_DIST_FAILED;
  }

  int32_t fail_with(Result result, const char *what, Comm comm) {
    std::string message = std::string(what) + " failed: " + library_.get_error_string(result);
    const char *detail = comm == nullptr ? nullptr : library_.get_last_error(comm);
    if (detail != nullptr && *detail != '\0') message += std::string(" (") + detail + ")";
    // Wrong arguments and CUDA errors are caused by this rank. NCCL reports a broken connection as a system error.
    const bool is_local =
        result == nccl::kInvalidArgument || result == nccl::kInvalidUsage || result == nccl::kUnhandledCudaError;
    return fail(message, !is_local);
  }

  int32_t fail_with_cuda(int error, const char *what) {
    const char *text = nullptr;
    library_.cu_get_error_string(error, &text);
    return fail(std::string(what) + " failed: " + (text == nullptr ? "CUDA error " + std::to_string(error) : text),
                false);
  }

  std::vector<Comm> take_comms() {
    std::vector<Comm> comms;
    for (auto &[group, slot] : comms_) {
      if (slot->comm != nullptr) comms.push_back(slot->comm);
      // NCCL may still write to it, at an unknown time.
      if (slot.get() == pending_) static_cast<void>(slot.release());
    }
    comms_.clear();
    pending_ = nullptr;
    pending_parent_ = nullptr;
    return comms;
  }

  void abort() { abort(take_comms()); }

  // Each in a separate thread: to free one, NCCL waits for the device, on which the kernels of another one may hang
  // until that one is aborted too. A thread that takes too long is abandoned.
  void abort(const std::vector<Comm> &comms) {
    closed_ = true;
    if (comms.empty()) return;
    struct Left {
      std::mutex mutex;
      std::condition_variable changed;
      size_t count;
    };
    const auto left = std::make_shared<Left>();
    left->count = comms.size();
    for (const Comm comm : comms) {
      std::thread([left, comm, &library = library_, context = context_] {
        library.cu_ctx_set_current(context);
        library.comm_abort(comm);
        const std::lock_guard<std::mutex> lock(left->mutex);
        --left->count;
        left->changed.notify_all();
      }).detach();
    }
    std::unique_lock<std::mutex> lock(left->mutex);
    left->changed.wait_for(lock, kClosing, [&] { return left->count == 0; });
  }

  const Library &library_;  // never unloaded
  const hidet_dist::Mesh mesh_;
  void *const context_;
  const int device_;
  const hidet_dist_nccl_stream current_stream_;
  const hidet_dist_nccl_connect connect_;
  const hidet_dist_nccl_settle settle_;
  int32_t whole_ = 0;  // the group of all ranks, without axes of one device
  std::map<int32_t, std::unique_ptr<Slot>> comms_;
  Slot *pending_ = nullptr;
  Comm pending_parent_ = nullptr;
  int32_t used_ = 0;  // the mesh axes of all groups used so far
  int32_t recent_ = 0;  // the mesh axes of the groups used since the last wait
  bool waits_ = false;
  ActiveTime waited_;
  bool closed_ = false;
  bool grouped_ = false;  // within a group of messages
  Stream internal_stream_ = nullptr;
  Stream side_stream_ = nullptr;  // of collectives beside computation
  bool forked_ = false;
  std::map<int64_t, Event> events_;  // by ticket: the end of collectives that were not waited for yet
  std::vector<Event> idle_events_;
  nccl::DevicePointer scratch_ = 0;
};

namespace {

int32_t overlap_fork(void *context) { return static_cast<hidet_dist_nccl *>(context)->fork(); }

int32_t overlap_mark(void *context, int64_t ticket) { return static_cast<hidet_dist_nccl *>(context)->mark(ticket); }

int32_t overlap_wait(void *context, int64_t ticket) {
  return static_cast<hidet_dist_nccl *>(context)->wait_for(ticket);
}

// The loaded libraries, or null after setting an error.
const Library *loaded_library() {
  const Library *library = nccl::library();
  if (library == nullptr) hidet_dist::set_last_error("NCCL is not loaded");
  return library;
}

// Whether a call of the driver succeeded.
bool succeeded(const Library &library, int error, const char *what) {
  if (error == 0) return true;
  const char *text = nullptr;
  library.cu_get_error_string(error, &text);
  hidet_dist::set_last_error(std::string(what) + " failed: " + (text == nullptr ? std::to_string(error) : text));
  return false;
}

}  // namespace

extern "C" {

int32_t hidet_dist_nccl_load(const char *nccl_path, const char *driver_path) {
  std::string problem;
  const int version = nccl::load(nccl_path, driver_path, &problem);
  if (version == 0) hidet_dist::set_last_error(problem);
  return version;
}

int32_t hidet_dist_nccl_device_count(void) {
  const Library *library = loaded_library();
  int count = 0;
  if (library == nullptr || !succeeded(*library, library->cu_device_get_count(&count), "cuDeviceGetCount")) return -1;
  return count;
}

int32_t hidet_dist_nccl_device_uuid(int32_t device, char *uuid) {
  const Library *library = loaded_library();
  int number = 0;
  const bool known = library != nullptr &&
                     succeeded(*library, library->cu_device_get(&number, device), "cuDeviceGet") &&
                     succeeded(*library, library->cu_device_get_uuid(uuid, number), "cuDeviceGetUuid");
  return known ? HIDET_DIST_OK : HIDET_DIST_FAILED;
}

int32_t hidet_dist_nccl_unique_id(char *id) {
  const Library *library = loaded_library();
  if (library == nullptr) return HIDET_DIST_FAILED;
  nccl::UniqueId unique;
  const Result result = library->get_unique_id(&unique);
  if (result != nccl::kSuccess) {
    hidet_dist::set_last_error(std::string("ncclGetUniqueId failed: ") + library->get_error_string(result));
    return HIDET_DIST_FAILED;
  }
  std::memcpy(id, unique.internal, sizeof unique.internal);
  return HIDET_DIST_OK;
}

hidet_dist_nccl *hidet_dist_nccl_create(const int64_t *mesh_shape, int32_t mesh_axes, int64_t rank, int32_t device,
                                        hidet_dist_nccl_stream stream, hidet_dist_nccl_connect connect,
                                        hidet_dist_nccl_settle settle, double timeout_seconds) {
  const Library *library = loaded_library();
  if (library == nullptr) return nullptr;
  if (stream == nullptr || connect == nullptr || settle == nullptr || !(timeout_seconds > 0)) {
    hidet_dist::set_last_error("a transport needs a stream, ways to connect and to wait, and a time-out above 0");
    return nullptr;
  }
  int number = 0;
  void *context = nullptr;
  if (!succeeded(*library, library->cu_device_get(&number, device), "cuDeviceGet") ||
      !succeeded(*library, library->cu_device_primary_ctx_retain(&context, number), "cuDevicePrimaryCtxRetain") ||
      !succeeded(*library, library->cu_ctx_set_current(context), "cuCtxSetCurrent")) {
    return nullptr;
  }
  return new hidet_dist_nccl(*library, {std::vector<int64_t>(mesh_shape, mesh_shape + mesh_axes), rank}, context,
                             number, stream, connect, settle, hidet_dist::from_seconds(timeout_seconds));
}

void hidet_dist_nccl_table(hidet_dist_nccl *transport, hidet_dist_transport *table) { *table = transport->table(); }

void hidet_dist_nccl_overlap(hidet_dist_nccl *transport, hidet_dist_overlap *overlap) {
  *overlap = hidet_dist_overlap{transport, overlap_fork, overlap_mark, overlap_wait};
}

int32_t hidet_dist_nccl_has(const hidet_dist_nccl *transport, int32_t group) { return transport->has(group) ? 1 : 0; }

void hidet_dist_nccl_await(const hidet_dist_nccl *transport) { transport->await(); }

int32_t hidet_dist_nccl_begin(hidet_dist_nccl *transport, int32_t group, const char *id) {
  return transport->begin(group, id);
}

int32_t hidet_dist_nccl_progress(hidet_dist_nccl *transport) { return transport->progress(); }

int32_t hidet_dist_nccl_warm_up(hidet_dist_nccl *transport, int32_t group) { return transport->warm_up(group); }

int32_t hidet_dist_nccl_group_begin(hidet_dist_nccl *transport) { return transport->group_begin(); }

int32_t hidet_dist_nccl_group_end(hidet_dist_nccl *transport) { return transport->group_end(); }

void *hidet_dist_nccl_internal_stream(const hidet_dist_nccl *transport) { return transport->internal_stream(); }

int32_t hidet_dist_nccl_wait(hidet_dist_nccl *transport, void *stream, double seconds) {
  return transport->wait(stream, hidet_dist::from_seconds(seconds));
}

int32_t hidet_dist_nccl_wait_event(hidet_dist_nccl *transport, void *event, double seconds) {
  return transport->wait_event(event, hidet_dist::from_seconds(seconds));
}

int32_t hidet_dist_nccl_failed_by_peer(const hidet_dist_nccl *transport) { return transport->failed_by_peer() ? 1 : 0; }

void hidet_dist_nccl_close(hidet_dist_nccl *transport) { transport->close(); }

void hidet_dist_nccl_destroy(hidet_dist_nccl *transport) { delete transport; }

}  // extern "C"
