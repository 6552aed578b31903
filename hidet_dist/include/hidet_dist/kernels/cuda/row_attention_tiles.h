/*
 * Attention over rows on tensor cores, for queries and pools of one dtype of half precision; see
 * row_attention_shared.h. Scores and sums are float32; weights are rounded to the pools' dtype before values are
 * multiplied by them, and so is what they are divided by the sum of.
 *
 * A block has tiles of 16 queries, each of the heads of a group and of neighbouring tokens, and copies a chunk of keys
 * and of values to shared memory for all of them. A tile is computed by one warp; or by several, each of which has some
 * keys of the chunk for the scores, and some columns of the values for the result. What the products of a chunk are
 * summed up from, and in which order, is the same for both, and for each row of a tile by itself. So blocks of many
 * tokens, blocks of one token, and blocks that leave the results of single chunks compute the same bits.
 */
#pragma once
#include "hidet_dist/kernels/cuda/row_attention_shared.h"

namespace hidet_dist {
namespace cuda {
namespace row_attention {
namespace in_tiles {

constexpr int kTile = 16;         /* queries of a tile */
constexpr int kStep = 16;         /* elements that are summed up by an instruction */
constexpr int kBeside = 8;        /* columns of an instruction's result */
constexpr int kPadding = 8; /* elements behind a row in shared memory: rows that are read together are in other banks */
constexpr int kMostColumns = 128; /* of the results that a warp has in registers */
constexpr int kMostKept = 128; /* elements of a query that are kept in registers */
constexpr int kNotSeen = -1, kMissing = -2; /* in place of a row: no token sees it; the pool does not have it */
constexpr size_t kListBytes = kThreads * sizeof(int); /* which tokens are alone */

/* How a block of kTiles tiles divides its work among its warps. */
template <class S, int kTiles_>
struct Layout {
  typedef typename S::Pool Element;
  typedef tensor_cores::Half<Element> Half;
  static constexpr int kTiles = kTiles_, kSplits = kWarps / kTiles; /* warps of a tile */
  static constexpr int kRows = kTiles * kTile; /* queries of a block */
  static constexpr int kDepth = round_up(S::kSizeK, kStep), kColumns = round_up(S::kSizeV, 2 * kBeside);
  static constexpr int kKeyStep = kDepth + kPadding; /* elements from one row of a tile to the next */
  static constexpr int kValueStep = S::kValuesInKeys ? kKeyStep : kColumns + kPadding;
  static constexpr int kWeightStep = S::kChunk + kPadding;
  static constexpr int kKeysOfWarp = S::kChunk / kSplits;
  static constexpr int kColumnsOfWarp = round_up((kColumns + kSplits - 1) / kSplits, 2 * kBeside);
  static constexpr bool kKept = kSplits == 1 && kDepth <= kMostKept; /* queries are in registers */
  static constexpr int kWideK = S::wide(S::kSizeK, S::kSizeK, 8), kWideV = S::wide(S::kSizeV, S::kStepV, 8);
  static_assert(kKeysOfWarp % kBeside == 0, "a warp has whole columns of scores");
  static_assert(!kKept || kRows <= S::kChunk, "queries have room where keys will be");

  static constexpr size_t kKeyBytes = sizeof(Element) * S::kChunk * kKeyStep;
  static constexpr size_t kValueBytes = S::kValuesInKeys ? 0 : sizeof(Element) * S::kChunk * kValueStep;
  static constexpr size_t kQueryBytes = kKept ? 0 : sizeof(Element) * kRows * kKeyStep;
  static constexpr size_t kWeightBytes = kSplits == 1 ? 0 : sizeof(Element) * kRows * kWeightStep;
  static constexpr size_t kMostBytesOfRows = kSplits == 1 ? 0 : sizeof(float) * kRows * kSplits;
  static constexpr size_t kBytes =
      kKeyBytes + kValueBytes + kQueryBytes + kWeightBytes + kMostBytesOfRows + 2 * S::kChunk * sizeof(int32_t);

  static constexpr int kHeadsOfBlock = S::kOfGroup <= kRows ? S::kOfGroup
                                                            : (S::kOfGroup + (S::kOfGroup + kRows - 1) / kRows - 1) /
                                                                  ((S::kOfGroup + kRows - 1) / kRows);
  static constexpr int kTokensOfBlock = kRows / kHeadsOfBlock;
};

/* The layout of blocks of many tokens: as many tiles as registers and shared memory have room for. */
template <class S, int kTiles>
constexpr bool has_room() {
  return Layout<S, kTiles>::kColumnsOfWarp <= kMostColumns && kListBytes + Layout<S, kTiles>::kBytes <= kMostBytes;
}
template <class S>
struct Layouts {
  static constexpr int kTiles = has_room<S, 4>() ? 4 : has_room<S, 2>() ? 2 : 1;
  typedef Layout<S, kTiles> Many;
  typedef Layout<S, 1> One;
  static constexpr size_t kBytes = kListBytes + (Many::kBytes > One::kBytes ? Many::kBytes : One::kBytes);
  static_assert(has_room<S, 1>(), "rows that are too long");
};

/* A block's arrays in shared memory. */
template <class L, class S>
struct Arrays {
  typedef typename L::Element Element;
  Element *keys, *values, *query, *weights;
  float *most; /* of each query and warp of its tile */
  int32_t *rows; /* of each place of a chunk: the row of the pool; and of the next chunk */

