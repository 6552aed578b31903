// What translated CUDA is compiled with. A block's threads are fibers of one thread of the host; blocks run one after
// another. The layouts of fragments are those of the PTX ISA, section "Warp-level matrix instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cudaTypedefs.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <hidet/runtime/cuda/complex.h>
#include <hidet_dist/kernels/cuda/runtime.h>

namespace emulated {

// What a block may opt in to, of the architecture that a program is compiled for; its source says.
extern size_t shared_bytes_of_arch __attribute__((visibility("hidden")));

constexpr int kWarp = 32;
constexpr uint32_t kAll = 0xffffffffu;
constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kUsualSharedBytes = 48 * 1024;  // a kernel that wants more must say so
constexpr size_t kMostSharedBytes = 232448;      // that a block of any architecture may opt in to
constexpr size_t kFence = 64 * 1024;             // bytes behind shared memory that nothing else is in
constexpr int kMostThreads = 1024;
constexpr const char *kBeyond = "shared memory is accessed beyond its end";
constexpr unsigned char kPoison = 0xff;  // NaN in every floating-point format

struct Copy {
  void *target;
  const void *source;
  size_t bytes;
  size_t zeros;
};

struct Warp;

struct Thread {
  uint3 index;
  int lane = 0;
  Warp *warp = nullptr;
  void *stack = nullptr;  // where it goes on
  bool finished = false;
  bool blocked = false;
  bool at_barrier = false;
  bool at_active_mask = false;
  uint32_t active = 0;
  const char *where = "";
  std::vector<std::vector<Copy>> committed;
  std::vector<Copy> copies;
};

// Threads of a warp that wait for each other, to do something as one.
struct Meeting {
  const char *name;
  uint32_t mask;
  uint32_t arrived;
  void *arguments[kWarp];
  void (*act)(const Meeting &);
};

struct Warp {
  uint32_t live = 0;
  uint32_t synced = 0;  // the clock at its last __syncwarp of all its threads
  Thread *threads[kWarp] = {};
  std::vector<Meeting> meetings;
};

struct State {
  const char *kernel = "";
  dim3 grid, block;
  uint3 at;
  size_t shared_bytes = 0;
  Thread *current = nullptr;
  void *scheduler = nullptr;
  const std::function<void()> *body = nullptr;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  int live = 0;
  int waiting = 0;
  uint32_t clock = 0;    // of barriers of blocks and warps, in all launches
  uint32_t synced = 0;   // the clock at the block's last barrier, or at its begin
  uint32_t serial = 0;   // of the block
  bool watching = true;  // whether the accesses of what runs are its thread's own
};

// One of each in a library: its candidates are objects, which share the functions below.
inline State state;
inline std::mutex &running = *new std::mutex;
alignas(1024) inline unsigned char shared_memory[kMostSharedBytes + kFence];

inline unsigned char *dynamic_shared_memory() { return shared_memory; }

[[noreturn]] inline void fail(const std::string &what) {
  std::fprintf(stderr, "emulated CUDA: %s", state.kernel);
  if (state.current != nullptr) {
    const uint3 &t = state.current->index;
    std::fprintf(stderr, ", block (%u, %u, %u), thread (%u, %u, %u)", state.at.x, state.at.y, state.at.z, t.x, t.y, t.z);
  }
  std::fprintf(stderr, ": %s\n", what.c_str());
  std::abort();
}

// Static shared memory; the translation puts it there.
extern "C" unsigned char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern "C" unsigned char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));

// In races.cpp: a thread reads or writes shared memory, and a cp.async to it is under way, or no longer.
enum class Kind { kRead, kWrite, kAtomic };
void accessed(const void *place, size_t size, Kind kind);
void copying(const Copy &copy, bool is_under_way);

// The compiler takes for granted that what it calls at accesses looks at none of the program's variables.
struct Unwatched {
  Unwatched() {
    state.watching = false;
    __asm__ volatile("" ::: "memory");
  }
  ~Unwatched() {
    __asm__ volatile("" ::: "memory");
    state.watching = true;
  }
};

inline bool is(const char *variable, const char *value) {
  const char *given = std::getenv(variable);
  return given != nullptr && std::strcmp(given, value) == 0;
}

// Fibers: a switch saves what a function must keep, and goes on where the other one was.
extern "C" void emulated_switch(void **from, void *to) __attribute__((visibility("hidden")));
__asm__(
    ".text\n.hidden emulated_switch\n.weak emulated_switch\n.type emulated_switch,@function\nemulated_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size emulated_switch,.-emulated_switch\n");

inline void yield() {
  Thread *own = state.current;
  emulated_switch(&own->stack, state.scheduler);
}

