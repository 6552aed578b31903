// Looks for races in shared memory. Compiled without the instrumentation that calls it.
//
// Races: of two accesses to a byte of shared memory by two threads, of which one is a write, one must be known to come
// first: there is a barrier of the block between them, or a __syncwarp of their warp. That a warp's threads run together
// is not enough, nor is an instruction that waits for all of them: mma, ldmatrix and shuffles order no memory.
#include "emulated.hpp"

namespace emulated {
namespace {

struct Access {
  uint32_t block = 0;  // the clock at the block's last barrier
  uint32_t warp = 0;   // at the last __syncwarp
  int32_t thread = -1;
};

struct Byte {
  Access write;
  std::array<Access, 2> reads;  // the last one, and the last one of another thread
  uint32_t copied_in = 0;       // the serial of the block in which a cp.async to it is under way
};

std::vector<Byte> bytes_of_shared_memory;

int number_of(const Thread &thread) { return static_cast<int>(&thread - state.threads.data()); }

Byte *bytes_at(const void *place, size_t size) {
  const auto *at = static_cast<const unsigned char *>(place);
  size_t from;
  if (at >= shared_memory && at < shared_memory + sizeof(shared_memory)) {
    from = static_cast<size_t>(at - shared_memory);
    if (from + size > state.shared_bytes) fail(kBeyond);
  } else if (at >= __start_emulated_shared && at < __stop_emulated_shared) {
    from = kMostSharedBytes + static_cast<size_t>(at - __start_emulated_shared);
  } else {
    return nullptr;
  }
  if (bytes_of_shared_memory.empty()) {
    bytes_of_shared_memory.resize(kMostSharedBytes + static_cast<size_t>(__stop_emulated_shared - __start_emulated_shared));
  }
  return &bytes_of_shared_memory[from];
}

[[noreturn]] void tell_of_race(const Byte &byte, const char *now, const char *before, int other) {
  const uint3 &t = state.threads[static_cast<size_t>(other)].index;
  fail("a race: byte " + std::to_string(&byte - bytes_of_shared_memory.data()) + " of shared memory is " + now +
       ", and was " + before + " by thread (" + std::to_string(t.x) + ", " + std::to_string(t.y) + ", " +
       std::to_string(t.z) + ") with no barrier between");
}

}  // namespace

void accessed(const void *place, size_t size, bool is_write) {
  if (state.current == nullptr || !state.watching) return;
  Byte *byte = bytes_at(place, size);
  if (byte == nullptr) return;
  const Thread &own = *state.current;
  const Access now{state.synced, own.warp->synced, number_of(own)};
  const auto is_race = [&](const Access &before) {
    return before.block == now.block && before.thread != now.thread &&
           (before.thread / kWarp != now.thread / kWarp || before.warp == now.warp);
  };
  for (size_t i = 0; i < size; ++i, ++byte) {
    if (byte->copied_in == state.serial) fail("shared memory is accessed before the cp.async to it was waited for");
    if (is_race(byte->write)) tell_of_race(*byte, is_write ? "written" : "read", "written", byte->write.thread);
    if (!is_write) {
      if (byte->reads[0].thread != now.thread) byte->reads[1] = byte->reads[0];
      byte->reads[0] = now;
      continue;
    }
    for (const Access &read : byte->reads) {
      if (is_race(read)) tell_of_race(*byte, "written", "read", read.thread);
    }
    byte->write = now;
  }
}

void copying(const Copy &copy, bool is_under_way) {
  const size_t size = copy.bytes + copy.zeros;
  Byte *bytes = bytes_at(copy.target, size);
  for (size_t i = 0; i < size; ++i) bytes[i].copied_in = is_under_way ? state.serial : 0;
}

}  // namespace emulated

// What the compiler calls at each access to memory, as it instruments for a sanitizer of threads.
#define EMULATED_HOOK extern "C" __attribute__((visibility("hidden")))
#define EMULATED_ACCESS(size)                                                                                  \
  EMULATED_HOOK void __tsan_read##size(void *place) { emulated::accessed(place, size, false); }                \
  EMULATED_HOOK void __tsan_write##size(void *place) { emulated::accessed(place, size, true); }                \
  EMULATED_HOOK void __tsan_unaligned_read##size(void *place) { emulated::accessed(place, size, false); }      \
  EMULATED_HOOK void __tsan_unaligned_write##size(void *place) { emulated::accessed(place, size, true); }
EMULATED_ACCESS(1)
EMULATED_ACCESS(2)
EMULATED_ACCESS(4)
EMULATED_ACCESS(8)
EMULATED_ACCESS(16)
#undef EMULATED_ACCESS
EMULATED_HOOK void __tsan_read_range(void *place, long size) { emulated::accessed(place, size, false); }
EMULATED_HOOK void __tsan_write_range(void *place, long size) { emulated::accessed(place, size, true); }
EMULATED_HOOK char __tsan_atomic8_load(const volatile char *place, int) {  // of the guards of static variables
  return __atomic_load_n(place, __ATOMIC_ACQUIRE);
}
EMULATED_HOOK void __tsan_init() {}
EMULATED_HOOK void __tsan_func_entry(void *) {}
EMULATED_HOOK void __tsan_func_exit(void *) {}
EMULATED_HOOK void __tsan_vptr_update(void **, void *) {}
#undef EMULATED_HOOK