  __device__ explicit Arrays(void *memory) {
    unsigned char *at = static_cast<unsigned char *>(memory);
    keys = reinterpret_cast<Element *>(at);
    at += L::kKeyBytes;
    values = S::kValuesInKeys ? keys : reinterpret_cast<Element *>(at);
    at += L::kValueBytes;
    query =
        L::kKept ? keys : reinterpret_cast<Element *>(at); /* they are where keys will be, until registers have them */
    at += L::kQueryBytes;
    weights = reinterpret_cast<Element *>(at);
    at += L::kWeightBytes;
    most = reinterpret_cast<float *>(at);
    at += L::kMostBytesOfRows;
    rows = reinterpret_cast<int32_t *>(at);
  }
};

/* The places in the pool of a chunk's rows: one for each of the first threads. */
template <class S>
__device__ inline void find_rows(const Shape &shape, const int32_t *pages, Seen seen, int chunk, int32_t *rows) {
  const int thread = threadIdx.x;
  if (thread >= S::kChunk) return;
  const int place = chunk * S::kChunk + thread;
  int row = kNotSeen;
  if (place >= seen.begin && place < seen.end) {
    row = static_cast<int>(row_at<S>(shape, pages, place));
    if (row < 0) row = kMissing;
  }
  rows[thread] = row;
}

__device__ alignas(16) const uint32_t kNoNumbers[4] = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};

/*
 * Begin to copy the rows of a chunk. Those that are not seen are zeros; those that are missing are no numbers if
 * `kIsKeys`, so that scores are none.
 */
template <int kSize, int kWide, int kStepOfTile, int kChunk, bool kIsKeys, class Element>
__device__ inline void fetch(Element *tile, const Element *from, int step, const int32_t *rows) {
  constexpr int kVectors = kSize / kWide, kAtOnce = kThreads % kVectors == 0 ? kThreads / kVectors : 1;
  const auto copy = [&](int r, int d, uint32_t to) {
    const int row = rows[r];
    const Element *place = from + int64_t(row < 0 ? 0 : row) * step + d;
    bool is_present = row >= 0;
    if (kIsKeys && row == kMissing) {
      place = reinterpret_cast<const Element *>(kNoNumbers);
      is_present = true;
    }
    if (kWide == 1) {
      tile[r * kStepOfTile + d] = is_present ? *place : Element();
    } else {
      tensor_cores::copy_async<kWide == 1 ? 4 : kWide * 2>(to, place, is_present);
    }
  };
  const uint32_t begin = tensor_cores::shared_address(tile);
  int thread = threadIdx.x;
  tensor_cores::renew(thread); /* places are computed for each chunk: registers have no room for them */
  if (kAtOnce > 1 && kChunk % kAtOnce == 0) { /* a thread has one part of rows */
    const int d = thread % kVectors * kWide, first = thread / kVectors;
    const uint32_t to = begin + (first * kStepOfTile + d) * 2;
#pragma unroll 8
    for (int r = 0; r < kChunk; r += kAtOnce) copy(first + r, d, to + r * kStepOfTile * 2);
  } else {
#pragma unroll 4
    for (int i = thread; i < kChunk * kVectors; i += kThreads) {
      const int r = i / kVectors, d = i % kVectors * kWide;
      copy(r, d, begin + (r * kStepOfTile + d) * 2);
    }
  }
}

/* The queries of a block: query q is head q % heads of token q / heads; zeros where there is none. */
template <class L, class S>
__device__ inline void read_queries(const Operands<S> &operands, typename L::Element *to, int64_t token, int first,
                                    int behind, int group, int head) {
  constexpr int kVectors = L::kDepth / L::kWideK;
  static_assert(L::kDepth % L::kWideK == 0, "whole vectors");
  const uint32_t begin = tensor_cores::shared_address(to);
  for (int i = threadIdx.x; i < L::kRows * kVectors; i += kThreads) {
    const int q = i / kVectors, d = i % kVectors * L::kWideK, t = q / L::kHeadsOfBlock;
    const int h = head + q % L::kHeadsOfBlock;
    const bool is_there = t >= first && t < behind && h < S::kOfGroup && d < S::kSizeK;
    const int64_t place = is_there ? ((token + t) * S::kHeads + group * S::kOfGroup + h) * S::kSizeK + d : 0;
    if (L::kWideK > 1) {
      constexpr int kBytes = L::kWideK > 1 ? L::kWideK * 2 : 4;
      tensor_cores::copy_async<kBytes>(begin + (q * L::kKeyStep + d) * 2, operands.query + place, is_there);
    } else {
      reinterpret_cast<uint16_t *>(to)[q * L::kKeyStep + d] =
          is_there ? *reinterpret_cast<const uint16_t *>(operands.query + place) : 0;
    }
  }
  tensor_cores::close_copies();
  tensor_cores::await_copies<0>();
  __syncthreads();
}

/* Zeros behind the elements of rows, which copies leave as they are. */
template <int kSize, int kUsed, int kStepOfTile, int kChunk, class Element>
__device__ inline void clear_behind(Element *tile) {
  constexpr int kMore = kUsed - kSize;
  for (int i = threadIdx.x; i < kChunk * kMore; i += kThreads) {
    reinterpret_cast<uint16_t *>(
        tile)[i / (kMore > 0 ? kMore : 1) * kStepOfTile + kSize + i % (kMore > 0 ? kMore : 1)] = 0;
  }
}

/* Of a lane: queries `group` and group + 8 of its warp's tile, the sums of neighbouring columns for both. */
template <class L>
struct Sums {
  static constexpr int kCount = L::kColumnsOfWarp / kBeside;
  float values[kCount][4];
  float most[2], total[2];

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      for (int e = 0; e < 4; ++e) values[n][e] = 0.0f;
    for (int i = 0; i < 2; ++i) {
      most[i] = kNothing;
      total[i] = 0.0f;
    }
  }
};

/* What a chunk is of a tile's queries, beside their weighted values. */
struct OfChunk {
  float most[2], total[2];
  bool is_seen[2];
};

/* Takes the results of chunks in. */
template <class L>
struct MergeInto {
  Sums<L> &sums;
  Merge by[2];