inline void perform(const Copy &copy) {
  std::memcpy(copy.target, copy.source, copy.bytes);
  std::memset(static_cast<unsigned char *>(copy.target) + copy.bytes, 0, copy.zeros);
}

inline void release_barrier() {
  if (state.waiting == 0 || state.waiting < state.live) return;
  for (Thread &thread : state.threads) {
    if (thread.at_barrier) thread.at_barrier = thread.blocked = false;
  }
  state.waiting = 0;
  state.synced = ++state.clock;
}

inline void release_meetings(Warp &warp) {
  for (size_t i = 0; i < warp.meetings.size();) {
    Meeting &meeting = warp.meetings[i];
    if (meeting.arrived != (meeting.mask & warp.live)) {
      ++i;
      continue;
    }
    {
      const Unwatched act_is_no_access_of_one_thread;
      meeting.act(meeting);
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      if (meeting.arrived >> lane & 1) warp.threads[lane]->blocked = false;
    }
    warp.meetings.erase(warp.meetings.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

inline void enter() {
  (*state.body)();
  Thread *own = state.current;
  own->finished = true;
  own->warp->live &= ~(1u << own->lane);
  --state.live;
  release_meetings(*own->warp);
  release_barrier();
  yield();
  fail("a finished thread went on");
}

inline void barrier(const char *name) {
  Thread &own = *state.current;
  own.where = name;
  own.at_barrier = own.blocked = true;
  ++state.waiting;
  release_barrier();
  while (own.blocked) yield();
}

// All threads of the mask reach this; ``act`` gets what each of them gave.
template <class Arguments, class Act>
void together(const char *name, uint32_t mask, Arguments &arguments, Act) {
  Thread &own = *state.current;
  Warp &warp = *own.warp;
  own.where = name;
  if ((mask >> own.lane & 1) == 0) fail(std::string(name) + " is called by a thread that its mask leaves out");
  Meeting *found = nullptr;
  for (Meeting &meeting : warp.meetings) {
    if ((meeting.mask & mask) == 0) continue;
    if (meeting.mask != mask || std::strcmp(meeting.name, name) != 0 || (meeting.arrived >> own.lane & 1) != 0) {
      fail(std::string("the warp diverges: ") + name + ", while others wait in " + meeting.name);
    }
    found = &meeting;
  }
  if (found == nullptr) {
    const auto act = [](const Meeting &meeting) {
      std::array<Arguments *, kWarp> given{};
      for (int lane = 0; lane < kWarp; ++lane) {
        if (meeting.arrived >> lane & 1) given[lane] = static_cast<Arguments *>(meeting.arguments[lane]);
      }
      Act{}(given);
    };
    warp.meetings.push_back(Meeting{name, mask, 0, {}, act});
    found = &warp.meetings.back();
  }
  found->arrived |= 1u << own.lane;
  found->arguments[own.lane] = &arguments;
  own.blocked = true;
  release_meetings(warp);
  while (own.blocked) yield();
}

// All threads of the warp: an instruction that is "aligned".
template <class Arguments, class Act>
void aligned(const char *name, Arguments &arguments, Act act) {
  if (state.current->warp->live != kAll) fail(std::string(name) + " in a warp of which some threads have ended");
  together(name, kAll, arguments, act);
}

inline void resume(Thread &thread) {
  state.current = &thread;
  emulated_switch(&state.scheduler, thread.stack);
  state.current = nullptr;
}

inline bool run_warp(Warp &warp) {
  bool progress = false;
  while (true) {
    bool ran = false;
    for (Thread *thread : warp.threads) {
      if (thread == nullptr || thread->finished || thread->blocked) continue;
      resume(*thread);
      ran = progress = true;
    }
    if (ran) continue;
    // Nobody can go on: those that ask who is there are those that are there.
    uint32_t asking = 0;
    for (Thread *thread : warp.threads) {
      if (thread != nullptr && thread->at_active_mask) asking |= 1u << thread->lane;
    }
    if (asking == 0) return progress;
    for (Thread *thread : warp.threads) {
      if (thread == nullptr || !thread->at_active_mask) continue;
      thread->at_active_mask = thread->blocked = false;
      thread->active = asking;
    }
  }
}

inline void run_block(unsigned char *stacks) {
  static const bool is_reverse = is("EMULATED_WARPS", "reverse");
  std::memset(shared_memory, kPoison, state.shared_bytes);
  const auto static_bytes = static_cast<size_t>(__stop_emulated_shared - __start_emulated_shared);
  std::memset(__start_emulated_shared, kPoison, static_bytes);
  state.synced = ++state.clock;
  ++state.serial;
  const int count = static_cast<int>(state.block.x * state.block.y * state.block.z);
  state.threads.assign(static_cast<size_t>(count), Thread());
  state.warps.assign(static_cast<size_t>((count + kWarp - 1) / kWarp), Warp());
  state.live = count;
  state.waiting = 0;
  for (int i = 0; i < count; ++i) {
    Thread &thread = state.threads[static_cast<size_t>(i)];
    const auto n = static_cast<unsigned>(i);
    thread.index = {n % state.block.x, n / state.block.x % state.block.y, n / state.block.x / state.block.y};
    thread.lane = i % kWarp;
    thread.warp = &state.warps[static_cast<size_t>(i / kWarp)];
    thread.warp->live |= 1u << thread.lane;
    thread.warp->threads[thread.lane] = &thread;
    // As if it had been switched from, with a place to return to; at entry a stack is 8 beyond a multiple of 16.
    auto *top = reinterpret_cast<void **>(stacks + static_cast<size_t>(i + 1) * kStackBytes);
    *(top - 1) = nullptr;
    *(top - 2) = reinterpret_cast<void *>(&enter);
    thread.stack = top - 8;
  }
  while (state.live > 0) {
    bool progress = false;
    for (size_t i = 0; i < state.warps.size(); ++i) {
      progress |= run_warp(state.warps[is_reverse ? state.warps.size() - 1 - i : i]);
    }
    if (!progress) {
      for (Thread &thread : state.threads) {
        if (!thread.finished) {
          state.current = &thread;
          fail(std::string("waits for ever in ") + thread.where);
        }
      }
    }
  }
}

// An address that is none is told of with the thread that used it. On a stack of its own: a fiber's may be what overflowed.
struct Watch {
  Watch() {
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = sizeof(stack);
    sigaltstack(&own, &stack_before);
    struct sigaction action = {};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    action.sa_sigaction = [](int, siginfo_t *info, void *) {
      char text[64];
      std::snprintf(text, sizeof(text), "there is no memory at %p", info->si_addr);
      fail(text);
    };
    sigaction(SIGSEGV, &action, &action_before);
  }
  ~Watch() {
    sigaction(SIGSEGV, &action_before, nullptr);
    sigaltstack(&stack_before, nullptr);
  }
  char stack[64 * 1024];
  stack_t stack_before = {};
  struct sigaction action_before = {};
};

inline void run(const char *kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body) {
  const std::lock_guard<std::mutex> lock(running);
  state.kernel = kernel;
  state.grid = grid;
  state.block = block;
  state.shared_bytes = shared_bytes;
  state.body = &body;
  if (is("EMULATED_TRACE", "1")) std::fprintf(stderr, "%s of %u x %u\n", kernel, grid.x * grid.y * grid.z, block.x);
  const size_t bytes = static_cast<size_t>(block.x) * block.y * block.z * kStackBytes;
  void *stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) fail("no memory for the stacks of its threads");
  const Watch watch;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        state.at = {x, y, z};
        run_block(static_cast<unsigned char *>(stacks));
      }
    }
  }
  munmap(stacks, bytes);
}

