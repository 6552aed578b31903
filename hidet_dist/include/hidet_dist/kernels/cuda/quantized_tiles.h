/*
 * Products by a weight of 8 or 4 bits on tensor cores, for a left operand of half precision; see quantized_product.h for
 * the weight. Its elements are whole numbers that half precision has exactly; their products are summed in float32.
 *
 * An instruction has 16 columns of the weight and 8 rows of the left operand. A warp has the 32 columns of a panel: of
 * each 32 rows of the weight, a lane has 8 neighbouring ones of four neighbouring columns, as they lie in the panel. The
 * products of a group are summed by instructions from zero on, and the groups are then summed, each times its scale, in
 * their order. Where there are few rows, a block's warps take groups in turns, and its threads sum them up from shared
 * memory. Where there are many, a warp takes all groups; so that it does where its blocks would leave multiprocessors
 * idle, some rows are few. A result has the same bits in both cases, whatever rows are beside it.
 */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hidet_dist/kernels/cuda/launch.h"
#include "hidet_dist/kernels/cuda/tensor_cores.h"

namespace hidet_dist {
namespace cuda {
namespace quantized {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void put(float &to, float x) { to = x; }
__device__ inline void put(__half &to, float x) { to = __float2half_rn(x); }
__device__ inline void put(__nv_bfloat16 &to, float x) { to = __float2bfloat16_rn(x); }

/* A weight, and the product by it, to which `added` is added unless that is null; `first` is the first block of its
 * columns. */
template <class Element>
struct Part {
  const uint8_t *panels;
  const Element *added;
  Element *result;
  int64_t columns, first;

  /* Write an element. The product is rounded before the sum is, as by kernels of their own. */
  __device__ void write(int64_t at, float product) const {
    Element y;
    put(y, product);
    if (added != nullptr) put(y, to_float(y) + to_float(added[at]));
    result[at] = y;
  }
};

template <class Element, int kParts>
struct Parts {
  Part<Element> at[kParts];

  /* Number the blocks, each of so many columns of one weight; returns how many there are. */
  int64_t number(int64_t columns) {
    int64_t blocks = 0;
    for (Part<Element> &part : at) {
      part.first = blocks;
      blocks += divide_up(part.columns, columns);
    }
    return blocks;
  }

  /* The weight of a block. */
  __device__ Part<Element> of(int64_t block) const {
    Part<Element> found = at[0];
#pragma unroll
    for (int p = 1; p < kParts; ++p) {
      if (block >= at[p].first) found = at[p];
    }
    return found;
  }
};

namespace in_tiles {

constexpr int kStep = 32;   /* rows of the weight that a lane has 8 of */
constexpr int kOfLane = 4;  /* columns of a lane */
constexpr int kBeside = 8;  /* rows of the left operand of an instruction */
constexpr int kPairs = 2;   /* instructions that a lane's columns take */
constexpr int kFewRows = 32;

/* Pairs of elements of a word, which are whole numbers: of 4 bits rows (0, 2), (1, 3), (4, 6), (5, 7); of 8 bits the
 * first two of these. A number of half precision whose last bits are those of an element is a power of 2 more than it. */
template <class Element, int kBits>
struct Words;
template <>
struct Words<__half, 4> {
  __device__ static uint32_t pair(uint32_t word, int i) {
    const uint32_t bits = (word >> (i / 2 * 4 + i % 2 * 8) & 0x000f000fu) | 0x64006400u; /* 1024 + 8 + element */
    return tensor_cores::Half<__half>::minus(bits, 0x64086408u);
  }
};
template <>
struct Words<__nv_bfloat16, 4> {
  __device__ static uint32_t pair(uint32_t word, int i) {
    const uint32_t bits = (word >> (i / 2 * 4 + i % 2 * 8) & 0x000f000fu) | 0x43004300u; /* 128 + 8 + element */
    return tensor_cores::Half<__nv_bfloat16>::minus(bits, 0x43084308u);
  }
};
template <>
struct Words<__half, 8> {
  __device__ static uint32_t pair(uint32_t word, int i) {
    const uint32_t bits = ((word ^ 0x80808080u) >> (8 * i) & 0x00ff00ffu) | 0x64006400u; /* 1024 + 128 + element */
    return tensor_cores::Half<__half>::minus(bits, 0x64806480u);
  }
};
template <>
struct Words<__nv_bfloat16, 8> { /* which has too few bits for that, but all elements */
  __device__ static float element(uint32_t byte) {
    return __int_as_float(static_cast<int>(0x4b000000u | byte)) - 8388736.0f; /* 2^23 + 128 + element */
  }
  __device__ static uint32_t pair(uint32_t word, int i) {
    const uint32_t bits = (word ^ 0x80808080u) >> (8 * i);
    return tensor_cores::Half<__nv_bfloat16>::pair(element(bits & 0xff), element(bits >> 16 & 0xff));
  }
};

template <class Element, int kBits, int kGroup>
struct Panel {
  typedef tensor_cores::Half<Element> Half;
  static constexpr int kGroupBytes = kWarp * (2 + kGroup * kBits / 8);
  static constexpr int kSteps = kGroup / kStep;       /* of a group */
  static constexpr int kVectors = kBits / 4;          /* of 16 bytes that a lane has of a step */
  static constexpr int kWordRows = kStep * kBits / 32; /* words of a column in a step */

