/*
 * Attention over rows computed in float32, for pools of any dtype; see row_attention_shared.h.
 *
 * A block has the heads of one group, as far as shared memory has room for their queries, so it reads a row once for
 * all of them, and for neighbouring tokens where there are many. Blocks, and so the time, follow the lengths of
 * sequences and not what the table has room for.
 */
#pragma once
#include "hidet_dist/kernels/cuda/row_attention_shared.h"

namespace hidet_dist {
namespace cuda {
namespace row_attention {
namespace in_float32 {

constexpr int kChunk = kThreads; /* rows of a chunk: a thread finds the place of each */
constexpr int kSharing = 8;      /* threads that share a row of keys */
constexpr int kAtOnce = 2;       /* rows of keys that a thread has at once, so that it reads a query half as often */
constexpr int kPass = kThreads / kSharing * kAtOnce;
constexpr int kMostQueries = 16; /* of a block: their sums are in registers */
constexpr int kElements = 4;     /* of a row of values that a thread has at once */

/* What follows from the sizes of a program. */
template <class Program>
struct Sizes : Program {
  using Program::kOfGroup, Program::kSizeK, Program::kSizeV, Program::kStepV;
  static_assert(Program::kChunk == kChunk, "the rows of a chunk");
  static constexpr int kWideK = Program::wide(kSizeK, kSizeK, 16 / sizeof(typename Program::Pool));
  static constexpr int kWideV = Program::wide(kSizeV, kStepV, kElements);
  static constexpr int kStepK = round_up(kSizeK, 4); /* of queries in shared memory */
  static constexpr int kColumns = kSizeV / kWideV;   /* threads that a row of values takes */
  static constexpr int kSpan = power_of_two(kColumns) < kThreads ? power_of_two(kColumns) : kThreads;
  static constexpr int kTiles = (kColumns + kSpan - 1) / kSpan;
  static constexpr int kLanes = kThreads / kSpan; /* rows of values that a block reads at once */

  static constexpr size_t bytes(int queries) {
    return sizeof(float) * queries * (kStepK + kChunk + 2 * kSizeV + 6) + kChunk * sizeof(int64_t) +
           2 * kMostQueries * sizeof(int);
  }
  /* Heads of a group in a block; the most tokens beside them, which are of one sequence as long as they are together. */
  static constexpr int heads_of_block() {
    int heads = kOfGroup < kMostQueries ? kOfGroup : kMostQueries;
    while (heads > 1 && bytes(heads) > kMostBytes) heads = (heads + 1) / 2;
    return heads;
  }
  static constexpr int kHeadsOfBlock = heads_of_block();
  static constexpr int tokens_of_block() {
    int tokens = kMostQueries / kHeadsOfBlock;
    while (tokens > 1 && bytes(tokens * kHeadsOfBlock) > kMostBytes) tokens /= 2;
    return tokens;
  }
  static constexpr int kTokensOfBlock = tokens_of_block();
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <int N, class E>
struct alignas(N * sizeof(E)) Packed {
  E x[N];
};

template <int N, class E>
__device__ inline void load(const E *from, float (&to)[N]) {
  const Packed<N, E> all = *reinterpret_cast<const Packed<N, E> *>(from);
  for (int i = 0; i < N; ++i) to[i] = to_float(all.x[i]);
}

/* The arrays of a block in shared memory. */
template <class S>
struct Arrays {
  int64_t *row;                                    /* of each place of a chunk: the row of the pool, -1 if none */
  int *begin, *end;                                /* of each token: the places of the chunk that it sees */
  float *query, *weights, *chunk, *whole; /* per query: its elements; per row; per element of values, twice */
  float *chunk_most, *chunk_total, *most, *total; /* per query */
  float *before, *fresh; /* per query: factors of a merge */