// On the stream, where there is a driver that has streams; else at once.
inline void enqueue(cudaStream_t stream, std::function<void()> work) {
  using Launch = int (*)(void *, void (*)(void *), void *);
  static const Launch launch = []() -> Launch {
    const char *driver = std::getenv("HIDET_DIST_CUDA_DRIVER");
    void *library = driver == nullptr ? nullptr : dlopen(driver, RTLD_NOW | RTLD_LOCAL);
    return library == nullptr ? nullptr : reinterpret_cast<Launch>(dlsym(library, "cuLaunchHostFunc"));
  }();
  if (launch == nullptr) return work();
  // Never freed: a graph runs it again.
  auto *kept = new std::function<void()>(std::move(work));
  launch(stream, [](void *data) { (*static_cast<std::function<void()> *>(data))(); }, kept);
}

inline std::map<const void *, size_t> &opted_in = *new std::map<const void *, size_t>;
inline cudaError_t last_error = cudaSuccess;

template <class Function>
cudaError_t set_attribute(Function function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (static_cast<size_t>(value) > shared_bytes_of_arch) return last_error = cudaErrorInvalidValue;
  opted_in[reinterpret_cast<const void *>(function)] = static_cast<size_t>(value);
  return cudaSuccess;
}

inline cudaError_t take_error() { return std::exchange(last_error, cudaSuccess); }

inline const char *describe(cudaError_t error) {
  return error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : "invalid argument";
}

