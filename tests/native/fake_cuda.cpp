// Stands in for the CUDA driver where there is no GPU: exactly the functions that the native runtime and the stand-in for
// NCCL use, and those that tests use to make streams and graphs. Device memory is host memory, a stream is a queue that
// a thread works off, and a graph is a list of functions. With FAKE_CUDA_SYNCHRONOUS=1 a call waits for what it puts on
// a stream, so that functions of the host can stand in for kernels: they read and write in their turn. Memory is cleared
// some time later with FAKE_CUDA_CLEARS_LATE=1; freeing it before that ends the process.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <cstdio>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Function = std::function<void()>;

constexpr int kInvalidValue = 1;
constexpr int kInvalidDevice = 101;
constexpr int kNotReady = 600;
constexpr int kCaptureUnsupported = 900;
constexpr int kCaptureUnjoined = 904;

// Never destroyed: the streams' threads wait on them when the process ends.
std::mutex &mutex = *new std::mutex;
std::condition_variable &changed = *new std::condition_variable;
int captures = 0;

struct Stream {
  Stream() {
    std::thread([this] { run(); }).detach();
  }

  // With the mutex held.
  void add(Function function) {
    if (origin != nullptr) {  // in the order of the calls, which is one of those that the graph allows
      origin->captured.push_back(std::move(function));
      unjoined = true;
      return;
    }
    if (capturing) {
      captured.push_back(std::move(function));
      return;
    }
    queue.push_back(std::move(function));
    changed.notify_all();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return !queue.empty(); });
      const Function function = queue.front();
      lock.unlock();
      function();
      lock.lock();
      queue.pop_front();
      changed.notify_all();
    }
  }

  std::deque<Function> queue;  // the first one is being run
  bool capturing = false;
  std::vector<Function> captured;
  Stream *origin = nullptr;  // whose capture it takes part in, since it waited for an event of it
  bool unjoined = false;     // whether it has work that the origin does not wait for
};

using Clock = std::chrono::steady_clock;

// A number of times that it was recorded, and passed.
struct Event {
  int64_t recorded = 0;
  int64_t passed = 0;
  Clock::time_point time;     // when it was passed
  Stream *capture = nullptr;  // the captured stream that it was recorded on last
};

std::vector<Stream *> joining;  // the streams that take part in a capture

Stream *default_stream() {
  static Stream *stream = new Stream;
  return stream;
}

Stream &of(void *handle) { return handle == nullptr ? *default_stream() : *static_cast<Stream *>(handle); }

int device_count() {
  const char *text = std::getenv("FAKE_CUDA_DEVICES");
  return text == nullptr ? 8 : std::atoi(text);
}

std::vector<unsigned long long> to_be_cleared;  // the beginnings of memory, outside captures

void *current_stream = nullptr;
thread_local void *current_context = nullptr;

bool is_synchronous() {
  static const bool is = std::getenv("FAKE_CUDA_SYNCHRONOUS") != nullptr;
  return is;
}

void put(void *handle, const Function &function) {
  std::unique_lock<std::mutex> lock(mutex);
  Stream &stream = of(handle);
  stream.add(function);
  if (is_synchronous()) changed.wait(lock, [&stream] { return stream.queue.empty(); });
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int cuInit(unsigned int) { return 0; }

API int cuDeviceGetCount(int *count) {
  *count = device_count();
  return 0;
}

API int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < device_count() ? 0 : kInvalidDevice;
}

API int cuDeviceGetUuid_v2(char *uuid, int device) {
  std::memset(uuid, device, 16);
  return 0;
}

API int cuDevicePrimaryCtxRetain(void **context, int) {
  static int any;
  *context = &any;
  return 0;
}

API int cuDevicePrimaryCtxRelease_v2(int) { return 0; }

API int cuCtxSetCurrent(void *context) {
  current_context = context;
  return 0;
}

API int cuCtxGetCurrent(void **context) {
  *context = current_context;
  return 0;
}

API int cuDeviceGetName(char *name, int size, int) {
  std::snprintf(name, static_cast<size_t>(size), "Stand-in");
  return 0;
}

