// Stands in for NCCL where there is no GPU: exactly the functions that the native runtime uses, between real processes,
// which exchange data through files in a folder (FAKE_NCCL_DIR). Like NCCL with non-blocking communicators, it makes
// communicators, and sets connections up at the first operation, in threads of its own, and says kInProgress meanwhile.
//
// Each rank appends what it is told to do with communicators to the file log.RANK, and the collectives and messages that
// it is told to enqueue, with their bytes, to the file calls.RANK. FAKE_NCCL_VERSION is the version that
// it claims to be. A message blocks its sender's stream until it is received. With FAKE_NCCL_ERROR_AT=RANK:N, the N-th operation of that rank ends in an asynchronous error.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hidet_dist/collectives.h"
#include "nccl_library.hpp"
#include "reduce.hpp"

using namespace hidet_dist::nccl;

extern "C" int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data);

namespace {

// What a thread is left with when its communicator is aborted.
struct Aborted {};

std::string folder() { return std::getenv("FAKE_NCCL_DIR"); }

void write_file(const std::string &name, const std::string &content) {
  const std::string path = folder() + "/" + name;
  const std::string partial = path + ".partial" + std::to_string(getpid());
  std::ofstream(partial, std::ios::binary) << content;
  std::rename(partial.c_str(), path.c_str());
}

}  // namespace

struct ncclComm {
  std::string name;
  int rank = 0;
  int ranks = 0;
  int world_rank = 0;
  std::atomic<int> state{kInProgress};
  std::atomic<bool> aborted{false};
  std::atomic<bool> finalized{false};
  bool connected = false;
  int splits = 0;
  // Of operations, counted when they are run: a graph runs some again.
  int operations = 0;
  std::map<std::pair<int, int>, int> messages;
};