template <class... Parameters, class... Arguments>
void launch(const char *name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Arguments... arguments) {
  const auto found = opted_in.find(reinterpret_cast<const void *>(kernel));
  const size_t room = found == opted_in.end() ? kUsualSharedBytes : std::max(found->second, kUsualSharedBytes);
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || threads == 0 ||
      threads > kMostThreads || block.z > 64 || shared_bytes > room) {
    last_error = shared_bytes > room ? cudaErrorInvalidValue : cudaErrorInvalidConfiguration;
    return;
  }
  // By value, as a launch takes them.
  const std::tuple<std::decay_t<Parameters>...> given(arguments...);
  enqueue(stream, [=] { run(name, grid, block, shared_bytes, [&] { std::apply(kernel, given); }); });
}

template <class T>
T *aligned_to(T *pointer, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) {
    fail("an access of " + std::to_string(bytes) + " bytes is misaligned");
  }
  return pointer;
}

// Addresses of shared memory have 32 bits: the distance from where it begins.
inline uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char *>(pointer) - shared_memory);
}

inline unsigned char *shared_pointer(uint32_t address, size_t bytes) {
  if (address < sizeof(shared_memory) && address + bytes > state.shared_bytes) fail(kBeyond);
  return shared_memory + static_cast<int32_t>(address);
}

// Shuffles.
template <class T>
struct Shuffle {
  T value, result;
  int source;  // the lane, or -1 for its own
};

template <class T>
T shuffle(const char *name, uint32_t mask, T value, int source) {
  Shuffle<T> arguments{value, value, source};
  together(name, mask, arguments, [](const std::array<Shuffle<T> *, kWarp> &lanes) {
    for (Shuffle<T> *lane : lanes) {
      if (lane == nullptr || lane->source < 0) continue;
      if (lanes[static_cast<size_t>(lane->source)] != nullptr) {
        lane->result = lanes[static_cast<size_t>(lane->source)]->value;
      } else {
        std::memset(static_cast<void *>(&lane->result), kPoison, sizeof(T));  // undefined: nobody is there
      }
    }
  });
  return arguments.result;
}

inline int lane() { return state.current->lane; }

}  // namespace emulated

#define threadIdx (::emulated::state.current->index)
#define blockIdx (::emulated::state.at)
#define blockDim (::emulated::state.block)
#define gridDim (::emulated::state.grid)
#define warpSize 32
#define cudaFuncSetAttribute ::emulated::set_attribute
#define cudaGetLastError ::emulated::take_error
#define cudaPeekAtLastError() (::emulated::last_error)
#define cudaGetErrorString ::emulated::describe
#define __builtin_assume(condition) ((condition) ? (void)0 : ::emulated::fail("a false assumption: " #condition))
#define __syncthreads() ::emulated::barrier("__syncthreads")

inline void __syncwarp(uint32_t mask = emulated::kAll) {
  emulated::Warp *warp = emulated::state.current->warp;
  emulated::together("__syncwarp", mask, warp, [](const std::array<emulated::Warp **, emulated::kWarp> &lanes) {
    uint32_t here = 0;
    emulated::Warp *warp = nullptr;
    for (int lane = 0; lane < emulated::kWarp; ++lane) {
      if (lanes[lane] == nullptr) continue;
      here |= 1u << lane;
      warp = *lanes[lane];
    }
    if (here == warp->live) warp->synced = ++emulated::state.clock;
  });
}

inline uint32_t __activemask() {
  emulated::Thread &own = *emulated::state.current;
  own.where = "__activemask";
  own.at_active_mask = own.blocked = true;
  while (own.blocked) emulated::yield();
  return own.active;
}

template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32) {
  const int lane = emulated::lane();
  return emulated::shuffle("__shfl_sync", mask, value, lane / width * width + source % width);
}

template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int lane = emulated::lane(), source = lane - static_cast<int>(delta);
  return emulated::shuffle("__shfl_up_sync", mask, value, source >= lane / width * width ? source : -1);
}

template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int lane = emulated::lane(), source = lane + static_cast<int>(delta);
  return emulated::shuffle("__shfl_down_sync", mask, value, source < (lane / width + 1) * width ? source : -1);
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int flip, int width = 32) {
  const int lane = emulated::lane(), source = lane ^ flip;
  return emulated::shuffle("__shfl_xor_sync", mask, value, source < (lane / width + 1) * width ? source : -1);
}

inline size_t __cvta_generic_to_shared(const void *pointer) { return emulated::shared_address(pointer); }

struct EmulatedVote {
  bool given;
  uint32_t found;
};

inline uint32_t __ballot_sync(uint32_t mask, bool predicate) {
  EmulatedVote vote{predicate, 0};
  emulated::together("__ballot_sync", mask, vote, [](const std::array<EmulatedVote *, emulated::kWarp> &lanes) {
    uint32_t found = 0;
    for (int lane = 0; lane < emulated::kWarp; ++lane) {
      if (lanes[lane] != nullptr && lanes[lane]->given) found |= 1u << lane;
    }
    for (EmulatedVote *vote : lanes) {
      if (vote != nullptr) vote->found = found;
    }
  });
  return vote.found;
}
inline int __any_sync(uint32_t mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }

inline void __threadfence() {}
inline void __threadfence_block() {}

// Threads of the host's kind take turns only where they wait: what a thread does in one piece is atomic.
template <class T, class U>
T atomicAdd(T *place, U value) {
  emulated::accessed(place, sizeof(T), emulated::Kind::kAtomic);
  const emulated::Unwatched in_one_piece;
  const T before = *place;
  *place = before + static_cast<T>(value);
  return before;
}

template <class T>
T __ldg(const T *place) {
  return *place;
}

inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __int_as_float(int x) { return reinterpret_cast<float &>(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<uint32_t>(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return found;
}
inline int __float_as_int(float x) { return reinterpret_cast<int &>(x); }

// Of integers and floats, as CUDA has them.
template <class T, class U>
auto min(T x, U y) -> std::enable_if_t<std::is_arithmetic_v<T> && std::is_arithmetic_v<U>, std::common_type_t<T, U>> {
  return y < x ? y : x;
}

template <class T, class U>
auto max(T x, U y) -> std::enable_if_t<std::is_arithmetic_v<T> && std::is_arithmetic_v<U>, std::common_type_t<T, U>> {
  return x < y ? y : x;
}

// Functions of half precision that the host lacks: computed in float, rounded once.
#define EMULATED_HALF_FUNCTION(name, expression)                                        \
  inline half h##name(half h) {                                                          \
    const float x = __half2float(h);                                                     \
    return __float2half(expression);                                                     \
  }                                                                                      \
  inline __nv_bfloat16 h##name(__nv_bfloat16 h) {                                        \
    const float x = __bfloat162float(h);                                                 \
    return __float2bfloat16(expression);                                                 \
  }
EMULATED_HALF_FUNCTION(exp, std::exp(x))
EMULATED_HALF_FUNCTION(exp2, std::exp2(x))
EMULATED_HALF_FUNCTION(log, std::log(x))
EMULATED_HALF_FUNCTION(sqrt, std::sqrt(x))
EMULATED_HALF_FUNCTION(rsqrt, 1.0f / std::sqrt(x))
EMULATED_HALF_FUNCTION(rcp, 1.0f / x)
EMULATED_HALF_FUNCTION(sin, std::sin(x))
EMULATED_HALF_FUNCTION(cos, std::cos(x))
EMULATED_HALF_FUNCTION(floor, std::floor(x))
EMULATED_HALF_FUNCTION(ceil, std::ceil(x))
EMULATED_HALF_FUNCTION(rint, std::nearbyint(x))
EMULATED_HALF_FUNCTION(trunc, std::trunc(x))
#undef EMULATED_HALF_FUNCTION

