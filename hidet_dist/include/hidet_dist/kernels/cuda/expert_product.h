/*
 * Products of rows of half precision by the matrices of the experts that a router chose for them, on tensor cores; see
 * the operator's definition in hidet_dist/operators/experts.py.
 *
 * A block has some columns of one expert. It looks through all choices for the rows that chose the expert, and computes
 * them by tiles of rows: those of the matrix, and the rows wherever they lie, are copied to shared memory. An expert
 * without a row is not read. A result is summed up in the order of inner elements, whatever rows are beside it. As many
 * blocks more as have all columns write zeros to rows whose expert is not there.
 */
#pragma once
#include "hidet_dist/kernels/cuda/launch.h"
#include "hidet_dist/kernels/cuda/tensor_cores.h"

namespace hidet_dist {
namespace cuda {
namespace experts {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kColumns = 128;                    /* of a block: 32 of each warp */
constexpr int kColumnTiles = kColumns / kWarps / 16;
constexpr int kRows = 64, kBeside = 8, kRowTiles = kRows / kBeside; /* of a tile of rows */
constexpr int kDepth = 64;                       /* inner elements that are copied at once */
constexpr int kPadding = 8;                      /* elements behind a row in shared memory: other banks */
constexpr int kStages = 3;                       /* of copies, of which one is used */
constexpr int kListed = 2048;                    /* choices that are looked through at once */
constexpr int kWide = 8;                         /* elements of a copy */

struct Shape {
  int64_t tokens, choices, experts, inner, columns;
};

/* The memory of a block. */
template <bool kTransposed>
struct Tiles {
  /* The matrix as it lies: column by column if it is transposed, else row by row. */
  static constexpr int kMatrixRows = kTransposed ? kColumns : kDepth;
  static constexpr int kMatrixStep = (kTransposed ? kDepth : kColumns) + kPadding, kRowStep = kDepth + kPadding;
  static constexpr int kMatrix = kMatrixRows * kMatrixStep, kStage = kMatrix + kRows * kRowStep; /* elements */
  static constexpr size_t kBytes = 2 * kStages * kStage + (kListed + kWarps) * sizeof(int);
};

template <class Element>
struct Operands {
  const Element *rows, *matrices;
  const int32_t *chosen, *labels;
  Element *result;
};

/* The choices from `first` on that are of a label, in their order, as numbers; returns their count. */
__device__ inline int listed_rows(const int32_t *chosen, int64_t choices, int64_t first, int32_t label, int *list,
                                  int *counts) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int count = 0;
  for (int begin = 0; begin < kListed && first + begin < choices; begin += kThreads) {
    const int64_t number = first + begin + threadIdx.x;
    const bool is_own = number < choices && chosen[number] + 1 == label;
    const unsigned own = __ballot_sync(kAllLanes, is_own);
    if (lane == 0) counts[warp] = __popc(own);
    __syncthreads();
    int place = count + __popc(own & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += counts[w];
      count += counts[w];
    }
    if (is_own) list[place] = begin + threadIdx.x;
    __syncthreads();
  }
  return count;
}

/* Zeros for rows whose expert is not there, in the columns of a block. */
template <class Element>
__device__ inline void clear_others(const Shape &shape, const Operands<Element> &operands, int64_t column) {
  const int64_t choices = shape.tokens * shape.choices;
  for (int64_t number = threadIdx.x; number < choices; number += kThreads) {
    const int32_t label = operands.chosen[number] + 1;
    bool is_there = false;
    for (int64_t e = 0; e < shape.experts; ++e) is_there = is_there || operands.labels[e] == label;
    if (is_there) continue;
    for (int64_t n = column; n < column + kColumns && n < shape.columns; ++n) {
      operands.result[number * shape.columns + n] = Element(0.0f);
    }
  }
}

/* `kShared`: the choices of a token have one row. */
template <class Element, bool kTransposed, bool kShared>
__global__ void __launch_bounds__(kThreads, 2) product_kernel(Shape shape, Operands<Element> operands) {
  typedef tensor_cores::Half<Element> Half;
  typedef Tiles<kTransposed> T;
  extern __shared__ float4 expert_tiles[];
  Element *const tiles = reinterpret_cast<Element *>(expert_tiles);
  int *const list = reinterpret_cast<int *>(tiles + kStages * T::kStage), *const counts = list + kListed;
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int64_t expert = blockIdx.y, column = int64_t(blockIdx.x) * kColumns;
  if (expert == shape.experts) return clear_others(shape, operands, column);
  const int32_t label = operands.labels[expert];
  const int inner = static_cast<int>(shape.inner);
  const int columns = shape.columns - column < kColumns ? static_cast<int>(shape.columns - column) : kColumns;
  const int64_t step = kTransposed ? shape.inner : shape.columns;
  const Element *const matrix =
      operands.matrices + expert * shape.inner * shape.columns + (kTransposed ? column * step : column);
  const int64_t choices = shape.tokens * shape.choices;
  const uint32_t begin = tensor_cores::shared_address(tiles);

  /* Where a lane's matrices of instructions begin. The left operand is 16 columns of the weight, row by row if it is
   * transposed; the right one has eight rows. */
  const int upper = lane % 16, right = lane / 16 * 8, own = warp * (kColumns / kWarps);
  const int of_weight = kTransposed ? (own + upper) * T::kMatrixStep + right
                                    : (lane / 16 * 8 + lane % 8) * T::kMatrixStep + own + lane / 8 % 2 * 8;
  const int of_rows = T::kMatrix + (lane / 16 * 8 + lane % 8) * T::kRowStep + lane / 8 % 2 * 8;

  /* A thread copies a part of every kApart-th row of the matrix, and of every kRowsApart-th one of the rows. */
  constexpr int kVectors = (kTransposed ? kDepth : kColumns) / kWide, kApart = kThreads / kVectors;
  constexpr int kRowVectors = kDepth / kWide, kRowsApart = kThreads / kRowVectors;
  static_assert(kRowsApart == 2 * kBeside, "rows of a pair of instructions");
  const int own_row = thread / kVectors, part = thread % kVectors * kWide;

  for (int64_t first = 0; first < choices; first += kListed) {
    const int count = listed_rows(operands.chosen, choices, first, label, list, counts);
    for (int tile = 0; tile < count; tile += kRows) {
      const int rows = count - tile < kRows ? count - tile : kRows;
      int own_rows[kRows / kRowsApart];
#pragma unroll
      for (int i = 0; i < kRows / kRowsApart; ++i) {
        const int r = thread / kRowVectors + i * kRowsApart;
        const int number = r < rows ? static_cast<int>(first) + list[tile + r] : -1;
        own_rows[i] = kShared && number >= 0 ? number / static_cast<int>(shape.choices) : number;
      }
      const auto copy = [&](int stage) {
        const uint32_t to = begin + stage % kStages * T::kStage * 2;
        const int depth = stage * kDepth;
        const Element *const from = matrix + (kTransposed ? own_row * step + depth : (depth + own_row) * step) + part;
#pragma unroll
        for (int r = 0; r < T::kMatrixRows; r += kApart) {
          const bool is_there = kTransposed ? own_row + r < columns && depth + part < inner
                                            : depth + own_row + r < inner && part < columns;
          tensor_cores::copy_async<16>(to + ((own_row + r) * T::kMatrixStep + part) * 2,
                                       is_there ? from + r * step : matrix, is_there);
        }
        const int d = thread % kRowVectors * kWide;
#pragma unroll
        for (int i = 0; i < kRows / kRowsApart; ++i) {
          if (i * kRowsApart >= rows) continue; /* an instruction's pair has 16 rows */
          const bool is_there = own_rows[i] >= 0 && depth + d < inner;
          const int r = thread / kRowVectors + i * kRowsApart;
          tensor_cores::copy_async<16>(to + (T::kMatrix + r * T::kRowStep + d) * 2,
                                       operands.rows + (is_there ? own_rows[i] * shape.inner + depth + d : 0),
                                       is_there);
        }
      };
      float sums[kRowTiles][kColumnTiles][4];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
        for (int i = 0; i < kColumnTiles; ++i)
          for (int e = 0; e < 4; ++e) sums[t][i][e] = 0.0f;
      const int stages = (inner + kDepth - 1) / kDepth;
      __syncthreads(); /* the last tile has been read */
#pragma unroll
      for (int stage = 0; stage + 1 < kStages; ++stage) {
        if (stage < stages) copy(stage);
        tensor_cores::close_copies();
      }
      for (int stage = 0; stage < stages; ++stage) {
        tensor_cores::await_copies<kStages - 2>();
        __syncthreads();
        if (stage + kStages - 1 < stages) copy(stage + kStages - 1);
        tensor_cores::close_copies();
        const uint32_t at = begin + stage % kStages * T::kStage * 2;
#pragma unroll
        for (int k = 0; k < kDepth; k += 16) {
          uint32_t weights[kColumnTiles][4];
#pragma unroll
          for (int i = 0; i < kColumnTiles; ++i) {
            if (kTransposed) {
              tensor_cores::load_matrices(weights[i], at + (of_weight + i * 16 * T::kMatrixStep + k) * 2);
            } else {
              tensor_cores::load_transposed(weights[i], at + (of_weight + i * 16 + k * T::kMatrixStep) * 2);
            }
          }
#pragma unroll
          for (int t = 0; t < kRowTiles; t += 2) {
            if (t * kBeside >= rows) continue;
            uint32_t pair[4];
            tensor_cores::load_matrices(pair, at + (of_rows + t * kBeside * T::kRowStep + k) * 2);
#pragma unroll
            for (int i = 0; i < kColumnTiles; ++i) {
              Half::multiply(sums[t][i], weights[i], pair[0], pair[1], sums[t][i]);
              Half::multiply(sums[t + 1][i], weights[i], pair[2], pair[3], sums[t + 1][i]);
            }
          }
        }
      }
      tensor_cores::await_copies<0>();
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
        for (int j = 0; j < 2; ++j) {
          const int row = t * kBeside + lane % 4 * 2 + j;
          if (row >= rows) continue;
          Element *const to = operands.result + (first + list[tile + row]) * shape.columns + column;
          for (int i = 0; i < kColumnTiles; ++i)
            for (int half = 0; half < 2; ++half) {
              const int n = own + i * 16 + lane / 4 + half * 8;
              if (n < columns) to[n] = Element(sums[t][i][2 * half + j]);
            }
        }
    }
    __syncthreads(); /* the list has been read */
  }
}

/* result[t, c] = rows[t, c] @ matrices[chosen[t, c]]; inner elements and columns are multiples of 8. */
template <class Element, bool kTransposed, bool kShared>
inline void multiply(const Shape &shape, const Operands<Element> &operands) {
  if (shape.tokens * shape.choices == 0) return;
  constexpr size_t kBytes = Tiles<kTransposed>::kBytes;
  check(cudaFuncSetAttribute(product_kernel<Element, kTransposed, kShared>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kBytes)),
        "expert product's shared memory");
  const dim3 grid(static_cast<unsigned>(divide_up(shape.columns, kColumns)), static_cast<unsigned>(shape.experts + 1));
  product_kernel<Element, kTransposed, kShared><<<grid, kThreads, kBytes, stream()>>>(shape, operands);
  check(cudaGetLastError(), "expert product");
}

}  // namespace experts
}  // namespace cuda
}  // namespace hidet_dist