  /* A lane's elements of a step of a group: of each vector, words of its four columns. */
  __device__ static void load(uint4 (&to)[kVectors], const uint8_t *group, int step, int lane) {
    const uint4 *const words = reinterpret_cast<const uint4 *>(group + 2 * kWarp);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int row = step * kWordRows + lane % 4 * kVectors + v;
      to[v] = words[row * (kWarp / kOfLane) + lane / 4];
    }
  }
  __device__ static void load_scales(float (&to)[kOfLane], const uint8_t *group, int lane) {
    const uint2 both = reinterpret_cast<const uint2 *>(group)[lane / 4];
    const __half *const scales = reinterpret_cast<const __half *>(&both);
    for (int c = 0; c < kOfLane; ++c) to[c] = __half2float(scales[c]);
  }

  /* Left operands of two instructions, of the upper or lower rows of a lane's elements: for its columns 0 and 1, and for
   * 2 and 3. */
  __device__ static void unpack(uint32_t (&to)[kPairs][4], const uint4 (&words)[kVectors], int half) {
    const uint4 &vector = words[kBits == 8 ? half : 0];
    const uint32_t columns[kOfLane] = {vector.x, vector.y, vector.z, vector.w};
    const int first = kBits == 8 ? 0 : 2 * half;
#pragma unroll
    for (int c = 0; c < kOfLane; ++c) {
      to[c / 2][c % 2] = Words<Element, kBits>::pair(columns[c], first);
      to[c / 2][2 + c % 2] = Words<Element, kBits>::pair(columns[c], first + 1);
    }
  }
};

/* The right operand of an instruction: of eight neighbouring elements of a row the upper or lower ones, in the order in
 * which words have them. */
__device__ inline void in_order(uint32_t (&to)[2], uint4 row, int half) {
  const uint32_t first = half == 0 ? row.x : row.z, second = half == 0 ? row.y : row.w;
  to[0] = __byte_perm(first, second, 0x5410);
  to[1] = __byte_perm(first, second, 0x7632);
}

/* Add the products of a step: sums[t] are those of 8 rows, and a lane's columns 2 i and 2 i + 1. */
template <class Element, int kBits, int kGroup, int kTiles, class Rows>
__device__ inline void multiply_step(float (&sums)[kTiles][kPairs][4],
                                     const uint4 (&words)[Panel<Element, kBits, kGroup>::kVectors], const Rows &rows) {
  typedef Panel<Element, kBits, kGroup> P;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t weights[kPairs][4];
    P::unpack(weights, words, half);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      uint32_t row[2];
      in_order(row, rows(t), half);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) P::Half::multiply(sums[t][i], weights[i], row[0], row[1], sums[t][i]);
    }
  }
}

template <int kTiles>
__device__ inline void clear(float (&sums)[kTiles][kPairs][4]) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
    for (int i = 0; i < kPairs; ++i)
      for (int e = 0; e < 4; ++e) sums[t][i][e] = 0.0f;
}

constexpr int kAtOnce = 128;              /* rows of the weight that a warp has at once */
constexpr int kSumStep = kWarp + kOfLane; /* floats from one row of sums to the next: other banks */

