/*
 * What the kernels of attention over rows have in common, on a CUDA device: operands, the cut of sequences into chunks,
 * and the merge of chunks.
 *
 * The rows of a sequence are cut into chunks of a fixed length. A chunk gives, for each query, the greatest score, the
 * sum of exponentials and the weighted sum of values, in float32; these are merged in the order of chunks (Milakov and
 * Gimelshein 2018; Dao et al. 2023, "Flash-Decoding"). Where there are few tokens, blocks take chunks in turns, and a
 * second kernel merges what they leave in memory. Else a block takes all chunks of its tokens, one after the other. Each
 * sum is in one order whichever it is, so a token's result has the same bits whatever tokens are beside it, and however
 * wide the table is.
 */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>
#include <math.h>

#include "hidet_dist/kernels/cuda/launch.h"
#include "hidet_dist/kernels/cuda/tensor_cores.h"

namespace hidet_dist {
namespace cuda {
namespace row_attention {

constexpr int kThreads = 128; /* of a block */
constexpr int kWarps = kThreads / kWarp;
constexpr size_t kMostBytes = 96 * 1024; /* of shared memory: all architectures from sm_80 on have more */
constexpr int kMostLanes = 65535;        /* blocks along the second dim of a grid */
constexpr float kNothing = -FLT_MAX;     /* the score of a row that is not seen, as in the definition */

constexpr int round_up(int a, int b) { return (a + b - 1) / b * b; }
constexpr int power_of_two(int least) {
  int power = 1;
  while (power < least) power *= 2;
  return power;
}

/* What a program is compiled for. */
template <class QueryType, class PoolType, int kHeads_, int kGroups_, int kSizeK_, int kSizeV_, int kStepV_, int kPage_,
          bool kPartial_, bool kValuesInKeys_, bool kIsCapped_, int kChunk_>
struct Static {
  typedef QueryType Query;
  typedef PoolType Pool;
  static constexpr int kHeads = kHeads_, kGroups = kGroups_, kSizeK = kSizeK_, kSizeV = kSizeV_;
  static constexpr int kStepV = kStepV_; /* elements from one group's values to the next one's */
  static constexpr int kPage = kPage_;
  static constexpr bool kPartial = kPartial_; /* the result of each part, with the logarithm of its sum behind it */
  static constexpr bool kValuesInKeys = kValuesInKeys_;
  static constexpr bool kIsCapped = kIsCapped_; /* whether scores have a soft cap */
  static constexpr int kChunk = kChunk_; /* rows of a chunk */
  static constexpr int kOfGroup = kHeads / kGroups;
  static constexpr int kRecord = kSizeV + 2; /* floats of a chunk's results: greatest score, sum, weighted values */

  /* Elements that are read at once: of a width that each row begins at a multiple of. */
  static constexpr int wide(int size, int step, int most) {
    int width = most;
    while (size % width != 0 || step % width != 0) width /= 2;
    return width;
  }
};

struct Shape {
  int64_t tokens, parts, rows, sequences, columns; /* rows are those of a part's pool */
  float scale, softcap;
  int64_t fill; /* blocks that fill the device */
};

template <class S>
struct Operands {
  const typename S::Query *query;
  const typename S::Pool *keys, *values;
  const int32_t *table, *sequences, *begins, *ends;
  const float *sinks; /* or nullptr */
};

__device__ inline void put(float &to, float x) { to = x; }
__device__ inline void put(__half &to, float x) { to = __float2half_rn(x); }
__device__ inline void put(__nv_bfloat16 &to, float x) { to = __float2bfloat16_rn(x); }

/* The numbers whose powers weights are: kernels with tensor cores take powers of 2, of scores times its logarithm. */
struct Natural {
  __device__ static float power(float x) { return expf(x); }
  __device__ static float of_score(float x) { return x; }
  __device__ static float logarithm(float total, float most) { return logf(total) + most; }
};
struct Binary {
  static constexpr float kOfE = 1.44269504088896341f, kOfTwo = 0.693147180559945309f;
  __device__ static float power(float x) { return tensor_cores::exp2_of(x); }
  __device__ static float of_score(float x) { return x * kOfE; }
  __device__ static float logarithm(float total, float most) { return fmaf(most, kOfTwo, logf(total)); }
};

/* What queries have seen so far takes in what they see in another chunk. */
struct Merge {
  float most, total, before, fresh;
};
template <class Base>
__device__ inline Merge merged(float most, float total, float chunk_most, float chunk_total) {
  Merge result;
  result.most = fmaxf(most, chunk_most);
  result.before = Base::power(most - result.most);
  result.fresh = Base::power(chunk_most - result.most);
  result.total = fmaf(chunk_total, result.fresh, total * result.before);
  return result;
}
__device__ inline float merged_value(Merge by, float before, float fresh) {
  return fmaf(fresh, by.fresh, before * by.before);
}

/* Where the result of a token's head is, and what its sums are multiplied by. */
template <class S>
struct Finish {
  void *y;
  int64_t place; /* of its first element */
  float factor;