API int cuDeviceGetAttribute(int *value, int attribute, int) {
  *value = attribute == 75 ? 9 : 0;  // compute capability 9.0
  return 0;
}

API int cuStreamCreate(void **stream, unsigned int) {
  *stream = new Stream;
  return 0;
}

API int cuStreamDestroy_v2(void *) { return 0; }  // its thread may be at work yet

API int cuStreamQuery(void *stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (of(stream).capturing) return kCaptureUnsupported;
  return of(stream).queue.empty() ? 0 : kNotReady;
}

API int cuStreamIsCapturing(void *stream, int *status) {
  const std::lock_guard<std::mutex> lock(mutex);
  *status = of(stream).capturing || of(stream).origin != nullptr ? 1 : 0;
  return 0;
}

API int cuEventCreate(void **event, unsigned int) {
  *event = new Event;
  return 0;
}

API int cuEventDestroy_v2(void *) { return 0; }  // a stream may wait for it yet

API int cuEventRecord(void *handle, void *stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto *event = static_cast<Event *>(handle);
  Stream &own = of(stream);
  if (own.capturing || own.origin != nullptr) {
    event->capture = &own;
    return 0;
  }
  event->capture = nullptr;
  const int64_t number = ++event->recorded;
  own.add([event, number] {
    const std::lock_guard<std::mutex> inner(mutex);
    event->passed = number;
    event->time = Clock::now();
    changed.notify_all();
  });
  return 0;
}

API int cuStreamWaitEvent(void *stream, void *handle, unsigned int) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto *event = static_cast<Event *>(handle);
  Stream &own = of(stream);
  if (event->capture != nullptr) {
    Stream *captured = event->capture;
    if (captured->origin == &own) {
      captured->unjoined = false;
    } else if (captured->capturing && !own.capturing) {
      own.origin = captured;
      joining.push_back(&own);
    } else {
      return kCaptureUnsupported;
    }
    return 0;
  }
  if (own.capturing || own.origin != nullptr) return kCaptureUnsupported;
  const int64_t number = event->recorded;
  own.add([event, number] {
    std::unique_lock<std::mutex> inner(mutex);
    changed.wait(inner, [event, number] { return event->passed >= number; });
  });
  return 0;
}

API int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
  put(stream, [function, data] { function(data); });
  return 0;
}

API int cuMemcpyAsync(unsigned long long target, unsigned long long source, size_t bytes, void *stream) {
  put(stream, [=] { std::memcpy(reinterpret_cast<void *>(target), reinterpret_cast<void *>(source), bytes); });
  return 0;
}

API int cuMemcpyDtoHAsync_v2(void *target, unsigned long long source, size_t bytes, void *stream) {
  put(stream, [=] { std::memcpy(target, reinterpret_cast<void *>(source), bytes); });
  return 0;
}

// CUDA_MEMCPY2D of the driver API.
struct RowsCopy {
  size_t source_x, source_y;
  unsigned int source_type;
  const void *source_host;
  unsigned long long source;
  void *source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  unsigned int target_type;
  void *target_host;
  unsigned long long target;
  void *target_array;
  size_t target_pitch;
  size_t width, height;
};

API int cuMemcpy2DAsync_v2(const RowsCopy *given, void *stream) {
  constexpr unsigned int kUnified = 4;
  const RowsCopy copy = *given;
  const bool known = copy.source_type == kUnified && copy.target_type == kUnified && copy.source_x == 0 &&
                     copy.source_y == 0 && copy.target_x == 0 && copy.target_y == 0;
  if (!known || copy.source_pitch < copy.width || copy.target_pitch < copy.width) return kInvalidValue;
  put(stream, [copy] {
    for (size_t row = 0; row < copy.height; ++row) {
      std::memcpy(reinterpret_cast<char *>(copy.target) + row * copy.target_pitch,
                  reinterpret_cast<const char *>(copy.source) + row * copy.source_pitch, copy.width);
    }
  });
  return 0;
}

API int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (captures > 0) return kCaptureUnsupported;
  *pointer = reinterpret_cast<unsigned long long>(std::calloc(1, bytes));
  return 0;
}