  __device__ explicit MergeInto(Sums<L> &into) : sums(into) {}
  __device__ void begin(int, const OfChunk &chunk) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!chunk.is_seen[i]) continue;
      by[i] = merged<Binary>(sums.most[i], sums.total[i], chunk.most[i], chunk.total[i]);
      sums.most[i] = by[i].most;
      sums.total[i] = by[i].total;
    }
  }
  template <int kCount>
  __device__ void take(const OfChunk &chunk, int first, const float (&values)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!chunk.is_seen[i]) continue;
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        for (int j = 0; j < 2; ++j) {
          float &sum = sums.values[first + n][2 * i + j];
          sum = merged_value(by[i], sum, values[n][2 * i + j]);
        }
    }
  }
};

/* Leaves the results of chunks in memory. */
template <class L, class S>
struct Record {
  float *of_query[2]; /* the results of the first chunk; nullptr where there is no query */
  int column; /* of the lane's first sum */
  float *at[2];

  __device__ void begin(int number, const OfChunk &chunk) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at[i] = of_query[i] == nullptr || !chunk.is_seen[i] ? nullptr : of_query[i] + int64_t(number) * S::kRecord;
      if (at[i] == nullptr || column != 0) continue;
      at[i][0] = chunk.most[i];
      at[i][1] = chunk.total[i];
    }
  }
  template <int kCount>
  __device__ void take(const OfChunk &, int first, const float (&values)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at[i] == nullptr) continue;
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        for (int j = 0; j < 2; ++j) {
          const int d = column + (first + n) * kBeside + j;
          if (d < S::kSizeV) at[i][2 + d] = values[n][2 * i + j];
        }
    }
  }
};

/* The elements of a pair of rows that a token sees, of one register of values. */
__device__ inline uint32_t seen_pair(uint32_t pair, int place, int begin, int end) {
  const uint32_t first = place >= begin && place < end ? 0xffffu : 0u;
  const uint32_t second = place + 1 >= begin && place + 1 < end ? 0xffff0000u : 0u;
  return pair & (first | second);
}

/* Attention of a block's queries to the rows of one sequence. */
template <class L, class S>
struct Block {
  typedef typename L::Element Element;
  typedef typename L::Half Half;
  static constexpr int kChunk = S::kChunk;
  static constexpr int kKeyTiles = L::kKeysOfWarp / kBeside; /* columns of scores of a warp, in instructions */
  static constexpr int kAtOnce = kKeyTiles < 4 ? kKeyTiles : 4;
  static constexpr int kValueTiles = Sums<L>::kCount;
  static constexpr int kTaken = kValueTiles % 4 == 0 ? 4 : 2;
  static constexpr int kSteps = kChunk / kStep;

  const Shape &shape;
  const Operands<S> &operands;
  const Arrays<L, S> &at;
  int lane, group, within, tile, split;
  uint32_t queries, keys, values, own_weights; /* where the lane's matrices begin in shared memory */
  uint32_t kept[L::kKept ? L::kDepth / kStep : 1][4];
  uint32_t weights[L::kSplits == 1 ? kSteps : 1][4];