  /* Writes what is behind the result of a part: the logarithm of the sum. All threads of a head do. */
  template <class Base>
  __device__ Finish(Base, const Shape &shape, const Operands<S> &operands, int64_t part, int64_t token, int head,
                    float most, float total, void *result) {
    y = result;
    place = ((part * shape.tokens + token) * S::kHeads + head) * (S::kSizeV + S::kPartial);
    factor = total == 0.0f ? 0.0f : 1.0f / total;
    if (S::kPartial) {
      static_cast<float *>(y)[place + S::kSizeV] = total == 0.0f ? kNothing : Base::logarithm(total, most);
    } else if (operands.sinks != nullptr && total != 0.0f) {
      const Merge with_sink = merged<Base>(most, total, Base::of_score(operands.sinks[head]), 1.0f);
      factor = with_sink.before / with_sink.total;
    }
  }
  __device__ void put(int d, float sum) const {
    if (S::kPartial) {
      static_cast<float *>(y)[place + d] = sum * factor;
    } else {
      row_attention::put(static_cast<typename S::Query *>(y)[place + d], sum * factor);
    }
  }
};

/* The rows that a token sees: places in its sequence, from `begin` to before `end`. */
struct Seen {
  int begin, end;
};
template <class S>
__device__ inline Seen seen_by(const Shape &shape, const Operands<S> &operands, int64_t part, int64_t token) {
  const int64_t place = token * shape.parts + part, limit = shape.columns * S::kPage;
  const int begin = operands.begins[place], end = operands.ends[place];
  const Seen result = {begin < 0 ? 0 : begin, end < limit ? end : static_cast<int>(limit)};
  return result.begin < result.end ? result : Seen{0, 0};
}

/* The chunks of which a token sees a row: from `first` to before `behind`. */
struct Chunks {
  int first, behind;
};
template <class S>
__device__ inline Chunks chunks_of(Seen seen) {
  return {seen.begin / S::kChunk, seen.end / S::kChunk + (seen.end % S::kChunk > 0)};
}

/* The pages of a sequence; nullptr if the table does not have it. */
template <class S>
__device__ inline const int32_t *pages_of(const Shape &shape, const Operands<S> &operands, int64_t part,
                                          int32_t sequence) {
  if (sequence < 0 || sequence >= shape.sequences) return nullptr;
  return operands.table + (sequence * shape.parts + part) * shape.columns;
}

/* The row of the pool at a place of a sequence; -1 if there is none. */
template <class S>
__device__ inline int64_t row_at(const Shape &shape, const int32_t *pages, int place) {
  if (pages == nullptr) return -1;
  const int64_t row = int64_t(pages[place / S::kPage]) * S::kPage + place % S::kPage;
  return row < 0 || row >= shape.rows ? -1 : row;
}

/* Where a chunk's results of a head are: floats of S::kRecord. */
template <class S>
__device__ inline float *record(const Shape &shape, float *results, int64_t part, int64_t token, int head,
                                int64_t chunk, int64_t chunks) {
  return results + (((part * shape.tokens + token) * S::kHeads + head) * chunks + chunk) * S::kRecord;
}

/* What a block computes: a token, and those beside it; the heads from `head` on of a group. */
struct Place {
  int64_t token, part;
  int group, head;
};
template <class S, int kHeadsOfBlock>
__device__ inline Place place_of(const Shape &shape, int64_t block, int64_t tokens_of_block) {
  constexpr int kBlocksOfGroup = (S::kOfGroup + kHeadsOfBlock - 1) / kHeadsOfBlock;
  Place result;
  result.head = static_cast<int>(block % kBlocksOfGroup) * kHeadsOfBlock;
  block /= kBlocksOfGroup;
  result.group = static_cast<int>(block % S::kGroups);
  block /= S::kGroups;
  const int64_t of_part = (shape.tokens + tokens_of_block - 1) / tokens_of_block;
  result.token = block % of_part * tokens_of_block;
  result.part = block / of_part;
  return result;
}
/* The blocks of a launch in which a block has so many tokens. */
template <class S, int kHeadsOfBlock>
inline int64_t blocks_of(const Shape &shape, int64_t tokens_of_block) {
  constexpr int kBlocksOfGroup = (S::kOfGroup + kHeadsOfBlock - 1) / kHeadsOfBlock;
  return shape.parts * divide_up(shape.tokens, tokens_of_block) * S::kGroups * kBlocksOfGroup;
}
template <class S>
inline int64_t chunks_in(const Shape &shape) {
  return divide_up(shape.columns * S::kPage, S::kChunk);
}

/* A block merges the chunks of a token's head. */
template <class S, class Base>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(Shape shape, Operands<S> operands, float *results, int64_t chunks, void *y) {
  const int head = static_cast<int>(blockIdx.x % S::kHeads);
  const int64_t token = blockIdx.x / S::kHeads % shape.tokens, part = blockIdx.x / S::kHeads / shape.tokens;
  const Chunks own = chunks_of<S>(seen_by<S>(shape, operands, part, token));
  constexpr int kShare = (S::kSizeV + kThreads - 1) / kThreads;
  float most = kNothing, total = 0.0f, values[kShare];
  for (int i = 0; i < kShare; ++i) values[i] = 0.0f;
  for (int64_t c = own.first; c < own.behind; ++c) {
    const float *const from = record<S>(shape, results, part, token, head, c, chunks);
    const Merge by = merged<Base>(most, total, from[0], from[1]);
    most = by.most;
    total = by.total;
    for (int i = 0; i < kShare; ++i) {
      const int d = i * kThreads + threadIdx.x;
      if (d < S::kSizeV) values[i] = merged_value(by, values[i], from[2 + d]);
    }
  }
  const Finish<S> to(Base(), shape, operands, part, token, head, most, total, y);
  for (int i = 0; i < kShare; ++i) {
    const int d = i * kThreads + threadIdx.x;
    if (d < S::kSizeV) to.put(d, values[i]);
  }
}

template <class Kernel>
inline void allow(Kernel kernel, size_t bytes) {
  if (bytes <= kUsualSharedBytes) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "row_attention's shared memory");
}

/* Blocks that share the chunks of a token, where so many blocks have one token each. */
inline int64_t lanes_of(const Shape &shape, int64_t blocks, int64_t chunks) {
  int64_t lanes = divide_up(4 * shape.fill, blocks); /* several blocks run on a multiprocessor at a time */
  lanes = lanes < chunks ? lanes : chunks;
  return lanes < kMostLanes ? lanes : kMostLanes;
}

template <class S, class Base>
inline void merge(const Shape &shape, const Operands<S> &operands, float *results, void *y) {
  const unsigned blocks = static_cast<unsigned>(shape.parts * shape.tokens * S::kHeads);
  merge_kernel<S, Base><<<blocks, kThreads, 0, stream()>>>(shape, operands, results, chunks_in<S>(shape), y);
  check(cudaGetLastError(), "row_attention");
}

}  // namespace row_attention
}  // namespace cuda
}  // namespace hidet_dist