API int cuMemAllocAsync(unsigned long long *pointer, size_t bytes, void *) {
  *pointer = reinterpret_cast<unsigned long long>(std::calloc(1, bytes));
  return 0;
}

API int cuMemFree_v2(unsigned long long pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (std::find(to_be_cleared.begin(), to_be_cleared.end(), pointer) != to_be_cleared.end()) {
    std::fprintf(stderr, "memory is freed before it was cleared\n");
    std::abort();
  }
  std::free(reinterpret_cast<void *>(pointer));
  return 0;
}

API int cuMemAllocHost_v2(void **pointer, size_t bytes) {
  *pointer = std::calloc(1, bytes);
  return 0;
}

API int cuMemFreeHost(void *pointer) {
  std::free(pointer);
  return 0;
}

API int cuMemsetD8Async(unsigned long long target, unsigned char value, size_t bytes, void *stream) {
  static const bool late = std::getenv("FAKE_CUDA_CLEARS_LATE") != nullptr;
  bool captured;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    captured = of(stream).capturing || of(stream).origin != nullptr;
    if (!captured) to_be_cleared.push_back(target);
  }
  put(stream, [=] {
    if (late) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::memset(reinterpret_cast<void *>(target), value, bytes);
    if (captured) return;
    const std::lock_guard<std::mutex> lock(mutex);
    to_be_cleared.erase(std::find(to_be_cleared.begin(), to_be_cleared.end(), target));
  });
  return 0;
}

API int cuStreamSynchronize(void *stream) {
  std::unique_lock<std::mutex> lock(mutex);
  if (of(stream).capturing) return kCaptureUnsupported;
  changed.wait(lock, [stream] { return of(stream).queue.empty(); });
  return 0;
}

API int cuEventQuery(void *handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto *event = static_cast<Event *>(handle);
  return event->passed == event->recorded ? 0 : kNotReady;
}

API int cuEventSynchronize(void *handle) {
  auto *event = static_cast<Event *>(handle);
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [event] { return event->passed == event->recorded; });
  return 0;
}

API int cuEventElapsedTime(float *milliseconds, void *first, void *second) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto *begin = static_cast<Event *>(first);
  const auto *end = static_cast<Event *>(second);
  if (begin->recorded == 0 || end->recorded == 0) return kInvalidValue;
  if (begin->passed != begin->recorded || end->passed != end->recorded) return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return 0;
}

API int cuGetErrorString(int error, const char **text) {
  *text = error == kCaptureUnsupported ? "operation not permitted when stream is capturing"
          : error == kInvalidDevice    ? "invalid device ordinal"
                                       : nullptr;
  return *text == nullptr ? kInvalidValue : 0;
}

API int cuStreamBeginCapture_v2(void *stream, int) {
  const std::lock_guard<std::mutex> lock(mutex);
  of(stream).capturing = true;
  of(stream).captured.clear();
  ++captures;
  return 0;
}

API int cuStreamEndCapture(void *stream, void **graph) {
  const std::lock_guard<std::mutex> lock(mutex);
  of(stream).capturing = false;
  --captures;
  bool unjoined = false;
  for (Stream *other : joining) {
    unjoined = unjoined || other->unjoined;
    other->origin = nullptr;
    other->unjoined = false;
  }
  joining.clear();
  if (unjoined) return kCaptureUnjoined;
  *graph = new std::vector<Function>(of(stream).captured);
  return 0;
}

API int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long) {
  *executable = new std::vector<Function>(*static_cast<std::vector<Function> *>(graph));
  return 0;
}

API int cuGraphDestroy(void *graph) {
  delete static_cast<std::vector<Function> *>(graph);
  return 0;
}

API int cuGraphExecDestroy(void *executable) { return cuGraphDestroy(executable); }

API int cuGraphLaunch(void *executable, void *stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Function &function : *static_cast<std::vector<Function> *>(executable)) of(stream).add(function);
  return 0;
}

// Like hidet's: the stream that kernels are launched on.
API void *fake_current_stream() { return current_stream; }
API void fake_set_current_stream(void *stream) { current_stream = stream; }