  __device__ Block(const Shape &the_shape, const Operands<S> &the_operands, const Arrays<L, S> &arrays)
      : shape(the_shape), operands(the_operands), at(arrays) {
    lane = threadIdx.x % kWarp;
    group = lane / 4;
    within = lane % 4;
    tile = threadIdx.x / kWarp / L::kSplits;
    split = threadIdx.x / kWarp % L::kSplits;
    const int upper = lane % 16, right = lane / 16 * 8; /* of matrices row by row; keys are two columns of scores */
    const int key = kAtOnce == 1 ? lane % 8 : lane / 16 * 8 + lane % 8;
    queries = address(at.query + (tile * kTile + upper) * L::kKeyStep + right);
    keys = address(at.keys + (split * L::kKeysOfWarp + key) * L::kKeyStep + lane / 8 % 2 * 8);
    values = address(at.values + upper * L::kValueStep + split * L::kColumnsOfWarp + right);
    own_weights = address(at.weights + (tile * kTile + upper) * L::kWeightStep + right);
  }

  static __device__ uint32_t address(const Element *of) { return tensor_cores::shared_address(of); }
  static __device__ constexpr uint32_t bytes(int elements) { return static_cast<uint32_t>(elements * sizeof(Element)); }

  /* The number of a lane's query in its block; the column of its first sum. */
  __device__ int query(int i) const { return tile * kTile + group + 8 * i; }
  __device__ int column() const { return split * L::kColumnsOfWarp + 2 * within; }

  /* The elements of a tile's queries, for one instruction. */
  __device__ void load_query(uint32_t (&to)[4], int step) const {
    tensor_cores::load_matrices(to, queries + step * bytes(kStep));
  }
  __device__ void keep_queries() {
    if (!L::kKept) return;
#pragma unroll
    for (int step = 0; step < L::kDepth / kStep; ++step) load_query(kept[L::kKept ? step : 0], step);
  }