/* Blocks of a panel and few rows, whose warps take groups in turns. */
template <class Element, int kBits, int kGroup, int kTiles>
struct Few {
  static constexpr int kRows = kTiles * kBeside;
  static constexpr int kWarps = 16 / kTiles, kThreads = kWarps * kWarp;
  static constexpr int kGroups = kAtOnce / kGroup; /* of a warp at once */
  static constexpr int kTogether = kWarps * kGroups;
  static constexpr size_t kBytes = sizeof(float) * kTogether * (kRows * kSumStep + kWarp);
};

template <class Element, int kBits, int kGroup, int kTiles, int kParts>
__global__ void __launch_bounds__(Few<Element, kBits, kGroup, kTiles>::kThreads)
    few_rows_kernel(const Element *left, const Parts<Element, kParts> parts, int64_t rows, int64_t depth) {
  typedef Panel<Element, kBits, kGroup> P;
  typedef Few<Element, kBits, kGroup, kTiles> F;
  constexpr int kGroups = F::kGroups;
  extern __shared__ float4 quantized_tiles[];
  float *const sums = reinterpret_cast<float *>(quantized_tiles);  /* of each group, row and column */
  float *const scales = sums + F::kTogether * F::kRows * kSumStep; /* of each group and column */
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t first = int64_t(blockIdx.y) * F::kRows;
  const int groups = static_cast<int>((depth + kGroup - 1) / kGroup);
  const int count = rows - first < F::kRows ? static_cast<int>(rows - first) : F::kRows;
  const Part<Element> part = parts.of(blockIdx.x);
  const int64_t panel_number = int64_t(blockIdx.x) - part.first;
  const uint8_t *const panel = part.panels + panel_number * groups * P::kGroupBytes;

  uint4 next_words[kGroups][P::kSteps][P::kVectors];
  float next_scales[kGroups][kOfLane];
  const auto load = [&](int group) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (group + g >= groups) continue;
      const uint8_t *const at = panel + int64_t(group + g) * P::kGroupBytes;
      P::load_scales(next_scales[g], at, lane);
#pragma unroll
      for (int step = 0; step < P::kSteps; ++step) P::load(next_words[g][step], at, step, lane);
    }
  };
  float total[kTiles];
  for (int t = 0; t < kTiles; ++t) total[t] = 0.0f;
  load(warp * kGroups);
  for (int begin = 0; begin < groups; begin += F::kTogether) {
    const int own = begin + warp * kGroups;
    /* All of a round's rows, and the weights of the next one, are under way before the first is used. */
    uint4 words[kGroups][P::kSteps][P::kVectors], of_rows[kGroups][P::kSteps][kTiles];
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      for (int step = 0; step < P::kSteps; ++step) {
        for (int v = 0; v < P::kVectors; ++v) words[g][step][v] = next_words[g][step][v];
        const int64_t k = int64_t(own + g) * kGroup + step * kStep + lane % 4 * 8;
        for (int t = 0; t < kTiles; ++t) {
          const int row = t * kBeside + lane / 4;
          of_rows[g][step][t] = make_uint4(0, 0, 0, 0);
          if (row < count && k < depth) {
            of_rows[g][step][t] = *reinterpret_cast<const uint4 *>(left + (first + row) * depth + k);
          }
        }
      }
    if (lane % 4 == 0) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (own + g >= groups) continue;
        *reinterpret_cast<float4 *>(scales + (warp * kGroups + g) * kWarp + lane / 4 * kOfLane) =
            make_float4(next_scales[g][0], next_scales[g][1], next_scales[g][2], next_scales[g][3]);
      }
    }
    if (begin + F::kTogether < groups) load(own + F::kTogether);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (own + g >= groups) continue;
      float of_group[kTiles][kPairs][4];
      clear(of_group);
#pragma unroll
      for (int step = 0; step < P::kSteps; ++step) {
        multiply_step<Element, kBits, kGroup, kTiles>(of_group, words[g][step],
                                                      [&](int t) { return of_rows[g][step][t]; });
      }
      float *const to = sums + (warp * kGroups + g) * F::kRows * kSumStep + lane / 4 * kOfLane;
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        for (int j = 0; j < 2; ++j) {
          const int row = t * kBeside + lane % 4 * 2 + j;
          if (row >= count) continue;
          const float (&own_sums)[kPairs][4] = of_group[t];
          *reinterpret_cast<float4 *>(to + row * kSumStep) =
              make_float4(own_sums[0][j], own_sums[0][2 + j], own_sums[1][j], own_sums[1][2 + j]);
        }
    }
    __syncthreads();
    const int together = groups - begin < F::kTogether ? groups - begin : F::kTogether;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int row = t * kBeside + warp;
      if (warp >= kBeside || row >= count) continue;
