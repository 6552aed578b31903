/*
 * Products of a matrix by a weight of 8 or 4 bits in panels, whose bytes ../../panels.h describes, on a CUDA device.
 *
 * Only the weight is rounded: what its elements are multiplied by is as it is. The products of a group are summed in
 * float32, then multiplied by the group's scale. Each sum is in an order that does not depend on the number of rows.
 *
 * Tensor cores compute products of half precision. Here are the others: elements become floats, a block has the columns
 * of a panel, one in each lane, and its warps take the groups in turns; so a weight is read once, in whole cache lines.
 *
 * Several weights that one matrix is multiplied by take one launch: a weight of few columns has fewer panels than a
 * device has multiprocessors. Each block finds its weight by its number.
 */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "hidet_dist/kernels/cuda/launch.h"
#include "hidet_dist/kernels/cuda/quantized_tiles.h"

namespace hidet_dist {
namespace cuda {
namespace quantized {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kMostRows = 8;     /* of a block: with more, sums would not be in registers */
constexpr int kMostGrid = 65535; /* blocks along the second dim of a grid */

/* The weight's rows whose elements one word has. A variable, as device code calls no function of the host. */
template <int kBits>
constexpr int kRowsOfWord = 32 / kBits;

/* The elements of a word of a column, in the order of their rows. */
template <int kBits>
__device__ inline void unpack(uint32_t word, float (&to)[32 / kBits]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int byte = static_cast<int>(word >> (8 * i) & 0xff);
    if (kBits == 8) {
      to[i] = static_cast<float>(static_cast<int8_t>(byte));
    } else {
      to[i] = static_cast<float>((byte & 15) - 8);
      to[(4 + i) % kRowsOfWord<kBits>] = static_cast<float>((byte >> 4) - 8);
    }
  }
}

template <class Element, int kBits, int kGroup, int kRows, int kParts>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const Element *left, const Parts<Element, kParts> parts, int64_t rows, int64_t depth) {
  constexpr int kGroupBytes = kWarp * (2 + kGroup * kBits / 8);
  constexpr int kWords = kGroup / kRowsOfWord<kBits>;
  extern __shared__ float4 quantized_memory[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  float *const own = reinterpret_cast<float *>(quantized_memory) + warp * kRows * kGroup; /* a group of the rows */
  const int64_t first = int64_t(blockIdx.y) * kRows, groups = (depth + kGroup - 1) / kGroup;
  const Part<Element> part = parts.of(blockIdx.x);
  const int64_t number = int64_t(blockIdx.x) - part.first; /* of the panel */
  const uint8_t *const panel = part.panels + number * groups * kGroupBytes;
  float sums[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = 0.0f;
  for (int64_t group = warp; group < groups; group += kWarps) {
    const uint8_t *const at = panel + group * kGroupBytes;
    const float scale = __half2float(reinterpret_cast<const __half *>(at)[lane]);
    const uint32_t *const words = reinterpret_cast<const uint32_t *>(at + 2 * kWarp);
    uint32_t elements[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) elements[w] = words[w * kWarp + lane];
    __syncwarp(); /* all lanes have read the last group's */
    for (int i = lane; i < kRows * kGroup; i += kWarp) {
      const int64_t row = first + i / kGroup, k = group * kGroup + i % kGroup;
      own[i] = row < rows && k < depth ? to_float(left[row * depth + k]) : 0.0f;
    }
    __syncwarp();
    float of_group[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) of_group[r] = 0.0f;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float weights[kRowsOfWord<kBits>];
      unpack<kBits>(elements[w], weights);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int quad = 0; quad < kRowsOfWord<kBits>; quad += 4) {
          const float4 x = *reinterpret_cast<const float4 *>(own + r * kGroup + w * kRowsOfWord<kBits> + quad);
          of_group[r] = fmaf(x.x, weights[quad], of_group[r]);
          of_group[r] = fmaf(x.y, weights[quad + 1], of_group[r]);
          of_group[r] = fmaf(x.z, weights[quad + 2], of_group[r]);
          of_group[r] = fmaf(x.w, weights[quad + 3], of_group[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = fmaf(scale, of_group[r], sums[r]);
  }
  __syncthreads(); /* the warps' groups have been read: their memory is that of sums now */
  float *const all = reinterpret_cast<float *>(quantized_memory);
#pragma unroll
  for (int r = 0; r < kRows; ++r) all[(warp * kRows + r) * kWarp + lane] = sums[r];
  __syncthreads();
  for (int r = warp; r < kRows; r += kWarps) {
    const int64_t row = first + r, column = number * kWarp + lane;
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += all[(w * kRows + r) * kWarp + lane];
    if (row < rows && column < part.columns) part.write(row * part.columns + column, sum);
  }
}

template <class Element, int kBits, int kGroup, int kRows, int kParts>
inline void launch(const Element *left, Parts<Element, kParts> parts, int64_t rows, int64_t depth) {
  constexpr size_t kBytes = sizeof(float) * kWarps * kRows * (kGroup < kWarp ? kWarp : kGroup);
  const dim3 grid(static_cast<unsigned>(parts.number(kWarp)), static_cast<unsigned>(divide_up(rows, kRows)));
  product_kernel<Element, kBits, kGroup, kRows, kParts><<<grid, kThreads, kBytes, stream()>>>(left, parts, rows, depth);
  check(cudaGetLastError(), "quantized product");
}

/* parts.at[p].result[rows, columns] = left[rows, depth] by a weight of [depth, columns], on so many multiprocessors. */
template <class Element, int kBits, int kGroup, int kParts>
inline void multiply(const Element *left, Parts<Element, kParts> parts, int64_t rows, int64_t depth,
                     int64_t multiprocessors) {
  if constexpr (!std::is_same<Element, float>::value) {
    if (depth % 8 == 0) { /* a row begins at a multiple of 16 bytes */
      in_tiles::multiply<Element, kBits, kGroup, kParts>(left, parts, rows, depth, multiprocessors);
      return;
    }
  }
  const int64_t most = int64_t(kMostGrid) * kMostRows;
  for (; rows > 0; rows -= most, left += most * depth) {
    const int64_t some = rows < most ? rows : most;
    if (some == 1) {
      launch<Element, kBits, kGroup, 1, kParts>(left, parts, some, depth);
    } else if (some == 2) {
      launch<Element, kBits, kGroup, 2, kParts>(left, parts, some, depth);
    } else if (some <= 4) {
      launch<Element, kBits, kGroup, 4, kParts>(left, parts, some, depth);
    } else {
      launch<Element, kBits, kGroup, kMostRows, kParts>(left, parts, some, depth);
    }
    for (Part<Element> &part : parts.at) {
      part.result += most * part.columns;
      if (part.added != nullptr) part.added += most * part.columns;
    }
  }
}

}  // namespace quantized
}  // namespace cuda
}  // namespace hidet_dist