  /* The products of the tile's queries and the warp's keys, where a query of the tile sees one of some. */
  __device__ void multiply_keys(float (&scores)[kKeyTiles][4], int begin, int end) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
      for (int e = 0; e < 4; ++e) scores[n][e] = 0.0f;
#pragma unroll
    for (int some = 0; some < kKeyTiles; some += kAtOnce) {
      const int first = split * L::kKeysOfWarp + some * kBeside;
      if (first >= end || first + kAtOnce * kBeside <= begin) continue;
#pragma unroll(L::kKept ? L::kDepth / kStep : 2)
      for (int step = 0; step < L::kDepth / kStep; ++step) {
        uint32_t query[4];
        if (L::kKept) {
          for (int i = 0; i < 4; ++i) query[i] = kept[L::kKept ? step : 0][i];
        } else {
          load_query(query, step);
        }
        const uint32_t at_step = keys + some * kBeside * bytes(L::kKeyStep) + step * bytes(kStep);
        if (kAtOnce == 1) { /* of the four matrices two are used */
          uint32_t pair[4];
          tensor_cores::load_matrices(pair, at_step);
          Half::multiply(scores[some], query, pair[0], pair[1], scores[some]);
          continue;
        }
#pragma unroll
        for (int n = 0; n + 1 < kAtOnce; n += 2) {
          uint32_t pair[4];
          tensor_cores::load_matrices(pair, at_step + n * kBeside * bytes(L::kKeyStep));
          Half::multiply(scores[some + n], query, pair[0], pair[1], scores[some + n]);
          Half::multiply(scores[some + n + 1], query, pair[2], pair[3], scores[some + n + 1]);
        }
      }
    }
  }

  /* Scores as exponents of 2; minus infinity where a query does not see a row. */
  __device__ void finish_scores(float (&scores)[kKeyTiles][4], const int (&begin)[2], const int (&end)[2]) const {
    const float scale = S::kIsCapped ? 2.0f * Binary::kOfE * shape.scale / shape.softcap : shape.scale * Binary::kOfE;
    const float cap = shape.softcap * Binary::kOfE;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
      for (int e = 0; e < 4; ++e) scores[n][e] *= scale;
    if (S::kIsCapped) { /* tanh(x) = 1 - 2 / (exp(2 x) + 1) */
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
        for (int e = 0; e < 4; ++e) {
          scores[n][e] = cap - __fdividef(2.0f * cap, tensor_cores::exp2_of(scores[n][e]) + 1.0f);
        }
    }
    const int first = split * L::kKeysOfWarp, last = first + L::kKeysOfWarp;
    if (begin[0] <= first && begin[1] <= first && end[0] >= last && end[1] >= last) return;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
      for (int e = 0; e < 4; ++e) {
        const int place = first + n * kBeside + 2 * within + e % 2;
        if (place < begin[e / 2] || place >= end[e / 2]) scores[n][e] = -INFINITY;
      }
  }

  /* The weights that the tile's queries give to the rows of one instruction. */
  __device__ void load_weights(uint32_t (&to)[4], int step) const {
    if (L::kSplits == 1) {
      for (int i = 0; i < 4; ++i) to[i] = weights[L::kSplits == 1 ? step : 0][i];
    } else {
      tensor_cores::load_matrices(to, own_weights + step * bytes(kStep));
    }
  }

  /* The values of two instructions: of 16 rows and columns, from one of the warp's on. */
  __device__ void load_values(uint32_t (&to)[4], int step, int column) const {
    tensor_cores::load_transposed(to, values + step * kStep * bytes(L::kValueStep) + bytes(column));
  }

  /*
   * Columns of the result again, where a value that not all queries see is no number: a weight of 0 does not hide it. For
   * each query, values that it does not see are zeros, as if it were alone.
   */
  __device__ void multiply_seen(float (&result)[2][4], int first, const int (&begin)[2], const int (&end)[2], int least,
                                int behind) const {
#pragma unroll 1
    for (int row = 0; row < kTile; ++row) {
      const int from = row % 8 * 4;
      const int upper[2] = {__shfl_sync(kAllLanes, begin[0], from), __shfl_sync(kAllLanes, end[0], from)};
      const int lower[2] = {__shfl_sync(kAllLanes, begin[1], from), __shfl_sync(kAllLanes, end[1], from)};
      const int own_begin = row < 8 ? upper[0] : lower[0], own_end = row < 8 ? upper[1] : lower[1];
      float own[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll(L::kSplits == 1 ? kSteps : 1)
      for (int step = 0; step < kSteps; ++step) {
        if (step * kStep >= behind || (step + 1) * kStep <= least) continue;
        uint32_t weight[4], pair[4];
        load_weights(weight, step);
        load_values(pair, step, first);
        for (int i = 0; i < 4; ++i) {
          pair[i] = seen_pair(pair[i], step * kStep + 2 * within + i % 2 * 8, own_begin, own_end);
        }
        Half::multiply(own[0], weight, pair[0], pair[1], own[0]);
        Half::multiply(own[1], weight, pair[2], pair[3], own[1]);
      }
      if (row % 8 != group) continue;
#pragma unroll
      for (int n = 0; n < 2; ++n)
        for (int j = 0; j < 2; ++j) {
          if (row < 8) {
            result[n][j] = own[n][j];
          } else {
            result[n][2 + j] = own[n][2 + j];
          }
        }
    }
  }

  /*
   * Chunks from `first` on, each `turn`-th, of the rows that a token of the block sees. `own` is what the lane's queries
   * see. All threads of the block call this.
   */
  template <class Take>
  __device__ void attend(int64_t part, int32_t sequence, int kv_group, Seen seen, const Seen (&own)[2], int first,
                         int turn, Take &take) {
    const int32_t *const pages = pages_of<S>(shape, operands, part, sequence);
    const int behind = chunks_of<S>(seen).behind;
    const Element *const pool_of_keys = operands.keys + (part * shape.rows * S::kGroups + kv_group) * S::kSizeK;
    const Element *const pool_of_values = operands.values + (part * shape.rows * S::kGroups + kv_group) * S::kStepV;
    if (first >= behind) return;
    const auto fetch_keys = [&](const int32_t *rows) {
      fetch<S::kSizeK, L::kWideK, L::kKeyStep, kChunk, true>(at.keys, pool_of_keys, S::kGroups * S::kSizeK, rows);
    };
    int slot = 0;
    find_rows<S>(shape, pages, seen, first, at.rows);
    __syncthreads(); /* and queries have been read, which are where keys will be */
    fetch_keys(at.rows);
    clear_behind<S::kSizeK, L::kDepth, L::kKeyStep, kChunk>(at.keys);
    if (!S::kValuesInKeys) clear_behind<S::kSizeV, L::kColumns, L::kValueStep, kChunk>(at.values);
    tensor_cores::close_copies();
    /* What the tile's queries see together. */
    Seen all = {own[0].begin < own[0].end ? own[0].begin : INT32_MAX, own[0].end};
    if (own[1].begin < own[1].end && own[1].begin < all.begin) all.begin = own[1].begin;
    all.end = own[1].end > all.end ? own[1].end : all.end;
    for (int distance = kWarp / 2; distance >= 4; distance /= 2) {
      const int begin = __shfl_xor_sync(kAllLanes, all.begin, distance);
      const int end = __shfl_xor_sync(kAllLanes, all.end, distance);
      all.begin = begin < all.begin ? begin : all.begin;
      all.end = end > all.end ? end : all.end;
    }

    for (int c = first; c < behind; c += turn, slot ^= 1) {
      if (!S::kValuesInKeys) {
        fetch<S::kSizeV, L::kWideV, L::kValueStep, kChunk, false>(at.values, pool_of_values, S::kGroups * S::kStepV,
                                                                  at.rows + slot * kChunk);
      }
      tensor_cores::close_copies();
      tensor_cores::renew(queries);
      tensor_cores::renew(keys);
      tensor_cores::renew(values);
      tensor_cores::renew(own_weights);
      const bool goes_on = c + turn < behind;
      if (goes_on) find_rows<S>(shape, pages, seen, c + turn, at.rows + (slot ^ 1) * kChunk);
      const auto within_chunk = [&](int x) {
        x -= c * kChunk;
        return x <= 0 ? 0 : x >= kChunk ? kChunk : x;
      };
      const int begin[2] = {within_chunk(own[0].begin), within_chunk(own[1].begin)};
      const int end[2] = {within_chunk(own[0].end), within_chunk(own[1].end)};
      const int least = within_chunk(all.begin), most = within_chunk(all.end);

      tensor_cores::await_copies<1>();
      __syncthreads(); /* keys are there */
      float scores[kKeyTiles][4];
      multiply_keys(scores, least, most);
      finish_scores(scores, begin, end);
      OfChunk chunk;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float greatest = kNothing;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
          for (int j = 0; j < 2; ++j) greatest = fmaxf(greatest, scores[n][2 * i + j]);
        greatest = fmaxf(greatest, __shfl_xor_sync(kAllLanes, greatest, 1));
        greatest = fmaxf(greatest, __shfl_xor_sync(kAllLanes, greatest, 2));
        if (L::kSplits > 1 && within == 0) at.most[query(i) * L::kSplits + split] = greatest;
        chunk.most[i] = greatest;
        chunk.is_seen[i] = begin[i] < end[i];
      }
      __syncthreads(); /* keys have been read */
      if (L::kSplits > 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          for (int s = 0; s < L::kSplits; ++s) {
            chunk.most[i] = fmaxf(chunk.most[i], at.most[query(i) * L::kSplits + s]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
        for (int i = 0; i < 2; ++i) {
          const uint32_t pair = Half::pair(tensor_cores::exp2_of(scores[n][2 * i] - chunk.most[i]),
                                           tensor_cores::exp2_of(scores[n][2 * i + 1] - chunk.most[i]));
          if (L::kSplits == 1) {
            weights[L::kSplits == 1 ? n / 2 : 0][n % 2 * 2 + i] = pair;
          } else {
            const int column = split * L::kKeysOfWarp + n * kBeside + 2 * within;
            *reinterpret_cast<uint32_t *>(at.weights + query(i) * L::kWeightStep + column) = pair;
          }
        }
      if (goes_on && !S::kValuesInKeys) fetch_keys(at.rows + (slot ^ 1) * kChunk);
      tensor_cores::close_copies();
      tensor_cores::await_copies<1>();
      __syncthreads(); /* values and weights are there */
      multiply_values(c, chunk, begin, end, least, most, take);
      __syncthreads(); /* they have been read */
      if (goes_on && S::kValuesInKeys) fetch_keys(at.rows + (slot ^ 1) * kChunk);
      if (S::kValuesInKeys) tensor_cores::close_copies();
    }
    tensor_cores::await_copies<0>();
  }

  template <class Take>
  __device__ void multiply_values(int number, OfChunk &chunk, const int (&begin)[2], const int (&end)[2], int least,
                                  int behind, Take &take) const {
    if (least >= behind) return; /* no query of the tile sees a row */
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step * kStep >= behind || (step + 1) * kStep <= least) continue;
      uint32_t weight[4];
      load_weights(weight, step);
      Half::multiply(total, weight, Half::kOnes, Half::kOnes, total);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      /* Scores that are all minus infinity have no greatest one. */
      chunk.total[i] = chunk.is_seen[i] && total[2 * i] == 0.0f ? NAN : total[2 * i];
    }
    take.begin(number, chunk);
    /* Whether a query of the tile does not see what another one sees. */
    const bool is_partial = begin[0] > least || begin[1] > least || end[0] < behind || end[1] < behind;
    const bool any_partial = __any_sync(kAllLanes, is_partial);
#pragma unroll
    for (int some = 0; some < kValueTiles; some += kTaken) {
      const int first = split * L::kColumnsOfWarp + some * kBeside;
      if (first >= L::kColumns) continue;
      float sums[kTaken][4];
#pragma unroll
      for (int n = 0; n < kTaken; ++n)
        for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step * kStep >= behind || (step + 1) * kStep <= least) continue;
        uint32_t weight[4];
        load_weights(weight, step);
#pragma unroll
        for (int n = 0; n < kTaken; n += 2) {
          if (first + n * kBeside >= L::kColumns) continue;
          uint32_t pair[4];
          load_values(pair, step, (some + n) * kBeside);
          Half::multiply(sums[n], weight, pair[0], pair[1], sums[n]);
          Half::multiply(sums[n + 1], weight, pair[2], pair[3], sums[n + 1]);
        }
      }
      if (any_partial) {
#pragma unroll
        for (int n = 0; n < kTaken; n += 2) {
          bool is_number = true;
          for (int e = 0; e < 4; ++e) {
            is_number = is_number && sums[n][e] == sums[n][e] && sums[n + 1][e] == sums[n + 1][e];
          }
          if (!__any_sync(kAllLanes, !is_number)) continue;
          float both[2][4];
          multiply_seen(both, (some + n) * kBeside, begin, end, least, behind);
          for (int e = 0; e < 4; ++e) {
            sums[n][e] = both[0][e];
            sums[n + 1][e] = both[1][e];
          }
        }
      }
      take.take(chunk, some, sums);
    }
  }
};