namespace ptx {

using emulated::aligned;
using emulated::aligned_to;
using emulated::kWarp;

// Operands by their constraint.
template <class T>
uint64_t in_l(T x) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<uint64_t>(x);
  } else {
    return static_cast<uint64_t>(x);
  }
}
template <class T>
uint32_t in_r(T x) {
  static_assert(sizeof(T) <= 4, "a register has 32 bits");
  return static_cast<uint32_t>(x);
}
template <class T>
uint16_t in_h(T x) {
  static_assert(sizeof(T) == 2, "a register has 16 bits");
  uint16_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
template <class T>
int64_t in_n(T x) {
  return static_cast<int64_t>(x);
}
inline float in_f(float x) { return x; }
inline double in_d(double x) { return x; }

template <class... T>
auto group(T &...registers) {
  return std::array<std::common_type_t<T...> *, sizeof...(T)>{&registers...};
}

// An address: of 64 bits in global memory, or generic; of 32 in shared memory.
struct Address {
  uint64_t bits;
  bool is_short;
};
inline Address at(uint64_t address) { return {address, false}; }
inline Address at(uint32_t address) { return {address, true}; }

template <class T>
T *global(Address address) {
  if (address.is_short) emulated::fail("an address of global memory has 64 bits");
  return aligned_to(reinterpret_cast<T *>(address.bits), sizeof(T));
}

// Both ``cvta.to.shared`` and its result are the generic address of what is in shared memory, until it is cut to 32 bits.
template <class T>
T *shared(Address address, size_t count = 1) {
  const auto low = static_cast<uint32_t>(address.bits);
  return aligned_to(reinterpret_cast<T *>(emulated::shared_pointer(low, sizeof(T) * count)), sizeof(T) * count);
}

inline void cvta_to_shared_u64(uint64_t &address, uint64_t pointer) {
  address = emulated::shared_address(reinterpret_cast<const void *>(pointer));
}
inline void cvt_u32_u64(uint32_t &to, uint64_t from) { to = static_cast<uint32_t>(from); }
inline void mov_b32(uint32_t &to, uint32_t from) { to = from; }
inline void mov_b16(uint16_t &to, uint32_t from) { to = static_cast<uint16_t>(from); }
inline void mul_hi_s32(int &to, uint32_t x, uint32_t y) {
  to = static_cast<int>(static_cast<int64_t>(static_cast<int32_t>(x)) * static_cast<int32_t>(y) >> 32);
}
template <class T, class U>
void setp_ne_b32(bool &to, T x, U y) {
  to = static_cast<uint32_t>(x) != static_cast<uint32_t>(y);
}

// Loads and stores. A vector is aligned to its size.
template <class T, size_t N>
void load(const std::array<T *, N> &to, const T *from) {
  aligned_to(from, N * sizeof(T));
  for (size_t i = 0; i < N; ++i) *to[i] = from[i];
}
template <class T, size_t N>
void store(T *to, const std::array<T *, N> &from) {
  aligned_to(to, N * sizeof(T));
  for (size_t i = 0; i < N; ++i) to[i] = *from[i];
}

using R = uint32_t;
template <size_t N>
using Rs = std::array<R *, N>;

#define EMULATED_MEMORY(space)                                                                                   \
  inline void ld_##space##_u32(const Rs<1> &to, Address from) { load(to, space<R>(from)); }                     \
  inline void ld_##space##_u32(R &to, Address from) { to = *space<R>(from); }                                  \
  inline void ld_##space##_b32(R &to, Address from) { to = *space<R>(from); }                                  \
  inline void ld_##space##_u16(uint16_t &to, Address from) { to = *space<uint16_t>(from); }                    \
  inline void ld_##space##_v2_u32(const Rs<2> &to, Address from) { load(to, space<R>(from)); }                  \
  inline void ld_##space##_v4_u32(const Rs<4> &to, Address from) { load(to, space<R>(from)); }                  \
  inline void st_##space##_u32(Address to, const Rs<1> &from) { store(space<R>(to), from); }                    \
  inline void st_##space##_u32(Address to, R from) { *space<R>(to) = from; }                                   \
  inline void st_##space##_b32(Address to, R from) { *space<R>(to) = from; }                                   \
  inline void st_##space##_u16(Address to, uint16_t from) { *space<uint16_t>(to) = from; }                     \
  inline void st_##space##_v2_u32(Address to, const Rs<2> &from) { store(space<R>(to), from); }                 \
  inline void st_##space##_v4_u32(Address to, const Rs<4> &from) { store(space<R>(to), from); }
EMULATED_MEMORY(global)
EMULATED_MEMORY(shared)
#undef EMULATED_MEMORY

// Asynchronous copies: they come at the latest moment that is allowed, or at the earliest.
inline void copy_async(Address to, Address from, int64_t bytes, int64_t given) {
  static const bool is_eager = emulated::is("EMULATED_COPIES", "eager");
  const auto size = static_cast<size_t>(bytes), present = static_cast<size_t>(given);
  if ((size != 4 && size != 8 && size != 16) || present > size) emulated::fail("cp.async of so many bytes");
  auto *target = emulated::shared_pointer(static_cast<uint32_t>(to.bits), size);
  const auto *source = reinterpret_cast<const unsigned char *>(from.bits);
  aligned_to(target, size);
  aligned_to(source, size);
  const emulated::Copy copy{target, source, present, size - present};
  emulated::accessed(target, size, emulated::Kind::kWrite);  // it may come at once, or as late as it is waited for
  emulated::copying(copy, true);
  if (is_eager) perform(copy);
  emulated::state.current->copies.push_back(copy);
}
inline void cp_async_cg_shared_global(Address to, Address from, int64_t bytes, int64_t given) {
  copy_async(to, from, bytes, given);
}
inline void cp_async_cg_shared_global(Address to, Address from, int64_t bytes) { copy_async(to, from, bytes, bytes); }
inline void cp_async_ca_shared_global(Address to, Address from, int64_t bytes, int64_t given) {
  copy_async(to, from, bytes, given);
}
inline void cp_async_ca_shared_global(Address to, Address from, int64_t bytes) { copy_async(to, from, bytes, bytes); }
inline void cp_async_commit_group() {
  emulated::Thread &own = *emulated::state.current;
  own.committed.push_back(std::exchange(own.copies, {}));
}
inline void cp_async_wait_group(int64_t left) {
  auto &committed = emulated::state.current->committed;
  while (static_cast<int64_t>(committed.size()) > left) {
    for (const emulated::Copy &copy : committed.front()) {
      emulated::copying(copy, false);
      emulated::accessed(copy.target, copy.bytes + copy.zeros, emulated::Kind::kWrite);
      perform(copy);
    }
    committed.erase(committed.begin());
  }
}
inline void cp_async_wait_all() {
  cp_async_commit_group();
  cp_async_wait_group(0);
}

// ldmatrix: lane 8 j + i gives the address of row i of matrix j.
template <size_t N>
struct LoadMatrix {
  Rs<N> registers;
  const uint16_t *row;
};

template <size_t N, bool kTransposed>
void load_matrix(const char *name, const Rs<N> &to, Address from) {
  const int lane = emulated::lane();
  const bool is_used = lane < static_cast<int>(8 * N);
  // The address is generic where it has 64 bits.
  const void *row = nullptr;
  if (is_used) {
    const uint32_t address =
        from.is_short ? static_cast<uint32_t>(from.bits) : emulated::shared_address(reinterpret_cast<void *>(from.bits));
    row = aligned_to(emulated::shared_pointer(address, 16), 16);
    emulated::accessed(row, 16, emulated::Kind::kRead);
  }
  LoadMatrix<N> arguments{to, static_cast<const uint16_t *>(row)};
  aligned(name, arguments, [](const std::array<LoadMatrix<N> *, kWarp> &lanes) {
    for (size_t lane = 0; lane < kWarp; ++lane) {
      for (size_t matrix = 0; matrix < N; ++matrix) {
        uint16_t pair[2];
        for (size_t i = 0; i < 2; ++i) {
          const size_t row = kTransposed ? lane % 4 * 2 + i : lane / 4;
          const size_t column = kTransposed ? lane / 4 : lane % 4 * 2 + i;
          pair[i] = lanes[8 * matrix + row]->row[column];
        }
        std::memcpy(lanes[lane]->registers[matrix], pair, sizeof(pair));
      }
    }
  });
}
#define EMULATED_LDMATRIX(n)                                                                              \
  inline void ldmatrix_sync_aligned_m8n8_x##n##_b16(const Rs<n> &to, Address from) {                      \
    load_matrix<n, false>("ldmatrix.x" #n, to, from);                                                     \
  }                                                                                                       \
  inline void ldmatrix_sync_aligned_m8n8_x##n##_trans_b16(const Rs<n> &to, Address from) {                \
    load_matrix<n, true>("ldmatrix.x" #n ".trans", to, from);                                             \
  }                                                                                                       \
  inline void ldmatrix_sync_aligned_m8n8_x##n##_shared_b16(const Rs<n> &to, Address from) {               \
    load_matrix<n, false>("ldmatrix.x" #n, to, from);                                                     \
  }                                                                                                       \
  inline void ldmatrix_sync_aligned_m8n8_x##n##_trans_shared_b16(const Rs<n> &to, Address from) {         \
    load_matrix<n, true>("ldmatrix.x" #n ".trans", to, from);                                             \
  }
EMULATED_LDMATRIX(1)
EMULATED_LDMATRIX(2)
EMULATED_LDMATRIX(4)
#undef EMULATED_LDMATRIX

// Conversions of half precision. <immintrin.h>, which has them, takes a third of the time of all headers.
inline float float_of_half(uint16_t bits) {
  using Halves = short __attribute__((vector_size(16)));
  return __builtin_ia32_vcvtph2ps(Halves{static_cast<short>(bits)})[0];
}
inline uint16_t half_of_float(float x) {  // to the nearest
  using Floats = float __attribute__((vector_size(16)));
  return static_cast<uint16_t>(__builtin_ia32_vcvtps2ph(Floats{x}, 0)[0]);
}

// Elements of a register.
struct F16 {
  static constexpr size_t kPerRegister = 2;
  static float get(R bits, size_t i) { return float_of_half(static_cast<uint16_t>(bits >> (16 * i))); }
  static void set(R &bits, size_t i, float x) {
    const R value = half_of_float(x);
    bits = (bits & ~(0xffffu << (16 * i))) | value << (16 * i);
  }
};
struct BF16 {
  static constexpr size_t kPerRegister = 2;
  static float get(R bits, size_t i) {
    const R wide = (bits >> (16 * i)) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof(x));
    return x;
  }
};
struct TF32 {  // the low 13 bits are not looked at
  static constexpr size_t kPerRegister = 1;
  static float get(R bits, size_t) {
    bits &= ~0x1fffu;
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }
};
struct F32 {
  static constexpr size_t kPerRegister = 1;
  static float get(R bits, size_t) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }
  static void set(R &bits, size_t, float x) { std::memcpy(&bits, &x, sizeof(x)); }
};