#pragma unroll 8
      for (int g = 0; g < together; ++g) {
        total[t] = fmaf(scales[g * kWarp + lane], sums[(g * F::kRows + row) * kSumStep + lane], total[t]);
      }
    }
    __syncthreads();
  }
  const int64_t column = panel_number * kWarp + lane;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int row = t * kBeside + warp;
    if (warp < kBeside && row < count && column < part.columns) {
      part.write((first + row) * part.columns + column, total[t]);
    }
  }
}

constexpr int kWarpsOfMany = 4, kThreadsOfMany = kWarpsOfMany * kWarp;
constexpr int kTilesOfMany = 8, kRowsOfMany = kTilesOfMany * kBeside;
constexpr int kStage = 2;  /* steps whose rows are copied at once */
constexpr int kStages = 3; /* of which one is used */

/* Blocks of four panels of a weight and many rows: a warp has a panel, and all groups. */
template <class Element, int kBits, int kGroup, int kParts>
__global__ void __launch_bounds__(kThreadsOfMany)
    many_rows_kernel(const Element *left, const Parts<Element, kParts> parts, int64_t rows, int64_t depth) {
  typedef Panel<Element, kBits, kGroup> P;
  constexpr int kElements = kRowsOfMany * kStep; /* of a step of the left operand, row by row */
  extern __shared__ float4 quantized_tiles[];
  Element *const tiles = reinterpret_cast<Element *>(quantized_tiles);
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const Part<Element> own_part = parts.of(blockIdx.y);
  const int64_t columns = own_part.columns, first = int64_t(blockIdx.x) * kRowsOfMany;
  const int64_t panel_number = (int64_t(blockIdx.y) - own_part.first) * kWarpsOfMany + warp;
  const int groups = static_cast<int>((depth + kGroup - 1) / kGroup), steps = groups * P::kSteps;
  const bool has_panel = panel_number * kWarp < columns;
  const uint8_t *const panel = own_part.panels + (has_panel ? panel_number : 0) * groups * P::kGroupBytes;
  const uint32_t begin = tensor_cores::shared_address(tiles);

  /* A thread copies a part of every kApart-th row. */
  constexpr int kVectors = kStage * kStep / 8, kApart = kThreadsOfMany / kVectors;
  const int own_row = thread / kVectors, part = thread % kVectors;
  const Element *const from = left + (first + own_row) * depth + part * 8;
  const uint32_t to = begin + (part / 4 * kElements + own_row * kStep + part % 4 * 8) * sizeof(Element);
  const int here = rows - first < kRowsOfMany ? static_cast<int>(rows - first) : kRowsOfMany;
  const auto copy = [&](int stage) {
    const int k = stage * kStage * kStep;
#pragma unroll
    for (int row = 0; row < kRowsOfMany; row += kApart) {
      const bool is_there = own_row + row < here && k + part * 8 < depth;
      tensor_cores::copy_async<16>(to + (stage % kStages * kStage * kElements + row * kStep) * sizeof(Element),
                                   is_there ? from + row * depth + k : left, is_there);
    }
  };
  uint4 words[kStage][P::kVectors];
  const auto load = [&](int stage) {
#pragma unroll
    for (int s = 0; s < kStage; ++s) {
      const int step = stage * kStage + s;
      if (step < steps) {
        P::load(words[s], panel + int64_t(step / P::kSteps) * P::kGroupBytes, step % P::kSteps, lane);
      }
    }
  };

  float sums[kTilesOfMany][kPairs][4], of_group[kTilesOfMany][kPairs][4];
  clear(sums);
  clear(of_group);
  const int stages = (steps + kStage - 1) / kStage;
#pragma unroll
  for (int stage = 0; stage + 1 < kStages; ++stage) {
    if (stage < stages) copy(stage);
    tensor_cores::close_copies();
  }
  load(0);
  for (int stage = 0; stage < stages; ++stage) {
    tensor_cores::await_copies<kStages - 2>();
    __syncthreads();
    if (stage + kStages - 1 < stages) copy(stage + kStages - 1);
    tensor_cores::close_copies();
    uint4 own[kStage][P::kVectors];
#pragma unroll
    for (int s = 0; s < kStage; ++s)
      for (int v = 0; v < P::kVectors; ++v) own[s][v] = words[s][v];
    load(stage + 1);
#pragma unroll
    for (int s = 0; s < kStage; ++s) {
      const int step = stage * kStage + s;
      if (step >= steps) continue;
      const Element *const tile = tiles + (stage % kStages * kStage + s) * kElements + lane / 4 * kStep + lane % 4 * 8;
      multiply_step<Element, kBits, kGroup, kTilesOfMany>(
          of_group, own[s], [&](int t) { return *reinterpret_cast<const uint4 *>(tile + t * kBeside * kStep); });
      if ((step + 1) % P::kSteps != 0) continue;
      float scales[kOfLane];
      P::load_scales(scales, panel + int64_t(step / P::kSteps) * P::kGroupBytes, lane);
#pragma unroll
      for (int t = 0; t < kTilesOfMany; ++t)
        for (int i = 0; i < kPairs; ++i)
          for (int e = 0; e < 4; ++e) {
            sums[t][i][e] = fmaf(scales[2 * i + e / 2], of_group[t][i][e], sums[t][i][e]);
          }
      clear(of_group);
    }
  }
  tensor_cores::await_copies<0>();
  if (!has_panel) return;
  const int64_t column = panel_number * kWarp + lane / 4 * kOfLane;
#pragma unroll
  for (int t = 0; t < kTilesOfMany; ++t)
    for (int j = 0; j < 2; ++j) {
      const int64_t row = first + t * kBeside + lane % 4 * 2 + j;
      if (row >= rows) continue;
      const int64_t at = row * columns + column;
      if (columns % kOfLane == 0 && own_part.added == nullptr) {
        if (column >= columns) continue;
        const uint2 four = make_uint2(P::Half::pair(sums[t][0][j], sums[t][0][2 + j]),
                                      P::Half::pair(sums[t][1][j], sums[t][1][2 + j]));
        *reinterpret_cast<uint2 *>(own_part.result + at) = four;
      } else {
        for (int c = 0; c < kOfLane; ++c) {
          if (column + c < columns) own_part.write(at + c, sums[t][c / 2][c % 2 * 2 + j]);
        }
      }
    }
}