/* What some tokens see together; each warp finds it for itself. */
template <class S>
__device__ inline Seen seen_together(const Shape &shape, const Operands<S> &operands, int64_t part, int64_t token,
                                     int tokens) {
  Seen all = {INT32_MAX, 0};
  for (int t = threadIdx.x % kWarp; t < tokens; t += kWarp) {
    const Seen seen = seen_by<S>(shape, operands, part, token + t);
    if (seen.begin >= seen.end) continue;
    all.begin = seen.begin < all.begin ? seen.begin : all.begin;
    all.end = seen.end > all.end ? seen.end : all.end;
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const int begin = __shfl_xor_sync(kAllLanes, all.begin, distance);
    const int end = __shfl_xor_sync(kAllLanes, all.end, distance);
    all.begin = begin < all.begin ? begin : all.begin;
    all.end = end > all.end ? end : all.end;
  }
  return all.begin < all.end ? all : Seen{0, 0};
}

/* A lane's queries among those of tokens [first, behind) of a block: which they are, and what they see. */
template <class L, class S>
struct Queries {
  int64_t token[2];
  int head[2]; /* of all heads; -1 where there is no query */
  Seen seen[2];

  __device__ Queries(const Shape &shape, const Operands<S> &operands, const Block<L, S> &block, const Place &place,
                     int first, int behind) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int q = block.query(i), t = q / L::kHeadsOfBlock, h = place.head + q % L::kHeadsOfBlock;
      const bool is_there = t >= first && t < behind && h < S::kOfGroup;
      token[i] = place.token + t;
      head[i] = is_there ? place.group * S::kOfGroup + h : -1;
      seen[i] = is_there ? seen_by<S>(shape, operands, place.part, token[i]) : Seen{0, 0};
    }
  }
};