template <size_t A, size_t B, size_t C>
struct Mma {
  Rs<C> d;
  Rs<A> a;
  Rs<B> b;
  std::array<R, C> c;
};

// d = a b + c of 16 x 8 elements over K. A register holds neighbours along K of a and b, along the columns of c and d.
template <size_t K, class In, class Acc, size_t A, size_t B, size_t C>
void mma(const char *name, const Rs<C> &d, const Rs<A> &a, const Rs<B> &b, const Rs<C> &c) {
  constexpr size_t kIn = In::kPerRegister, kAcc = Acc::kPerRegister, kStep = 4 * kIn;
  static_assert(A * kIn * kWarp == 16 * K && B * kIn * kWarp == 8 * K && C * kAcc * kWarp == 16 * 8, "fragments");
  Mma<A, B, C> arguments{d, a, b, {}};
  for (size_t i = 0; i < C; ++i) arguments.c[i] = *c[i];
  aligned(name, arguments, [](const std::array<Mma<A, B, C> *, kWarp> &lanes) {
    float x[16][K], y[K][8], z[16][8];
    for (size_t lane = 0; lane < kWarp; ++lane) {
      const size_t group = lane / 4, within = lane % 4;
      for (size_t r = 0; r < A; ++r) {
        for (size_t i = 0; i < kIn; ++i) {
          x[group + 8 * (r % 2)][within * kIn + i + kStep * (r / 2)] = In::get(*lanes[lane]->a[r], i);
        }
      }
      for (size_t r = 0; r < B; ++r) {
        for (size_t i = 0; i < kIn; ++i) y[within * kIn + i + kStep * r][group] = In::get(*lanes[lane]->b[r], i);
      }
      for (size_t e = 0; e < 4; ++e) {
        z[group + 8 * (e / 2)][within * 2 + e % 2] = Acc::get(lanes[lane]->c[e / kAcc], e % kAcc);
      }
    }
    for (size_t i = 0; i < 16; ++i) {
      for (size_t k = 0; k < K; ++k) {
        for (size_t j = 0; j < 8; ++j) z[i][j] += x[i][k] * y[k][j];
      }
    }
    for (size_t lane = 0; lane < kWarp; ++lane) {
      const size_t group = lane / 4, within = lane % 4;
      for (size_t e = 0; e < 4; ++e) {
        Acc::set(*lanes[lane]->d[e / kAcc], e % kAcc, z[group + 8 * (e / 2)][within * 2 + e % 2]);
      }
    }
  });
}

