// Looks for races in shared memory. Compiled without the instrumentation that calls it.
//
// Races: of two accesses to a byte of shared memory by two threads, of which one is a write, one must be known to come
// first: there is a barrier of the block between them, or a __syncwarp of their warp. That a warp's threads run together
// is not enough, nor is an instruction that waits for all of them: mma, ldmatrix and shuffles order no memory.
#include "emulated.hpp"

namespace emulated {
namespace {

constexpr size_t kPiece = 2;  // bytes that are looked at as one: no kernel has smaller elements in shared memory

struct Access {
  uint32_t stamp = 0;  // the clock at the last barrier of the thread's block or warp
  int32_t thread = -1;
};

struct Piece {
  std::array<Access, 2> last[3];  // of each kind the last one, and the last one of another thread
  uint32_t copied_in = 0;         // the serial of the block in which a cp.async to it is under way
};

constexpr const char *kNames[] = {"read", "written", "changed in one piece"};

std::vector<Piece> pieces;

Piece *pieces_at(const void *place, size_t size) {
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
  if (pieces.empty()) {
    const auto static_bytes = static_cast<size_t>(__stop_emulated_shared - __start_emulated_shared);
    pieces.resize((kMostSharedBytes + static_bytes) / kPiece + 1);
  }
  return &pieces[from / kPiece];
}

[[noreturn]] void tell_of_race(const Piece &piece, int now, int before, int other) {
  const uint3 &t = state.threads[static_cast<size_t>(other)].index;
  const size_t byte = static_cast<size_t>(&piece - pieces.data()) * kPiece;
  fail("a race: byte " + std::to_string(byte) + " of shared memory is " + kNames[now] + ", and was " + kNames[before] +
       " by thread (" + std::to_string(t.x) + ", " + std::to_string(t.y) + ", " + std::to_string(t.z) +
       ") with no barrier between");
}

size_t count_of(size_t size) { return (size + kPiece - 1) / kPiece; }

}  // namespace

void accessed(const void *place, size_t size, Kind kind) {
  if (state.current == nullptr || !state.watching) return;
  Piece *piece = pieces_at(place, size);
  if (piece == nullptr) return;
  const Thread &own = *state.current;
  const uint32_t block = state.synced, warp = std::max(block, own.warp->synced);
  const Access now{warp, static_cast<int32_t>(&own - state.threads.data())};
  const int own_kind = static_cast<int>(kind);
  for (const Piece *end = piece + count_of(size); piece < end; ++piece) {
    if (piece->copied_in == state.serial) fail("shared memory is accessed before the cp.async to it was waited for");
    for (int other = 0; other < 3; ++other) {
      if (other == own_kind && kind != Kind::kWrite) continue;
      for (const Access &before : piece->last[other]) {
        if (before.stamp < block || before.thread == now.thread) continue;
        if (before.thread / kWarp != now.thread / kWarp || before.stamp >= warp) {
          tell_of_race(*piece, own_kind, other, before.thread);
        }
      }
    }
    auto &last = piece->last[own_kind];
    if (last[0].thread != now.thread) last[1] = last[0];
    last[0] = now;
  }
}

void copying(const Copy &copy, bool is_under_way) {
  Piece *piece = pieces_at(copy.target, copy.bytes + copy.zeros);
  for (size_t i = 0; i < count_of(copy.bytes + copy.zeros); ++i) piece[i].copied_in = is_under_way ? state.serial : 0;
}

}  // namespace emulated

// What the compiler calls at each access to memory, as it instruments for a sanitizer of threads.
#define EMULATED_HOOK extern "C" __attribute__((visibility("hidden")))
#define EMULATED_ACCESS(size)                                                                                     \
  EMULATED_HOOK void __tsan_read##size(void *place) { emulated::accessed(place, size, emulated::Kind::kRead); }   \
  EMULATED_HOOK void __tsan_write##size(void *place) { emulated::accessed(place, size, emulated::Kind::kWrite); } \
  EMULATED_HOOK void __tsan_unaligned_read##size(void *place) { __tsan_read##size(place); }                       \
  EMULATED_HOOK void __tsan_unaligned_write##size(void *place) { __tsan_write##size(place); }
EMULATED_ACCESS(1)
EMULATED_ACCESS(2)
EMULATED_ACCESS(4)
EMULATED_ACCESS(8)
EMULATED_ACCESS(16)
#undef EMULATED_ACCESS
EMULATED_HOOK void __tsan_read_range(void *place, long size) { emulated::accessed(place, size, emulated::Kind::kRead); }
EMULATED_HOOK void __tsan_write_range(void *place, long size) { emulated::accessed(place, size, emulated::Kind::kWrite); }
EMULATED_HOOK char __tsan_atomic8_load(const volatile char *place, int) {  // of the guards of static variables
  return __atomic_load_n(place, __ATOMIC_ACQUIRE);
}
EMULATED_HOOK void __tsan_init() {}
EMULATED_HOOK void __tsan_func_entry(void *) {}
EMULATED_HOOK void __tsan_func_exit(void *) {}
EMULATED_HOOK void __tsan_vptr_update(void **, void *) {}
#undef EMULATED_HOOK