/* All chunks of tokens [first, behind) of a block, which are of one sequence. */
template <class L, class S>
__device__ inline void attend_tokens(const Shape &shape, const Operands<S> &operands, void *memory, const Place &place,
                                     int first, int behind, void *y) {
  const Arrays<L, S> at(memory);
  __syncthreads(); /* what the arrays had before has been read */
  read_queries<L, S>(operands, at.query, place.token, first, behind, place.group, place.head);
  Block<L, S> block(shape, operands, at);
  block.keep_queries();
  const Queries<L, S> before(shape, operands, block, place, first, behind);
  const Seen seen = seen_together<S>(shape, operands, place.part, place.token + first, behind - first);
  Sums<L> sums;
  sums.clear();
  MergeInto<L> take(sums);
  block.attend(place.part, operands.sequences[place.token + first], place.group, seen, before.seen,
               seen.begin / S::kChunk, 1, take);
  tensor_cores::renew(block.group); /* so that registers do not hold which queries they are for so long */
  tensor_cores::renew(block.tile);
  const Queries<L, S> own(shape, operands, block, place, first, behind);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (own.head[i] < 0) continue;
    const Finish<S> to(Binary(), shape, operands, place.part, own.token[i], own.head[i], sums.most[i], sums.total[i],
                       y);
#pragma unroll
    for (int n = 0; n < Sums<L>::kCount; ++n)
      for (int j = 0; j < 2; ++j) {
        const int d = block.column() + n * kBeside + j;
        if (d < S::kSizeV) to.put(d, sums.values[n][2 * i + j]);
      }
  }
}

/* Blocks take the chunks of a token in turns, and leave their results in memory. */
template <class S>
__global__ void __launch_bounds__(kThreads)
    chunks_kernel(Shape shape, Operands<S> operands, float *results, int64_t chunks) {
  typedef typename Layouts<S>::One L;
  extern __shared__ float4 row_attention_tiles[];
  const Place place = place_of<S, L::kHeadsOfBlock>(shape, blockIdx.x, 1);
  const Seen seen = seen_by<S>(shape, operands, place.part, place.token);
  const Chunks all = chunks_of<S>(seen);
  if (all.first + blockIdx.y >= all.behind) return;
  const Arrays<L, S> at(row_attention_tiles);
  read_queries<L, S>(operands, at.query, place.token, 0, 1, place.group, place.head);
  Block<L, S> block(shape, operands, at);
  const Queries<L, S> own(shape, operands, block, place, 0, 1);
  Record<L, S> take;
  take.column = block.column();
  for (int i = 0; i < 2; ++i) {
    take.of_query[i] =
        own.head[i] < 0 ? nullptr : record<S>(shape, results, place.part, place.token, own.head[i], 0, chunks);
  }
  block.attend(place.part, operands.sequences[place.token], place.group, seen, own.seen, all.first + blockIdx.y,
               gridDim.y, take);
}

/*
 * Tokens of a block of many are computed together with those beside them of one sequence, if these are so many; a block
 * has at most four such runs, one after the other. Others have blocks of their own.
 */
template <class S>
struct Runs {
  static constexpr int kTokens = Layouts<S>::Many::kTokensOfBlock;
  static constexpr int kLeast = kTokens == 1 ? 1 : kTokens <= 8 ? 2 : (kTokens + 3) / 4;