#define EMULATED_MMA(shape, k, d_type, a_type, In, Acc, A, B, C)                                                     \
  template <class D>                                                                                                 \
  void mma_sync_aligned_##shape##_row_col_##d_type##_##a_type##_##a_type##_##d_type(D d, const Rs<A> &a,              \
                                                                                    const Rs<B> &b, D c) {           \
    mma<k, In, Acc>("mma." #shape, registers(d), a, b, registers(c));                                                \
  }

template <size_t N>
Rs<N> registers(const std::array<R *, N> &own) {
  return own;
}
template <size_t N>
Rs<N> registers(const std::array<float *, N> &own) {
  Rs<N> found;
  for (size_t i = 0; i < N; ++i) found[i] = reinterpret_cast<R *>(own[i]);
  return found;
}

EMULATED_MMA(m16n8k8, 8, f32, f16, F16, F32, 2, 1, 4)
EMULATED_MMA(m16n8k8, 8, f16, f16, F16, F16, 2, 1, 2)
EMULATED_MMA(m16n8k8, 8, f32, bf16, BF16, F32, 2, 1, 4)
EMULATED_MMA(m16n8k16, 16, f32, f16, F16, F32, 4, 2, 4)
EMULATED_MMA(m16n8k16, 16, f16, f16, F16, F16, 4, 2, 2)
EMULATED_MMA(m16n8k16, 16, f32, bf16, BF16, F32, 4, 2, 4)
EMULATED_MMA(m16n8k4, 4, f32, tf32, TF32, F32, 2, 1, 4)
EMULATED_MMA(m16n8k8, 8, f32, tf32, TF32, F32, 4, 2, 4)
#undef EMULATED_MMA

// Approximations of the device are the host's functions.
inline void max_NaN_f32(float &to, float x, float y) { to = x > y || x != x ? x : y; }
inline void min_NaN_f32(float &to, float x, float y) { to = x < y || x != x ? x : y; }
inline void tanh_approx_f32(float &to, float x) { to = std::tanh(x); }
inline void ex2_approx_f32(float &to, float x) { to = std::exp2(x); }
inline void ex2_approx_ftz_f32(float &to, float x) { to = std::exp2(x); }
inline void tanh_approx_f16(uint16_t &to, uint16_t x) {
  to = half_of_float(std::tanh(float_of_half(x)));
}

}  // namespace ptx