template <class Element, int kBits, int kGroup, int kTiles, int kParts>
inline void launch_few(const Element *left, Parts<Element, kParts> parts, int64_t rows, int64_t depth) {
  typedef Few<Element, kBits, kGroup, kTiles> F;
  const auto kernel = few_rows_kernel<Element, kBits, kGroup, kTiles, kParts>;
  if (F::kBytes > kUsualSharedBytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(F::kBytes)),
          "quantized product's shared memory");
  }
  const dim3 grid(static_cast<unsigned>(parts.number(kWarp)), static_cast<unsigned>(divide_up(rows, F::kRows)));
  kernel<<<grid, F::kThreads, F::kBytes, stream()>>>(left, parts, rows, depth);
}

/* Products of left[rows, depth] by weights of [depth, columns], on so many multiprocessors; the depth is a multiple of
 * 8. */
template <class Element, int kBits, int kGroup, int kParts>
inline void multiply(const Element *left, Parts<Element, kParts> parts, int64_t rows, int64_t depth,
                     int64_t multiprocessors) {
  if (rows <= 0) return;
  const int64_t blocks = parts.number(kWarpsOfMany * kWarp), blocks_of_rows = divide_up(rows, kRowsOfMany);
  if (rows <= kBeside) {
    launch_few<Element, kBits, kGroup, 1, kParts>(left, parts, rows, depth);
  } else if (rows <= kFewRows || blocks * blocks_of_rows < multiprocessors) {
    launch_few<Element, kBits, kGroup, 2, kParts>(left, parts, rows, depth);
  } else {
    constexpr size_t kBytes = sizeof(Element) * kStages * kStage * kRowsOfMany * kStep;
    const dim3 grid(static_cast<unsigned>(blocks_of_rows), static_cast<unsigned>(blocks));
    many_rows_kernel<Element, kBits, kGroup, kParts>
        <<<grid, kThreadsOfMany, kBytes, stream()>>>(left, parts, rows, depth);
  }
  check(cudaGetLastError(), "quantized product");
}

}  // namespace in_tiles
}  // namespace quantized
}  // namespace cuda
}  // namespace hidet_dist
