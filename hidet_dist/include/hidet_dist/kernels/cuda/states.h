// Updates of states in place, in the memory of a CUDA device. The functions are those of ../states.h, for its stream.
//
// All extents and strides are in bytes. Elements are moved in words of up to 16 bytes, as wide as all of an update's
// addresses, extents and strides are multiples of.
#pragma once
#include <stdint.h>

#include "hidet_dist/kernels/cuda/launch.h"
#include "hidet_dist/kernels/slots.h"

namespace hd {

using hidet_dist::cuda::check;
using hidet_dist::cuda::divide_up;
using hidet_dist::cuda::kAllLanes;
using hidet_dist::cuda::kMostBlocks;
using hidet_dist::cuda::kWarp;
using hidet_dist::cuda::stream;

constexpr int kThreads = 128;   // of a block
constexpr int kMostSlots = 8;   // dims of a state that slots index
constexpr int kMostOuter = 8;   // dims that they do not index, before one that they do
constexpr uint64_t kWidest = sizeof(uint4);

// The arguments of a write of rows, by value.
struct RowsWrite {
  char *state;
  const char *rows;
  int64_t count, inner, pieces;
  int indexed, outer_dims;
  Slots slots[kMostSlots];
  OuterDim outer[kMostOuter];
};

__device__ inline int64_t slot(const Slots &slots, int64_t row) {
  return slots.wide ? static_cast<const int64_t *>(slots.at)[row]
                    : int64_t(static_cast<const int32_t *>(slots.at)[row]);
}

// A warp writes a row, unless a later one has the same place.
template <class Word>
__global__ void write_rows_kernel(RowsWrite write) {
  const int lane = threadIdx.x % kWarp;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= write.count) return;
  char *base = write.state;
  for (int s = 0; s < write.indexed; ++s) {
    const int64_t index = slot(write.slots[s], row);
    if (index < 0 || index >= write.slots[s].size) return;
    base += index * write.slots[s].stride;
  }
  int later = 0;
  for (int64_t other = row + 1 + lane; other < write.count && !later; other += kWarp) {
    later = 1;
    for (int s = 0; s < write.indexed; ++s) later &= slot(write.slots[s], other) == slot(write.slots[s], row);
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) later |= __shfl_xor_sync(kAllLanes, later, distance);
  if (later) return;
  const int64_t words = write.inner / int64_t(sizeof(Word));
  const Word *from = reinterpret_cast<const Word *>(write.rows + row * write.pieces * write.inner);
  for (int64_t word = lane; word < write.pieces * words; word += kWarp) {
    int64_t rest = word / words, offset = 0;
    for (int d = write.outer_dims - 1; d >= 0; --d) {
      offset += rest % write.outer[d].extent * write.outer[d].stride;
      rest /= write.outer[d].extent;
    }
    reinterpret_cast<Word *>(base + offset)[word % words] = from[word];
  }
}

// A thread moves the words that one word takes the place of, one after the other: no two threads share a word.
template <class Word>
__global__ void shift_kernel(Word *state, const Word *values, int64_t windows, int64_t size, int64_t added) {
  const int64_t chains = added < size ? added : size;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (thread >= windows * chains) return;
  Word *to = state + thread / chains * size;
  const Word *from = values + thread / chains * added;
  for (int64_t at = thread % chains; at < size; at += added) {
    to[at] = at + added < size ? to[at + added] : from[at + added - size];
  }
}

template <class Word>
__global__ void replace_kernel(Word *state, const Word *values, int64_t words) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t word = int64_t(blockIdx.x) * kThreads + threadIdx.x; word < words; word += step) {
    state[word] = values[word];
  }
}

// The bytes of the widest word of which all of these numbers are multiples.
inline uint64_t word_bytes(uint64_t all) {
  all |= kWidest;
  return all & (~all + 1);
}

inline uint64_t place(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

template <class Word>
inline void launch_write(const RowsWrite &write) {
  const unsigned blocks = static_cast<unsigned>(divide_up(write.count, kThreads / kWarp));
  write_rows_kernel<Word><<<blocks, kThreads, 0, stream()>>>(write);
}

template <class Word>
inline void launch_shift(void *state, const void *values, int64_t windows, int64_t size, int64_t added) {
  const int64_t bytes = sizeof(Word), chains = (added < size ? added : size) / bytes;
  const unsigned blocks = static_cast<unsigned>(divide_up(windows * chains, kThreads));
  shift_kernel<Word><<<blocks, kThreads, 0, stream()>>>(static_cast<Word *>(state), static_cast<const Word *>(values),
                                                        windows, size / bytes, added / bytes);
}

template <class Word>
inline void launch_replace(void *state, const void *values, int64_t bytes) {
  const int64_t words = bytes / int64_t(sizeof(Word)), blocks = divide_up(words, kThreads);
  const unsigned grid = static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
  replace_kernel<Word>
      <<<grid, kThreads, 0, stream()>>>(static_cast<Word *>(state), static_cast<const Word *>(values), words);
}

#define HIDET_DIST_OF_WIDTH(bytes, function, ...) \
  switch (bytes) {                                \
    case 16:                                      \
      function<uint4>(__VA_ARGS__);               \
      break;                                      \
    case 8:                                       \
      function<uint2>(__VA_ARGS__);               \
      break;                                      \
    case 4:                                       \
      function<uint32_t>(__VA_ARGS__);            \
      break;                                      \
    case 2:                                       \
      function<uint16_t>(__VA_ARGS__);            \
      break;                                      \
    default:                                      \
      function<uint8_t>(__VA_ARGS__);             \
  }

inline void write_rows(void *state, const void *rows, int64_t count, int64_t inner, const Slots *slots, int indexed,
                       const OuterDim *outer, int outer_dims) {
  RowsWrite write = {
      static_cast<char *>(state), static_cast<const char *>(rows), count, inner, 1, indexed, outer_dims, {}, {}};
  if (indexed > kMostSlots || outer_dims > kMostOuter) return check(cudaErrorInvalidValue, "a state has too many dims");
  uint64_t all = place(state) | place(rows) | uint64_t(inner);
  for (int s = 0; s < indexed; ++s) {
    write.slots[s] = slots[s];
    all |= uint64_t(slots[s].stride);
  }
  for (int d = 0; d < outer_dims; ++d) {
    write.outer[d] = outer[d];
    write.pieces *= outer[d].extent;
    all |= uint64_t(outer[d].stride);
  }
  if (count <= 0 || write.pieces * inner == 0) return;
  HIDET_DIST_OF_WIDTH(word_bytes(all), launch_write, write)
  check(cudaGetLastError(), "write_rows");
}

inline void shift(void *state, const void *values, int64_t windows, int64_t size, int64_t added) {
  if (windows <= 0 || size <= 0 || added <= 0) return;
  const uint64_t all = place(state) | place(values) | uint64_t(size) | uint64_t(added);
  HIDET_DIST_OF_WIDTH(word_bytes(all), launch_shift, state, values, windows, size, added)
  check(cudaGetLastError(), "shift_state");
}

inline void replace(void *state, const void *values, int64_t bytes) {
  if (bytes <= 0) return;
  const uint64_t all = place(state) | place(values) | uint64_t(bytes);
  HIDET_DIST_OF_WIDTH(word_bytes(all), launch_replace, state, values, bytes)
  check(cudaGetLastError(), "replace_state");
}

#undef HIDET_DIST_OF_WIDTH

}  // namespace hd