namespace {

void record(const ncclComm &comm, const std::string &line, const char *file_name = "log") {
  const std::string path = folder() + "/" + file_name + "." + std::to_string(comm.world_rank);
  const std::string text = line + "\n";
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (file < 0 || write(file, text.data(), text.size()) < 0) std::abort();
  close(file);
}

// A file that another rank writes at some time.
std::string await_file(const ncclComm &comm, const std::string &name) {
  const std::string path = folder() + "/" + name;
  while (access(path.c_str(), F_OK) != 0) {
    if (comm.aborted) throw Aborted{};
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// What every rank of a communicator has to say about something.
std::vector<std::string> share(const ncclComm &comm, const std::string &what, const std::string &own) {
  const std::string prefix = comm.name + "." + what + ".";
  write_file(prefix + std::to_string(comm.rank), own);
  std::vector<std::string> said;
  for (int rank = 0; rank < comm.ranks; ++rank) said.push_back(await_file(comm, prefix + std::to_string(rank)));
  return said;
}

void in_background(const std::function<void()> &work) {
  std::thread([work] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    try {
      work();
    } catch (const Aborted &) {
    }
  }).detach();
}

// The operations of a group, and the results of calls in it.
thread_local int group_depth = 0;
thread_local ncclComm *group_comm = nullptr;
thread_local Stream group_stream = nullptr;
thread_local std::vector<std::function<void()>> group_collectives;
thread_local std::vector<std::function<void()>> group_sends;
thread_local std::vector<std::function<void()>> group_receives;
thread_local std::vector<std::function<void()>> group_ends;  // that messages are received

Result refuse(const ncclComm *comm) {
  if (comm->aborted || comm->finalized) std::abort();  // memory that NCCL has freed
  const auto state = static_cast<Result>(comm->state.load());
  return state == kInProgress ? kInvalidUsage : state;
}

void fail_if_told(ncclComm *comm) {
  static std::atomic<int> count{0};
  const char *text = std::getenv("FAKE_NCCL_ERROR_AT");
  int rank = 0;
  int at = 0;
  if (text == nullptr || std::sscanf(text, "%d:%d", &rank, &at) != 2) return;
  if (rank == comm->world_rank && ++count == at) {
    comm->state = kRemoteError;
    while (!comm->aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    throw Aborted{};
  }
}

void launch(ncclComm *comm, Stream stream, const std::function<void()> &operation) {
  auto *work = new std::function<void()>([comm, operation] {
    try {
      if (comm->aborted) return;
      fail_if_told(comm);
      operation();
    } catch (const Aborted &) {
    }
  });
  cuLaunchHostFunc(stream, [](void *data) { (*static_cast<std::function<void()> *>(data))(); }, work);
}

Result enqueue(ncclComm *comm, Stream stream, const std::function<void()> &operation) {
  if (comm->connected) {
    launch(comm, stream, operation);
    return kSuccess;
  }
  comm->connected = true;
  comm->state = kInProgress;
  in_background([=] {
    launch(comm, stream, operation);
    int expected = kInProgress;
    comm->state.compare_exchange_strong(expected, kSuccess);
  });
  return kInProgress;
}

size_t size_of(DataType type) {
  switch (type) {
    case kInt64:
    case kFloat64:
      return 8;
    case kInt32:
    case kFloat32:
      return 4;
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt8:
    case kUint8:
      return 1;
  }
  std::abort();
}

template <typename Bits>
void drop_nan(std::vector<std::string> &copies, size_t count, Bits infinity) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  const auto bits = [&](size_t rank) { return reinterpret_cast<Bits *>(copies[rank].data()); };
  const auto is_nan = [&](Bits each) { return static_cast<Bits>(each & ~kSign) > infinity; };
  for (size_t i = 0; i < count; ++i) {
    size_t number = 0;
    while (number + 1 < copies.size() && is_nan(bits(number)[i])) ++number;
    for (size_t rank = 0; rank < copies.size(); ++rank) {
      if (is_nan(bits(rank)[i])) bits(rank)[i] = bits(number)[i];
    }
  }
}

// The sources of a maximum or minimum of floats, with numbers of other ranks in place of NaN: NCCL's result is NaN only
// where all ranks have it.
std::vector<std::string> without_nan(const std::vector<const char *> &sources, size_t bytes, size_t count,
                                     DataType type) {
  std::vector<std::string> copies;
  for (const char *source : sources) copies.emplace_back(source, bytes);
  if (type == kFloat16) drop_nan<uint16_t>(copies, count, 0x7c00);
  if (type == kBfloat16) drop_nan<uint16_t>(copies, count, 0x7f80);
  if (type == kFloat32) drop_nan<uint32_t>(copies, count, 0x7f800000);
  if (type == kFloat64) drop_nan<uint64_t>(copies, count, 0x7ff0000000000000);
  return copies;
}

void reduce(std::vector<const char *> sources, void *result, size_t count, DataType type, RedOp op) {
  const std::map<DataType, int> dtypes{{kInt8, HIDET_DIST_I8},       {kUint8, HIDET_DIST_U8},
                                       {kInt32, HIDET_DIST_I32},     {kInt64, HIDET_DIST_I64},
                                       {kFloat16, HIDET_DIST_F16},   {kFloat32, HIDET_DIST_F32},
                                       {kFloat64, HIDET_DIST_F64},   {kBfloat16, HIDET_DIST_BF16}};
  const std::map<RedOp, int> ops{{kSum, HIDET_DIST_SUM},
                                 {kProd, HIDET_DIST_PRODUCT},
                                 {kMax, HIDET_DIST_MAX},
                                 {kMin, HIDET_DIST_MIN},
                                 {kAvg, HIDET_DIST_MEAN}};
  std::vector<std::string> numbers;
  if (op == kMax || op == kMin) {
    numbers = without_nan(sources, count * size_of(type), count, type);
    for (size_t rank = 0; rank < numbers.size(); ++rank) sources[rank] = numbers[rank].data();
  }
  const std::vector<const void *> addresses(sources.begin(), sources.end());
  hidet_dist::reduce(addresses.data(), static_cast<int32_t>(addresses.size()), result, static_cast<int64_t>(count),
                     dtypes.at(type), ops.at(op));
}

// Whether an operation may be part of the current group, which is one of this communicator and stream.
Result join_group(ncclComm *comm, Stream stream) {
  if (group_comm != nullptr && (group_comm != comm || group_stream != stream)) return kInvalidUsage;
  group_comm = comm;
  group_stream = stream;
  return kSuccess;
}

// Every rank tells all others all that it has, and takes what it needs.
Result collective(ncclComm *comm, Stream stream, const std::string &signature, const void *send, size_t bytes,
                  const std::function<void(const std::vector<const char *> &)> &take) {
  if (const Result result = refuse(comm); result != kSuccess) return result;
  record(*comm, signature + (group_depth > 0 ? " grouped" : ""), "calls");
  const std::function<void()> operation = [=] {
    const std::string number = "operation" + std::to_string(comm->operations++);
    const std::string head = signature + std::string(64 - signature.size(), ' ');
    const std::vector<std::string> said = share(*comm, number, head + std::string(static_cast<const char *>(send), bytes));
    std::vector<const char *> data;
    for (const std::string &each : said) {
      if (each.compare(0, 64, head) != 0) {
        std::fprintf(stderr, "%s does not match %s\n", each.substr(0, 64).c_str(), signature.c_str());
        std::abort();
      }
      data.push_back(each.data() + 64);
    }
    take(data);
  };
  if (group_depth == 0) return enqueue(comm, stream, operation);
  if (const Result result = join_group(comm, stream); result != kSuccess) return result;
  group_collectives.push_back(operation);
  return kSuccess;
}

std::string sign(const char *what, size_t count, int type, int more = 0) {
  return std::string(what) + " " + std::to_string(count) + " " + std::to_string(type) + " " + std::to_string(more);
}

Result message(ncclComm *comm, Stream stream) {
  if (const Result result = refuse(comm); result != kSuccess) return result;
  return group_depth == 0 ? kInvalidUsage : join_group(comm, stream);
}

std::string message_name(ncclComm *comm, int from, int to, bool sends) {
  const int number = comm->messages[{sends ? -1 - to : from, to}]++;
  return comm->name + ".message." + std::to_string(from) + "." + std::to_string(to) + "." + std::to_string(number);
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API Result ncclGetVersion(int *version) {
  const char *text = std::getenv("FAKE_NCCL_VERSION");
  *version = text == nullptr ? 23203 : std::atoi(text);
  return kSuccess;
}

API Result ncclGetUniqueId(UniqueId *id) {
  std::random_device random;
  std::snprintf(id->internal, sizeof id->internal, "comm%08x%08x", random(), random());
  return kSuccess;
}

API Result ncclCommInitRankConfig(Comm *comm, int ranks, UniqueId id, int rank, Config *config) {
  const bool known = config->size >= sizeof(Config) && config->magic == 0xcafebeef && config->version >= 21400;
  if (!known || config->blocking != 0) return kInvalidArgument;
  *comm = new ncclComm;
  (*comm)->name = id.internal;
  (*comm)->ranks = ranks;
  (*comm)->rank = (*comm)->world_rank = rank;
  record(**comm, "init " + std::to_string(ranks));
  in_background([comm = *comm] {
    share(*comm, "init", "");
    comm->state = kSuccess;
  });
  return kInProgress;
}

API Result ncclCommSplit(Comm comm, int color, int key, Comm *split, Config *config) {
  if (const Result result = refuse(comm); result != kSuccess) return result;
  if (config != nullptr) return kInvalidArgument;
  record(*comm, "split " + std::to_string(color));
  comm->state = kInProgress;
  const std::string number = "split" + std::to_string(comm->splits++);
  in_background([=] {
    const std::string own = std::to_string(color) + " " + std::to_string(key);
    auto *child = new ncclComm;
    child->name = comm->name + "." + number + "." + std::to_string(color);
    child->world_rank = comm->world_rank;
    for (const std::string &said : share(*comm, number, own)) {
      int other_color = 0;
      int other_key = 0;
      std::sscanf(said.c_str(), "%d %d", &other_color, &other_key);
      if (other_color != color) continue;
      child->ranks += 1;
      child->rank += other_key < key ? 1 : 0;
    }
    *split = child;
    comm->state = kSuccess;
    share(*child, "init", "");
    child->state = kSuccess;
  });
  return kInProgress;
}

API Result ncclCommGetAsyncError(Comm comm, Result *state) {
  if (comm->aborted) std::abort();
  *state = static_cast<Result>(comm->state.load());
  return kSuccess;
}

API Result ncclCommAbort(Comm comm) {
  if (comm->aborted.exchange(true)) std::abort();
  record(*comm, "abort");
  return kSuccess;
}

API Result ncclCommFinalize(Comm comm) {
  if (const Result result = refuse(comm); result != kSuccess) return result;
  record(*comm, "finalize");
  comm->finalized = true;
  comm->state = kInProgress;
  in_background([comm] { comm->state = kSuccess; });
  return kInProgress;
}

API Result ncclCommDestroy(Comm comm) {
  if (!comm->finalized || comm->state != kSuccess) std::abort();
  record(*comm, "destroy");
  return kSuccess;
}

API Result ncclAllReduce(const void *send, void *recv, size_t count, DataType type, RedOp op, Comm comm, Stream stream) {
  return collective(comm, stream, sign("all-reduce", count, type, op), send, count * size_of(type),
                    [=](const std::vector<const char *> &data) { reduce(data, recv, count, type, op); });
}

API Result ncclAllGather(const void *send, void *recv, size_t count, DataType type, Comm comm, Stream stream) {
  const size_t bytes = count * size_of(type);
  return collective(comm, stream, sign("all-gather", count, type), send, bytes, [=](const std::vector<const char *> &data) {
    for (size_t rank = 0; rank < data.size(); ++rank) std::memcpy(static_cast<char *>(recv) + rank * bytes, data[rank], bytes);
  });
}

API Result ncclReduceScatter(const void *send, void *recv, size_t count, DataType type, RedOp op, Comm comm,
                             Stream stream) {
  const size_t bytes = count * size_of(type);
  return collective(comm, stream, sign("reduce-scatter", count, type, op), send,
                    bytes * static_cast<size_t>(comm->ranks), [=](std::vector<const char *> data) {
                      for (const char *&each : data) each += static_cast<size_t>(comm->rank) * bytes;
                      reduce(data, recv, count, type, op);
                    });
}

API Result ncclBroadcast(const void *send, void *recv, size_t count, DataType type, int root, Comm comm, Stream stream) {
  const size_t bytes = count * size_of(type);
  return collective(comm, stream, sign("broadcast", count, type, root), send, comm->rank == root ? bytes : 0,
                    [=](const std::vector<const char *> &data) {
                      std::memcpy(recv, data[static_cast<size_t>(root)], bytes);
                    });
}

API Result ncclReduce(const void *send, void *recv, size_t count, DataType type, RedOp op, int root, Comm comm,
                      Stream stream) {
  return collective(comm, stream, sign("reduce", count, type, root), send, count * size_of(type),
                    [=](const std::vector<const char *> &data) {
                      if (comm->rank == root) reduce(data, recv, count, type, op);
                    });
}

API Result ncclSend(const void *send, size_t count, DataType type, int peer, Comm comm, Stream stream) {
  if (const Result result = message(comm, stream); result != kSuccess) return result;
  record(*comm, sign("send", count, type, peer) + " grouped", "calls");
  const auto name = std::make_shared<std::string>();
  group_sends.push_back([=] {
    *name = message_name(comm, comm->rank, peer, true);
    write_file(*name, {static_cast<const char *>(send), count * size_of(type)});
  });
  group_ends.push_back([=] { await_file(*comm, *name + ".taken"); });
  return kSuccess;
}

API Result ncclRecv(void *recv, size_t count, DataType type, int peer, Comm comm, Stream stream) {
  if (const Result result = message(comm, stream); result != kSuccess) return result;
  group_receives.push_back([=] {
    const std::string name = message_name(comm, peer, comm->rank, false);
    const std::string data = await_file(*comm, name);
    std::memcpy(recv, data.data(), std::min(data.size(), count * size_of(type)));
    write_file(name + ".taken", "");
  });
  return kSuccess;
}

API Result ncclGroupStart() {
  ++group_depth;
  return kSuccess;
}

API Result ncclGroupEnd() {
  if (--group_depth > 0) return kSuccess;
  std::vector<std::function<void()>> operations = std::exchange(group_collectives, {});
  for (auto &send : std::exchange(group_sends, {})) operations.push_back(std::move(send));
  for (auto &receive : std::exchange(group_receives, {})) operations.push_back(std::move(receive));
  for (auto &end : std::exchange(group_ends, {})) operations.push_back(std::move(end));
  ncclComm *comm = std::exchange(group_comm, nullptr);
  if (comm == nullptr) return kSuccess;
  return enqueue(comm, group_stream, [operations] {
    for (const auto &operation : operations) operation();
  });
}

API const char *ncclGetErrorString(Result result) {
  return result == kRemoteError ? "remote process exited or there was a network error" : "some error of NCCL's";
}

API const char *ncclGetLastError(Comm) { return "the stand-in was told to fail"; }