  __device__ Arrays(float *memory, int queries) {
    row = reinterpret_cast<int64_t *>(memory);
    query = memory + 2 * kChunk;
    weights = query + queries * S::kStepK;
    chunk = weights + queries * kChunk;
    whole = chunk + queries * S::kSizeV;
    chunk_most = whole + queries * S::kSizeV;
    chunk_total = chunk_most + queries;
    most = chunk_total + queries;
    total = most + queries;
    before = total + queries;
    fresh = before + queries;
    begin = reinterpret_cast<int *>(fresh + queries);
    end = begin + kMostQueries;
  }
};

/*
 * The results of one chunk for neighbouring tokens of one sequence, in `chunk`, `chunk_most` and `chunk_total`. Returns
 * false where no token sees a row of it. Query q of the block is head q % heads of token q / heads.
 */
template <class S, int kTokens>
__device__ inline bool attend_chunk(const Shape &shape, const Operands<S> &operands, const Arrays<S> &at, int64_t part,
                                    int64_t token, int tokens, int group, int64_t number) {
  constexpr int kHeads = S::kHeadsOfBlock, kQueries = kTokens * kHeads;
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int64_t first = number * kChunk;
  __syncthreads(); /* what the arrays had before has been read */
  if (thread < tokens) {
    const Seen seen = seen_by<S>(shape, operands, part, token + thread);
    const int64_t begin = seen.begin - first, end = seen.end - first;
    at.begin[thread] = static_cast<int>(begin < 0 ? 0 : begin < kChunk ? begin : kChunk);
    at.end[thread] = static_cast<int>(end < 0 ? 0 : end < kChunk ? end : kChunk);
  }
  __syncthreads();
  int least = kChunk, behind = 0;
  for (int t = 0; t < tokens; ++t) {
    if (at.begin[t] >= at.end[t]) continue;
    least = least < at.begin[t] ? least : at.begin[t];
    behind = behind > at.end[t] ? behind : at.end[t];
  }
  if (least >= behind) return false;
  int64_t row = -1;
  if (thread >= least && thread < behind) {
    row = row_at<S>(shape, pages_of<S>(shape, operands, part, operands.sequences[token]),
                    static_cast<int>(first) + thread);
  }
  at.row[thread] = row < 0 ? -1 : ((part * shape.rows + row) * S::kGroups + group);
  __syncthreads();

  /* Scores: threads that share a row have neighbouring elements of it. */
  for (int pass = 0; pass < kChunk; pass += kPass) {
    if (pass >= behind || pass + kPass <= least) continue;
    const int share = thread % kSharing;
    float sums[kAtOnce][kQueries];
    int64_t rows[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      rows[i] = at.row[pass + i * (kThreads / kSharing) + thread / kSharing];
#pragma unroll
      for (int q = 0; q < kQueries; ++q) sums[i][q] = 0.0f;
    }
#pragma unroll
    for (int d = share * S::kWideK; d < S::kSizeK; d += kSharing * S::kWideK) {
      float keys[kAtOnce][S::kWideK];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (rows[i] >= 0) {
          load(operands.keys + rows[i] * S::kSizeK + d, keys[i]);
        } else {
          for (int e = 0; e < S::kWideK; ++e) keys[i][e] = 0.0f;
        }
      }
#pragma unroll
      for (int q = 0; q < kQueries; ++q) {
        constexpr int kPiece = S::kWideK % 4 == 0 ? 4 : 1;
#pragma unroll
        for (int piece = 0; piece < S::kWideK; piece += kPiece) {
          float x[kPiece];
          load(at.query + q * S::kStepK + d + piece, x);
#pragma unroll
          for (int e = 0; e < kPiece; ++e)
            for (int i = 0; i < kAtOnce; ++i) sums[i][q] = fmaf(x[e], keys[i][piece + e], sums[i][q]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int q = 0; q < kQueries; ++q) {
        float sum = sums[i][q];
        for (int distance = kSharing / 2; distance > 0; distance /= 2) {
          sum += __shfl_xor_sync(kAllLanes, sum, distance);
        }
        if (share != q % kSharing) continue;
        float score = sum * shape.scale;
        if (S::kIsCapped) score = shape.softcap * tanhf(score / shape.softcap);
        const int place = pass + i * (kThreads / kSharing) + thread / kSharing;
        at.weights[q * kChunk + place] = rows[i] < 0 ? NAN : score; /* what is seen of no row is no number */
      }
    }
  }
  __syncthreads();

  /* Weights: a warp has a query. */
  for (int q = warp; q < kQueries; q += kWarps) {
    const int t = q / kHeads, begin = t < tokens ? at.begin[t] : 0, end = t < tokens ? at.end[t] : 0;
    float scores[kChunk / kWarp], most = kNothing, total = 0.0f;
    for (int i = 0; i < kChunk / kWarp; ++i) {
      const int place = i * kWarp + lane;
      scores[i] = place >= begin && place < end ? at.weights[q * kChunk + place] : kNothing;
      most = fmaxf(most, scores[i]);
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
    }
    for (int i = 0; i < kChunk / kWarp; ++i) {
      const int place = i * kWarp + lane;
      const float weight = place >= begin && place < end ? expf(scores[i] - most) : 0.0f;
      at.weights[q * kChunk + place] = weight;
      total += weight;
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(kAllLanes, total, distance);
    }
    if (lane == 0) {
      at.chunk_most[q] = most;
      at.chunk_total[q] = begin < end && total == 0.0f ? NAN : total; /* scores that are all minus infinity */
    }
  }
  __syncthreads();

  /* Values: a thread has neighbouring elements of every kLanes-th row. */
  float mixed[kQueries][S::kTiles][S::kWideV];
#pragma unroll
  for (int q = 0; q < kQueries; ++q)
    for (int i = 0; i < S::kTiles; ++i)
      for (int e = 0; e < S::kWideV; ++e) mixed[q][i][e] = 0.0f;
  const int own = thread / S::kSpan, column = thread % S::kSpan;
  for (int place = least / S::kLanes * S::kLanes + own; place < behind; place += S::kLanes) {
    if (place < least) continue;
    const int64_t row = at.row[place];
#pragma unroll
    for (int i = 0; i < S::kTiles; ++i) {
      const int d = (column + i * S::kSpan) * S::kWideV;
      if (d >= S::kSizeV) continue;
      float values[S::kWideV];
      if (row >= 0) {
        load(operands.values + row * S::kStepV + d, values);
      } else {
        for (int e = 0; e < S::kWideV; ++e) values[e] = 0.0f;
      }
#pragma unroll
      for (int q = 0; q < kQueries; ++q) {
        if (kTokens > 1 && (q / kHeads >= tokens || place < at.begin[q / kHeads] || place >= at.end[q / kHeads])) {
          continue;
        }
        const float weight = at.weights[q * kChunk + place];
#pragma unroll
        for (int e = 0; e < S::kWideV; ++e) mixed[q][i][e] = fmaf(weight, values[e], mixed[q][i][e]);
      }
    }
  }
  for (int turn = 0; turn < S::kLanes; ++turn) {
    if (turn > 0) __syncthreads();
    if (turn != own) continue;
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) {
        const int d = (column + i * S::kSpan) * S::kWideV;
        if (d >= S::kSizeV) continue;
        float *const sum = at.chunk + q * S::kSizeV + d;
        for (int e = 0; e < S::kWideV; ++e) sum[e] = turn == 0 ? mixed[q][i][e] : sum[e] + mixed[q][i][e];
      }
    }
  }
  __syncthreads();
  return true;
}

/* The queries of neighbouring tokens to shared memory; there are zeros for heads that the group does not have. */
template <class S>
__device__ inline void read_queries(const Operands<S> &operands, const Arrays<S> &at, int64_t token, int tokens,
                                    int queries, int group, int head) {
  for (int i = threadIdx.x; i < queries * S::kStepK; i += kThreads) {
    const int q = i / S::kStepK, d = i % S::kStepK, t = q / S::kHeadsOfBlock, h = head + q % S::kHeadsOfBlock;
    float x = 0.0f;
    if (t < tokens && h < S::kOfGroup && d < S::kSizeK) {
      x = to_float(operands.query[((token + t) * S::kHeads + group * S::kOfGroup + h) * S::kSizeK + d]);
    }
    at.query[i] = x;
  }
}

/* Blocks take the chunks of a token in turns, and leave their results in memory. */
template <class S>
__global__ void __launch_bounds__(kThreads)
    chunks_kernel(Shape shape, Operands<S> operands, float *results, int64_t chunks) {
  extern __shared__ int64_t row_attention_memory[];
  const Place place = place_of<S, S::kHeadsOfBlock>(shape, blockIdx.x, 1);
  const Chunks own = chunks_of<S>(seen_by<S>(shape, operands, place.part, place.token));
  if (own.first + blockIdx.y >= own.behind) return;
  constexpr int kQueries = S::kHeadsOfBlock;
  const Arrays<S> at(reinterpret_cast<float *>(row_attention_memory), kQueries);
  read_queries<S>(operands, at, place.token, 1, kQueries, place.group, place.head);
  for (int64_t c = own.first + blockIdx.y; c < own.behind; c += gridDim.y) {
    attend_chunk<S, 1>(shape, operands, at, place.part, place.token, 1, place.group, c);
    for (int i = threadIdx.x; i < kQueries * S::kRecord; i += kThreads) {
      const int q = i / S::kRecord, d = i % S::kRecord, head = place.head + q;
      if (head >= S::kOfGroup) continue;
      record<S>(shape, results, place.part, place.token, place.group * S::kOfGroup + head, c, chunks)[d] =
          d == 0   ? at.chunk_most[q]
          : d == 1 ? at.chunk_total[q]
                   : at.chunk[q * S::kSizeV + d - 2];
    }
  }
}

/* A block takes all chunks of neighbouring tokens, one after the other; those of one sequence together. */
template <class S, int kTokens>
__global__ void __launch_bounds__(kThreads) tokens_kernel(Shape shape, Operands<S> operands, void *y) {
  extern __shared__ int64_t row_attention_memory[];
  const Place place = place_of<S, S::kHeadsOfBlock>(shape, blockIdx.x, kTokens);
  constexpr int kQueries = kTokens * S::kHeadsOfBlock;
  const Arrays<S> at(reinterpret_cast<float *>(row_attention_memory), kQueries);
  const int64_t behind = place.token + kTokens < shape.tokens ? place.token + kTokens : shape.tokens;
  for (int64_t token = place.token; token < behind;) {
    int tokens = 1;
    while (token + tokens < behind && operands.sequences[token + tokens] == operands.sequences[token]) ++tokens;
    __syncthreads(); /* the arrays of the last sequence have been read */
    read_queries<S>(operands, at, token, tokens, kQueries, place.group, place.head);
    for (int i = threadIdx.x; i < kQueries * S::kSizeV; i += kThreads) at.whole[i] = 0.0f;
    for (int q = threadIdx.x; q < kQueries; q += kThreads) {
      at.most[q] = kNothing;
      at.total[q] = 0.0f;
    }
    Chunks all = {0, 0};
    for (int t = 0; t < tokens; ++t) {
      const Chunks own = chunks_of<S>(seen_by<S>(shape, operands, place.part, token + t));
      if (own.first >= own.behind) continue;
      const bool is_first = all.first >= all.behind;
      all.first = is_first || own.first < all.first ? own.first : all.first;
      all.behind = own.behind > all.behind ? own.behind : all.behind;
    }
    for (int64_t c = all.first; c < all.behind; ++c) {
      if (!attend_chunk<S, kTokens>(shape, operands, at, place.part, token, tokens, place.group, c)) continue;
      for (int q = threadIdx.x; q < kQueries; q += kThreads) {
        Merge by = {at.most[q], at.total[q], 1.0f, 0.0f};
        if (at.chunk_total[q] != 0.0f)
          by = merged<Natural>(at.most[q], at.total[q], at.chunk_most[q], at.chunk_total[q]);
        at.most[q] = by.most;
        at.total[q] = by.total;
        at.before[q] = by.before;
        at.fresh[q] = by.fresh;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kQueries * S::kSizeV; i += kThreads) {
        const int q = i / S::kSizeV;
        if (at.chunk_total[q] == 0.0f) continue;
        at.whole[i] = merged_value({0.0f, 0.0f, at.before[q], at.fresh[q]}, at.whole[i], at.chunk[i]);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * S::kHeadsOfBlock * S::kSizeV; i += kThreads) {
      const int q = i / S::kSizeV, t = q / S::kHeadsOfBlock, head = place.head + q % S::kHeadsOfBlock;
      if (head >= S::kOfGroup) continue;
      const Finish<S> to(Natural(), shape, operands, place.part, token + t, place.group * S::kOfGroup + head,
                         at.most[q], at.total[q], y);
      to.put(i % S::kSizeV, at.whole[i]);
    }
    token += tokens;
  }
}

/* Whether blocks take chunks in turns: there are fewer blocks with whole tokens than the device takes. */
template <class S>
inline bool is_split(const Shape &shape) {
  return blocks_of<S, S::kHeadsOfBlock>(shape, 1) < shape.fill;
}

template <class S>
inline void attend_chunks(const Shape &shape, const Operands<S> &operands, float *results) {
  const int64_t chunks = chunks_in<S>(shape), blocks = blocks_of<S, S::kHeadsOfBlock>(shape, 1);
  if (blocks == 0 || chunks == 0 || !is_split<S>(shape)) return;
  constexpr size_t kBytes = S::bytes(S::kHeadsOfBlock);
  allow(chunks_kernel<S>, kBytes);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(lanes_of(shape, blocks, chunks)));
  chunks_kernel<S><<<grid, kThreads, kBytes, stream()>>>(shape, operands, results, chunks);
  check(cudaGetLastError(), "row_attention");
}

template <class S>
inline void attend(const Shape &shape, const Operands<S> &operands, float *results, void *y) {
  if (shape.tokens * shape.parts == 0) return;
  if (is_split<S>(shape)) {
    merge<S, Natural>(shape, operands, results, y);
  } else if (S::kTokensOfBlock > 1 && blocks_of<S, S::kHeadsOfBlock>(shape, S::kTokensOfBlock) >= shape.fill) {
    constexpr int kTokens = S::kTokensOfBlock;
    constexpr size_t kBytes = S::bytes(kTokens * S::kHeadsOfBlock);
    allow(tokens_kernel<S, kTokens>, kBytes);
    const unsigned blocks = static_cast<unsigned>(blocks_of<S, S::kHeadsOfBlock>(shape, kTokens));
    tokens_kernel<S, kTokens><<<blocks, kThreads, kBytes, stream()>>>(shape, operands, y);
  } else {
    constexpr size_t kBytes = S::bytes(S::kHeadsOfBlock);
    allow(tokens_kernel<S, 1>, kBytes);
    const unsigned blocks = static_cast<unsigned>(blocks_of<S, S::kHeadsOfBlock>(shape, 1));
    tokens_kernel<S, 1><<<blocks, kThreads, kBytes, stream()>>>(shape, operands, y);
  }
  check(cudaGetLastError(), "row_attention");
}

}  // namespace in_float32
}  // namespace row_attention
}  // namespace cuda
}  // namespace hidet_dist