  /* Tokens of the run that begins at a token of the block from `token` on. */
  static __device__ int length(const Operands<S> &operands, int64_t token, int begin, int behind) {
    int tokens = 1;
    while (begin + tokens < behind && operands.sequences[token + begin + tokens] == operands.sequences[token + begin]) {
      ++tokens;
    }
    return tokens;
  }
  /* Whether a token is of a run that is too short. */
  static __device__ bool is_short(const Shape &shape, const Operands<S> &operands, int64_t token) {
    const int64_t begin = token / kTokens * kTokens;
    const int64_t behind = begin + kTokens < shape.tokens ? begin + kTokens : shape.tokens;
    const int32_t sequence = operands.sequences[token];
    int tokens = 1;
    for (int64_t t = token - 1; t >= begin && tokens < kLeast && operands.sequences[t] == sequence; --t) ++tokens;
    for (int64_t t = token + 1; t < behind && tokens < kLeast && operands.sequences[t] == sequence; ++t) ++tokens;
    return tokens < kLeast;
  }
};

/* The first blocks take tokens that are alone, in turns; the others have neighbouring tokens, the last ones first. */
template <class S>
__global__ void __launch_bounds__(kThreads)
    tokens_kernel(Shape shape, Operands<S> operands, int64_t alone, int turns, void *y) {
  typedef typename Layouts<S>::One One;
  typedef typename Layouts<S>::Many Many;
  extern __shared__ float4 row_attention_tiles[];
  int *const listed = reinterpret_cast<int *>(row_attention_tiles);
  void *const memory = listed + kThreads;
  if (blockIdx.x < alone) {
    const int turn = static_cast<int>(blockIdx.x % turns);
    Place place = place_of<S, One::kHeadsOfBlock>(shape, blockIdx.x / turns, kThreads);
    const int64_t token = place.token + threadIdx.x;
    listed[threadIdx.x] = token < shape.tokens && Runs<S>::is_short(shape, operands, token);
    __syncthreads();
    const int64_t first = place.token;
    for (int t = 0, count = 0; t < kThreads; ++t) {
      if (!listed[t] || count++ % turns != turn) continue;
      place.token = first + t;
      attend_tokens<One, S>(shape, operands, memory, place, 0, 1, y);
    }
    return;
  }
  const Place place = place_of<S, Many::kHeadsOfBlock>(shape, gridDim.x - 1 - blockIdx.x, Many::kTokensOfBlock);
  const int64_t left = shape.tokens - place.token;
  const int behind = left < Many::kTokensOfBlock ? static_cast<int>(left) : Many::kTokensOfBlock;
  for (int t = 0, tokens = 0; t < behind; t += tokens) {
    tokens = Runs<S>::length(operands, place.token, t, behind);
    if (tokens < Runs<S>::kLeast) continue;
    attend_tokens<Many, S>(shape, operands, memory, place, t, t + tokens, y);
  }
}

/* Whether blocks take chunks in turns: there are fewer blocks with a token each than the device takes. */
template <class S>
inline bool is_split(const Shape &shape) {
  return blocks_of<S, Layouts<S>::One::kHeadsOfBlock>(shape, 1) < shape.fill;
}

template <class S>
inline void attend_chunks(const Shape &shape, const Operands<S> &operands, float *results) {
  typedef typename Layouts<S>::One L;
  const int64_t chunks = chunks_in<S>(shape), blocks = blocks_of<S, L::kHeadsOfBlock>(shape, 1);
  if (blocks == 0 || chunks == 0 || !is_split<S>(shape)) return;
  allow(chunks_kernel<S>, L::kBytes);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(lanes_of(shape, blocks, chunks)));
  chunks_kernel<S><<<grid, kThreads, L::kBytes, stream()>>>(shape, operands, results, chunks);
  check(cudaGetLastError(), "row_attention");
}

template <class S>
inline void attend(const Shape &shape, const Operands<S> &operands, float *results, void *y) {
  if (shape.tokens * shape.parts == 0) return;
  if (is_split<S>(shape)) return merge<S, Binary>(shape, operands, results, y);
  typedef typename Layouts<S>::One One;
  typedef typename Layouts<S>::Many Many;
  constexpr size_t kBytes = Layouts<S>::kBytes;
  /* So many blocks share the tokens that are alone, among as many as a block has threads. */
  const int64_t ranges = blocks_of<S, One::kHeadsOfBlock>(shape, kThreads);
  int64_t turns = divide_up(4 * shape.fill, ranges);
  turns = turns < kThreads ? turns : kThreads;
  const int64_t alone = Runs<S>::kLeast == 1 ? 0 : ranges * turns;
  const int64_t blocks = alone + blocks_of<S, Many::kHeadsOfBlock>(shape, Many::kTokensOfBlock);
  allow(tokens_kernel<S>, kBytes);
  tokens_kernel<S><<<static_cast<unsigned>(blocks), kThreads, kBytes, stream()>>>(shape, operands, alone,
                                                                                  static_cast<int>(turns), y);
  check(cudaGetLastError(), "row_attention");
}

}  // namespace in_tiles
}  // namespace row_attention
}  // namespace cuda
}  // namespace hidet_dist
