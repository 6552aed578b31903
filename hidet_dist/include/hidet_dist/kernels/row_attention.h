/*
 * Attention of tokens to the rows of pools of keys and values. Compiled into generated kernels, as C++11 with OpenMP.
 *
 * The rows of a sequence are cut into chunks of a fixed length. A chunk gives, for each query, the greatest score, the
 * sum of exponentials and the weighted sum of values; these are merged in the order of chunks. Each sum is over rows in
 * their order, or over the lanes of a vector in a fixed one. So a token's result has the same bits whatever tokens are
 * beside it, however wide the table is, and however many threads share the work.
 *
 * A row of keys or values is read from memory once for all heads of its group, and for all tokens of a block, which are
 * neighbours of one sequence.
 */
#ifndef HIDET_DIST_KERNELS_ROW_ATTENTION_H
#define HIDET_DIST_KERNELS_ROW_ATTENTION_H

#include <float.h>
#include <stdint.h>

#include <vector>

#include "hidet_dist/kernels/functions.h"
#include "hidet_dist/kernels/tiles.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define HIDET_DIST_NOINLINE __attribute__((noinline))

namespace hidet_dist {
namespace kernels {
namespace row_attention {

/* Vectors of a level's width. `fma` is rounded once where the level has such an instruction. */
#if defined(__AVX512F__) && defined(__AVX512DQ__)
typedef __m512 Vec;
const int kLanes = 16, kRegisters = 32;
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float *p) { return _mm512_loadu_ps(p); }
inline Vec load(const hd::f16 *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
inline Vec load(const hd::bf16 *p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store(float *p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec greater(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline __m256 half(Vec a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
  const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(half(a), half(b)), _mm256_hadd_ps(half(c), half(d)));
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
inline Vec halves(Vec a, Vec b) { return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); }
inline Vec pairs(Vec a, Vec b) { return add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); }
/* The scores of four queries with four rows, with the additions of `sums` and half of its instructions. */
inline void store_sums(const Vec (&x)[4][4], float *y, int64_t step) {
  Vec each[4]; /* of a query: parts of its first two rows in the lower half, and of the others in the upper one */
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) each[i] = pairs(halves(x[i][0], x[i][2]), halves(x[i][1], x[i][3]));
  const Vec a = pairs(each[0], each[1]), b = pairs(each[2], each[3]);
  const Vec by_rows = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  const Vec ordered = _mm512_castpd_ps(_mm512_permutex_pd(_mm512_castps_pd(by_rows), 0xd8));
  _mm_storeu_ps(y, _mm512_castps512_ps128(ordered));
  _mm_storeu_ps(y + step, _mm512_extractf32x4_ps(ordered, 1));
  _mm_storeu_ps(y + 2 * step, _mm512_extractf32x4_ps(ordered, 2));
  _mm_storeu_ps(y + 3 * step, _mm512_extractf32x4_ps(ordered, 3));
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
typedef __m256 Vec;
const int kLanes = 8, kRegisters = 16;
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float *p) { return _mm256_loadu_ps(p); }
inline Vec load(const hd::f16 *p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
inline Vec load(const hd::bf16 *p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void store(float *p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec greater(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
  const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
#else
typedef __m128 Vec;
const int kLanes = 4, kRegisters = 16;
inline Vec zero() { return _mm_setzero_ps(); }
inline Vec all(float x) { return _mm_set1_ps(x); }
inline Vec load(const float *p) { return _mm_loadu_ps(p); }
inline Vec load(const hd::f16 *p) {
  return _mm_setr_ps(hd::load(p[0]), hd::load(p[1]), hd::load(p[2]), hd::load(p[3]));
}
inline Vec load(const hd::bf16 *p) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
  return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), bits));
}
inline void store(float *p, Vec x) { _mm_storeu_ps(p, x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
inline Vec mul(Vec a, Vec b) { return _mm_mul_ps(a, b); }
inline Vec add(Vec a, Vec b) { return _mm_add_ps(a, b); }
inline Vec greater(Vec a, Vec b) { return _mm_max_ps(a, b); }
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
  _MM_TRANSPOSE4_PS(a, b, c, d);
  return _mm_add_ps(_mm_add_ps(a, b), _mm_add_ps(c, d));
}
#endif

/*
 * The scores of N queries with R rows, from the sums in each lane. They are written in runs of four: what is behind the
 * last row of a run is overwritten by the rows that follow.
 */
template <int N, int R>
inline void store_sums(const Vec (&x)[N][R], float *y, int64_t step) {
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
    _mm_storeu_ps(y + i * step, sums(x[i][0], x[i][1], x[i][2], R == 4 ? x[i][R - 1] : zero()));
}

const int64_t kTile = 12;   /* rows that are read together: whole passes of three and of four */
const int64_t kStreams = 3; /* streams of memory that are asked for beside a tile */
const int64_t kWindow = 2 * kTile;   /* rows that are asked for while the same number before them is read */
const int64_t kChunk = 8 * kWindow;  /* rows of a chunk: merging two costs as much as a few rows */
const int64_t kScores = kChunk + 16; /* scores of a query: those of a chunk, and what is written behind them */
const int64_t kLine = 64;            /* bytes of a cache line */
const int kSecondLevel = 2; /* the cache that rows are asked into: rows of many groups fill the first one */
const int64_t kMostQueries = 4; /* queries in one pass over rows */
const int64_t kBlockQueries = 48; /* queries of a group in a block of tokens: their sums stay in a first-level cache */
const float kNothing = -FLT_MAX;

/* The queries of the next pass over rows: as many as there can be, or half where that would leave one alone. */
inline int64_t of_a_pass(int64_t queries) {
  if (queries == kMostQueries + 1) return queries / 2;
  return std::min(queries, kMostQueries);
}

inline int64_t padded(int64_t size) { return divide_up(size, 16) * 16; }

/*
 * Rows that are asked for while others are read, a line of each stream at a time: a processor that is asked for more
 * lines than it can wait for stops.
 */
struct Ahead {
  const char *const *at; /* kTile rows: the first of each stream, the second of each, ... */
  int64_t bytes; /* of a row */
  int64_t row, next; /* the next line: its row in the first stream, and the bytes before it */
  int64_t left; /* lines of each stream that are still to be asked for beside what is read now */

  __attribute__((always_inline)) inline void ask() {
    if (left == 0) return;
    --left;
    for (int64_t j = 0; j < kStreams; ++j) __builtin_prefetch(at[row + j] + next, 0, kSecondLevel);
    next += kLine;
    if (next < bytes) return;
    next = 0;
    row += kStreams;
  }
};

/* Rows of a tile. There are `count`; what follows up to a whole tile can be read, and means nothing. */
template <class E>
struct Rows {
  const E *const *at;
  int64_t offset, count; /* offset: elements before what is wanted of each row */
};

/*
 * The scores of N queries with the rows of a tile. There are twelve sums for each lane where there are 16 registers:
 * fewer would wait for one another, and more do not fit. With 32 there are sixteen, which load queries less often.
 * Without the pragmas GCC keeps them in memory around the loop.
 */
template <int N, class E>
HIDET_DIST_NOINLINE void dots(const float *query, int64_t query_step, const Rows<E> &rows, int64_t size, float *scores,
                              Ahead &asked) {
  const int R = N == 4 && kRegisters < 32 ? 3 : 4;
  /* Elements of R rows that are as many bytes as are asked for at once. */
  const int64_t elements = kLine * kStreams / (R * static_cast<int64_t>(sizeof(E)));
  const int64_t at_once = std::max<int64_t>(elements / kLanes * kLanes, kLanes);
  Ahead ahead = asked;
  for (int64_t first = 0; first < rows.count; first += R) {
    const E *row[R];
    Vec total[N][R];
#pragma GCC unroll 4
    for (int j = 0; j < R; ++j) row[j] = rows.at[first + j] + rows.offset;
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < R; ++j) total[i][j] = zero();
    for (int64_t d = 0; d < size;) {
      ahead.ask();
      for (const int64_t end = std::min(size, d + at_once); d < end; d += kLanes) {
        Vec k[R];
#pragma GCC unroll 4
        for (int j = 0; j < R; ++j) k[j] = load(row[j] + d);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
          const Vec q = load(query + i * query_step + d);
#pragma GCC unroll 4
          for (int j = 0; j < R; ++j) total[i][j] = fma(q, k[j], total[i][j]);
        }
      }
    }
    store_sums(total, scores + first, kScores);
  }
  asked = ahead;
}

/* Add some rows of a tile, times their weights, to V vectors of the results of N queries, which stay in registers. */
template <int N, int V, class E>
__attribute__((always_inline)) inline void mix_strip(const float *weights, const Rows<E> &rows, int64_t begin,
                                                     int64_t end, int64_t d, float *result, int64_t step,
                                                     Ahead &ahead) {
  /* Rows of V vectors that are as many bytes as are asked for at once. */
  const int64_t at_once = std::max<int64_t>(kLine * kStreams / (V * kLanes * static_cast<int64_t>(sizeof(E))), 1);
  Vec y[N][V];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) y[i][v] = load(result + i * step + d + v * kLanes);
  for (int64_t j = begin; j < end;) {
    ahead.ask();
    for (const int64_t stop = std::min(end, j + at_once); j < stop; ++j) {
      const E *const row = rows.at[j] + rows.offset + d;
      Vec x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) x[v] = load(row + v * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const Vec w = all(weights[i * kScores + j]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) y[i][v] = fma(w, x[v], y[i][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(result + i * step + d + v * kLanes, y[i][v]);
}

/* Add some rows of a tile to the results of N queries, each times its weight for the row. */
template <int N, class E>
HIDET_DIST_NOINLINE void mix(const float *weights, const Rows<E> &rows, int64_t begin, int64_t end, int64_t size,
                             float *result, int64_t step, Ahead &asked) {
  const int most = (kRegisters - 1) / (N + 1), V = most < 4 ? most : 4; /* V vectors of N results, and of a row */
  Ahead ahead = asked;
  int64_t d = 0;
  for (; d + V * kLanes <= size; d += V * kLanes) mix_strip<N, V>(weights, rows, begin, end, d, result, step, ahead);
  for (; d < size; d += kLanes) mix_strip<N, 1>(weights, rows, begin, end, d, result, step, ahead);
  asked = ahead;
}

/* Always whole runs of 16, so that a value does not depend on how a compiler treats the rest of a loop. */
HIDET_DIST_NOINLINE inline void exponentials(float *x, int64_t count, float most) {
  for (int64_t l = 0; l < count; l += 16)
    for (int i = 0; i < 16; ++i) x[l + i] = hd::exp(x[l + i] - most);
}
HIDET_DIST_NOINLINE inline void cap(float *x, int64_t count, float softcap) {
  for (int64_t l = 0; l < count; l += 16)
    for (int i = 0; i < 16; ++i) x[l + i] = softcap * hd::tanh(x[l + i] / softcap);
}

struct Shape {
  int64_t tokens, heads, groups, size_k, size_v;
  int64_t parts, rows, sequences, columns; /* rows are those of a part's pool */
  int64_t page, value_step; /* value_step: elements from one group's values to the next one's */
  float scale, softcap;
  bool is_partial; /* the result of each part, with the logarithm of its sum as its last element */

  int64_t of_group() const { return heads / groups; }
};

template <class Query, class Pool>
struct Operands {
  const Query *query;
  const Pool *keys, *values;
  const int32_t *table, *sequences, *begins, *ends;
  const float *sinks; /* or nullptr */
};

/* Neighbouring tokens of one sequence, and groups of heads. */
struct Block {
  int64_t part, token, tokens, group, groups;
  int64_t chunk, chunks; /* the first chunk that one of the tokens sees, and how many follow */
};

/* What queries have seen: the greatest score, the sum of exponentials (0 if there is none) and the weighted values. */
struct Seen {
  float *most, *total, *result;
};

HIDET_DIST_NOINLINE inline void merge(Seen into, Seen from, int64_t query, int64_t step) {
  if (from.total[query] == 0.0f) return;
  float *const y = into.result + query * step;
  const float *const x = from.result + query * step;
  const float a = into.most[query], b = from.most[query], most = a < b ? b : a;
  float scales[16] = {a, b};
  exponentials(scales, 16, most);
  const Vec old = all(scales[0]), fresh = all(scales[1]);
  into.most[query] = most;
  float totals[16] = {into.total[query]}, others[16] = {from.total[query]};
  store(totals, fma(load(others), fresh, mul(load(totals), old)));
  into.total[query] = totals[0];
  for (int64_t d = 0; d < step; d += kLanes) store(y + d, fma(load(x + d), fresh, mul(load(y + d), old)));
}

/* The work of one thread on one block at a time. */
template <class Query, class Pool>
class Worker {
 public:
  Worker(const Shape &shape, const Operands<Query, Pool> &operands, int64_t most_queries)
      : shape_(shape),
        operands_(operands),
        step_k_(padded(shape.size_k)),
        step_v_(padded(shape.size_v)),
        memory_(most_queries * (step_k_ + kScores + 2 * (step_v_ + 16)) + kTile * (step_k_ + step_v_) + 64) {
    float *at = memory_.get();
    query_ = take(at, most_queries * step_k_);
    scores_ = take(at, most_queries * kScores);
    converted_ = take(at, kTile * std::max(step_k_, step_v_));
    chunk_ = seen(at, most_queries, step_v_);
    whole_ = seen(at, most_queries, step_v_);
  }

  static int64_t floats_of(int64_t queries, int64_t step) { return queries * (step + 32); }
  static Seen seen(float *&at, int64_t queries, int64_t step) {
    Seen result;
    result.result = take(at, queries * step);
    result.most = take(at, queries);
    result.total = take(at, queries);
    return result;
  }

  /* The whole of a block: its chunks in order. */
  void run(const Block &block, void *y) {
    open(block);
    start(block, whole_);
    for (int64_t c = 0; c < block.chunks; ++c) {
      chunk(block, block.chunk + c, chunk_);
      for (int64_t q = 0; q < queries(block); ++q) merge(whole_, chunk_, q, step_v_);
    }
    finish(block, whole_, y);
  }

  /* One chunk of a block, for another thread to merge. */
  void run_chunk(const Block &block, int64_t c, Seen result) {
    open(block);
    chunk(block, block.chunk + c, result);
  }

  void run_merge(const Block &block, const Seen *chunks, void *y) {
    start(block, whole_);
    for (int64_t c = 0; c < block.chunks; ++c)
      for (int64_t q = 0; q < queries(block); ++q) merge(whole_, chunks[c], q, step_v_);
    finish(block, whole_, y);
  }

  int64_t queries(const Block &block) const { return block.groups * block.tokens * shape_.of_group(); }

 private:
  /* A tile of rows of keys or values, as the first group of a block has them, and what is asked for beside them. */
  struct Tile {
    const Pool *rows[kTile];
    const char *ahead[kTile];
    int64_t place, count; /* of its first row in the chunk, and of rows that are wanted */
    int64_t step; /* elements from one group's row to the next one's */
    int64_t asked; /* bytes of a group's row that is asked for, or 0 */
    bool is_known; /* all rows that are wanted are rows of the pool */

    Rows<Pool> of_group(int64_t group) const { return {rows, group * step, count}; }
    int64_t lines() const { return asked * kTile / (kLine * kStreams); } /* of each stream, beside each group */
  };

  static float *take(float *&at, int64_t floats) {
    float *const result = at;
    at += floats;
    return result;
  }

  /* Convert a block's queries: those of a group are one behind the other. */
  void open(const Block &block) {
    const int64_t of_group = shape_.of_group();
    float *y = query_;
    for (int64_t g = 0; g < block.groups; ++g)
      for (int64_t t = 0; t < block.tokens; ++t)
        for (int64_t r = 0; r < of_group; ++r, y += step_k_) {
          const int64_t head = (block.group + g) * of_group + r;
          const Query *const x = operands_.query + ((block.token + t) * shape_.heads + head) * shape_.size_k;
          for (int64_t d = 0; d < shape_.size_k; ++d) y[d] = hd::load(x[d]);
          for (int64_t d = shape_.size_k; d < step_k_; ++d) y[d] = 0.0f;
        }
  }

  void start(const Block &block, Seen state) {
    for (int64_t q = 0; q < queries(block); ++q) {
      state.most[q] = kNothing;
      state.total[q] = 0.0f;
      for (int64_t d = 0; d < step_v_; ++d) state.result[q * step_v_ + d] = 0.0f;
    }
  }

  /* The part of a chunk that a token sees: rows from `begin_` to before `end_`, counted from the chunk's first one. */
  void find_intervals(const Block &block, int64_t first) {
    for (int64_t t = 0; t < block.tokens; ++t) {
      const int64_t at = (block.token + t) * shape_.parts + block.part;
      const int64_t last = std::min<int64_t>(operands_.ends[at], shape_.columns * shape_.page);
      begin_[t] = std::max<int64_t>(operands_.begins[at] - first, 0);
      end_[t] = std::min<int64_t>(last - first, kChunk);
    }
  }

  HIDET_DIST_NOINLINE void chunk(const Block &block, int64_t number, Seen result) {
    const int64_t first = number * kChunk, of_group = shape_.of_group(), in_group = block.tokens * of_group;
    start(block, result);
    find_intervals(block, first);
    int64_t least = kChunk, most = 0;
    for (int64_t t = 0; t < block.tokens; ++t) {
      if (begin_[t] >= end_[t]) continue;
      least = std::min(least, begin_[t]);
      most = std::max(most, end_[t]);
    }
    if (least >= most) return;
    least = least / kTile * kTile;
    const int64_t last = (most - 1) / kWindow;
    find_rows(block, first);
    Tile tile;
    for (int64_t l = least; l < most; l += kTile) {
      find_tile(operands_.keys, shape_.size_k, block, l, most, tile);
      if (l / kWindow < last)
        ask_for(operands_.keys, shape_.size_k, block, l / kWindow + 1, most, tile);
      else /* behind the last keys come the first values */
        ask_for(operands_.values, shape_.value_step, block, least / kWindow, most, tile);
      for_groups(block, tile, [&](int64_t g, Ahead &ahead) { scores_of_tile(block, g, tile, ahead); });
    }
    for (int64_t g = 0; g < block.groups; ++g)
      for (int64_t t = 0; t < block.tokens; ++t)
        for (int64_t r = 0; r < of_group && begin_[t] < end_[t]; ++r)
          weigh(g * in_group + t * of_group + r, begin_[t], end_[t], result);
    for (int64_t l = least; l < most; l += kTile) {
      find_tile(operands_.values, shape_.value_step, block, l, most, tile);
      if (l / kWindow < last)
        ask_for(operands_.values, shape_.value_step, block, l / kWindow + 1, most, tile);
      else if (most == kChunk)
        ask_for(operands_.keys, shape_.size_k, block, kChunk / kWindow, kChunk + kWindow, tile);
      for_groups(block, tile, [&](int64_t g, Ahead &ahead) { mix_tile(block, g, tile, result, ahead); });
    }
  }

  /* Call `use` for each group of a tile, and ask for an equal part of what is wanted ahead beside each. */
  template <class Use>
  static void for_groups(const Block &block, const Tile &tile, const Use &use) {
    Ahead ahead = {tile.ahead, tile.asked * block.groups, 0, 0, 0};
    for (int64_t g = 0; g < block.groups; ++g) {
      ahead.left = tile.lines();
      use(g, ahead);
      while (ahead.left > 0) ahead.ask();
    }
  }

  /* The rows of a chunk's places, in the pools; -1 for a place that the table has no row for. */
  void find_rows(const Block &block, int64_t first) {
    const int64_t sequence = operands_.sequences[block.token];
    const bool known = sequence >= 0 && sequence < shape_.sequences;
    const int32_t *const pages =
        operands_.table + ((known ? sequence : 0) * shape_.parts + block.part) * shape_.columns;
    for (int64_t l = 0; l < kChunk + kWindow; ++l) {
      const int64_t place = first + l, column = place / shape_.page;
      int64_t row = -1;
      if (known && column < shape_.columns) {
        row = static_cast<int64_t>(pages[column]) * shape_.page + place % shape_.page;
        if (row < 0 || row >= shape_.rows) row = -1;
      }
      rows_[l] = row;
    }
  }

  const Pool *row_of(const Pool *pool, int64_t step, const Block &block, int64_t l) const {
    const int64_t row = block.part * shape_.rows + std::max<int64_t>(rows_[l], 0);
    return pool + (row * shape_.groups + block.group) * step;
  }

  /* The tile of rows from a place to before `limit`, with nothing asked for beside it. */
  void find_tile(const Pool *pool, int64_t step, const Block &block, int64_t l, int64_t limit, Tile &tile) const {
    tile.place = l;
    tile.count = std::min(kTile, limit - l);
    tile.step = step;
    tile.asked = 0;
    tile.is_known = true;
    for (int64_t j = 0; j < kTile; ++j) {
      tile.rows[j] = row_of(pool, step, block, j < tile.count ? l + j : l);
      tile.is_known = tile.is_known && (j >= tile.count || rows_[l + j] >= 0);
    }
  }

  /*
   * Ask for rows of a window before `limit` beside a tile, some of each third of the window: a processor follows such
   * streams ahead, and reads several together in less time than one.
   */
  void ask_for(const Pool *pool, int64_t step, const Block &block, int64_t window, int64_t limit, Tile &tile) const {
    const int64_t each = kTile / kStreams, first = window * kWindow + tile.place % kWindow / kTile * each;
    for (int64_t r = 0; r < each; ++r)
      for (int64_t j = 0; j < kStreams; ++j) {
        const int64_t row = first + r + j * (kWindow / kStreams);
        const Pool *const at = row_of(pool, step, block, row < limit ? row : window * kWindow);
        tile.ahead[r * kStreams + j] = reinterpret_cast<const char *>(at);
      }
    tile.asked = step * static_cast<int64_t>(sizeof(Pool));
  }

  void scores_of_tile(const Block &block, int64_t g, const Tile &tile, Ahead &ahead) {
    const int64_t in_group = block.tokens * shape_.of_group();
    const float *const query = query_ + g * in_group * step_k_;
    float *const scores = scores_ + g * in_group * kScores + tile.place;
    const Rows<Pool> rows = tile.of_group(g);
    if (shape_.size_k % kLanes == 0) {
      all_dots(query, in_group, rows, shape_.size_k, scores, ahead);
    } else {
      const float *wide[kTile];
      all_dots(query, in_group, convert(rows, shape_.size_k, step_k_, wide), step_k_, scores, ahead);
    }
    for (int64_t j = 0; j < tile.count && !tile.is_known; ++j) {
      if (rows_[tile.place + j] >= 0) continue; /* what a token sees of it is no number, and shows */
      for (int64_t q = 0; q < in_group; ++q) scores[q * kScores + j] = NAN;
    }
  }

  template <class E>
  void all_dots(const float *query, int64_t count, const Rows<E> &rows, int64_t size, float *scores, Ahead &ahead) {
    int64_t some;
    for (int64_t q = 0; q < count; q += some) {
      some = of_a_pass(count - q);
      const float *const from = query + q * step_k_;
      float *const to = scores + q * kScores;
      if (some == 4) dots<4>(from, step_k_, rows, size, to, ahead);
      if (some == 3) dots<3>(from, step_k_, rows, size, to, ahead);
      if (some == 2) dots<2>(from, step_k_, rows, size, to, ahead);
      if (some == 1) dots<1>(from, step_k_, rows, size, to, ahead);
    }
  }

  Rows<float> convert(const Rows<Pool> &rows, int64_t size, int64_t step, const float **wide) {
    for (int64_t j = 0; j < kTile; ++j) {
      float *const y = converted_ + j * step;
      const Pool *const x = rows.at[j] + rows.offset;
      for (int64_t d = 0; d < size && j < rows.count; ++d) y[d] = hd::load(x[d]);
      for (int64_t d = j < rows.count ? size : 0; d < step; ++d) y[d] = 0.0f;
      wide[j] = y;
    }
    return {wide, 0, rows.count};
  }

  /* Scores to weights, for the rows of a chunk that a query sees. */
  HIDET_DIST_NOINLINE void weigh(int64_t query, int64_t begin, int64_t end, Seen result) {
    float *const x = scores_ + query * kScores;
    const int64_t from = begin / 16 * 16, to = divide_up(end, 16) * 16;
    const Vec scale = all(shape_.scale);
    for (int64_t l = from; l < to; l += kLanes) store(x + l, mul(load(x + l), scale));
    if (shape_.softcap != 0.0f) cap(x + from, to - from, shape_.softcap);
    for (int64_t l = from; l < begin; ++l) x[l] = kNothing;
    for (int64_t l = end; l < to; ++l) x[l] = kNothing;
    Vec greatest = all(kNothing);
    for (int64_t l = from; l < to; l += kLanes) greatest = greater(load(x + l), greatest);
    float lanes[kLanes];
    store(lanes, greatest);
    float most = lanes[0];
    for (int i = 1; i < kLanes; ++i) most = most < lanes[i] ? lanes[i] : most;
    exponentials(x + from, to - from, most);
    Vec total = zero();
    for (int64_t l = from; l < to; l += kLanes) total = add(total, load(x + l));
    const float sum = _mm_cvtss_f32(sums(total, zero(), zero(), zero()));
    result.most[query] = most;
    result.total[query] = sum == 0.0f ? NAN : sum; /* scores that are all minus infinity */
  }

  void mix_tile(const Block &block, int64_t g, const Tile &tile, Seen result, Ahead &ahead) {
    const Rows<Pool> rows = tile.of_group(g);
    if (shape_.size_v % kLanes == 0) {
      all_mixed(block, g, tile.place, rows, shape_.size_v, result, ahead);
    } else {
      const float *wide[kTile];
      all_mixed(block, g, tile.place, convert(rows, shape_.size_v, step_v_, wide), step_v_, result, ahead);
    }
  }

  /* Tokens that see the same rows of the tile share passes over them. */
  template <class E>
  void all_mixed(const Block &block, int64_t g, int64_t l, const Rows<E> &rows, int64_t size, Seen result,
                 Ahead &ahead) {
    const int64_t of_group = shape_.of_group(), first = g * block.tokens * of_group;
    int64_t after;
    for (int64_t t = 0; t < block.tokens; t = after) {
      const int64_t from = std::max<int64_t>(begin_[t] - l, 0), to = std::min<int64_t>(end_[t] - l, kTile);
      after = t + 1;
      while (after < block.tokens && std::max<int64_t>(begin_[after] - l, 0) == from &&
             std::min<int64_t>(end_[after] - l, kTile) == to)
        ++after;
      int64_t some;
      for (int64_t q = first + t * of_group; q < first + after * of_group && from < to; q += some) {
        some = of_a_pass(first + after * of_group - q);
        const float *const weights = scores_ + q * kScores + l;
        float *const y = result.result + q * step_v_;
        if (some == 4) mix<4>(weights, rows, from, to, size, y, step_v_, ahead);
        if (some == 3) mix<3>(weights, rows, from, to, size, y, step_v_, ahead);
        if (some == 2) mix<2>(weights, rows, from, to, size, y, step_v_, ahead);
        if (some == 1) mix<1>(weights, rows, from, to, size, y, step_v_, ahead);
      }
    }
  }

  HIDET_DIST_NOINLINE void finish(const Block &block, Seen state, void *y) {
    const int64_t of_group = shape_.of_group();
    int64_t q = 0;
    for (int64_t g = 0; g < block.groups; ++g)
      for (int64_t t = 0; t < block.tokens; ++t)
        for (int64_t r = 0; r < of_group; ++r, ++q) {
          const int64_t head = (block.group + g) * of_group + r, row = (block.token + t) * shape_.heads + head;
          float total = state.total[q], scale = 1.0f;
          const bool sees = total != 0.0f;
          if (operands_.sinks != nullptr && sees) {
            const float sink = operands_.sinks[head], most = std::max(state.most[q], sink);
            scale = hd::exp(state.most[q] - most);
            total = total * scale + hd::exp(sink - most);
          }
          const float *const x = state.result + q * step_v_;
          const float factor = scale / total;
          if (shape_.is_partial) {
            const int64_t width = shape_.size_v + 1;
            float *const to = static_cast<float *>(y) + (block.part * shape_.tokens * shape_.heads + row) * width;
            for (int64_t d = 0; d < shape_.size_v; ++d) to[d] = sees ? x[d] * factor : 0.0f;
            to[shape_.size_v] = sees ? hd::log(total) + state.most[q] : kNothing;
          } else {
            Query *const to = static_cast<Query *>(y) + row * shape_.size_v;
            for (int64_t d = 0; d < shape_.size_v; ++d) to[d] = hd::To<Query>::from(sees ? x[d] * factor : 0.0f);
          }
        }
  }

  const Shape shape_;
  const Operands<Query, Pool> operands_;
  const int64_t step_k_, step_v_;
  Scratch memory_;
  float *query_, *scores_, *converted_;
  Seen chunk_, whole_;
  int64_t rows_[kChunk + kWindow]; /* of the chunk's places, and of some behind them */
  int64_t begin_[kBlockQueries], end_[kBlockQueries]; /* what each token of the block sees of the chunk */
};

/* Blocks of a step, in the order of tokens. A block of one token has all groups, so that rows are read as they lie. */
inline std::vector<Block> blocks_of(const Shape &shape, const int32_t *sequences, const int32_t *begins,
                                    const int32_t *ends) {
  std::vector<Block> blocks;
  const int64_t most_tokens = std::max<int64_t>(1, kBlockQueries / shape.of_group());
  for (int64_t token = 0; token < shape.tokens;) {
    int64_t count = 1;
    while (count < most_tokens && token + count < shape.tokens && sequences[token + count] == sequences[token]) ++count;
    for (int64_t part = 0; part < shape.parts; ++part) {
      int64_t least = INT64_MAX, most = 0;
      for (int64_t t = token; t < token + count; ++t) {
        const int64_t at = t * shape.parts + part, begin = std::max<int64_t>(begins[at], 0);
        const int64_t end = std::min<int64_t>(ends[at], shape.columns * shape.page);
        if (begin >= end) continue;
        least = std::min(least, begin / kChunk);
        most = std::max(most, divide_up(end, kChunk));
      }
      const int64_t groups = count == 1 ? shape.groups : 1;
      for (int64_t group = 0; group < shape.groups; group += groups) {
        const Block block = {part, token, count, group, groups, most ? least : 0, most ? most - least : 0};
        blocks.push_back(block);
      }
    }
    token += count;
  }
  return blocks;
}

/*
 * The attention of a step. Where there are fewer blocks than threads can share, their chunks are shared.
 */
template <class Query, class Pool>
void attend(const Shape &shape, const Operands<Query, Pool> &operands, void *y) {
  typedef Worker<Query, Pool> ThisWorker;
  const std::vector<Block> blocks = blocks_of(shape, operands.sequences, operands.begins, operands.ends);
  int64_t most_queries = 1, chunks = 0, rows = 0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const int64_t queries = blocks[b].groups * blocks[b].tokens * shape.of_group();
    most_queries = std::max(most_queries, queries);
    chunks += blocks[b].chunks;
    rows += blocks[b].chunks * kChunk * queries;
  }
  const int64_t threads = threads_for(static_cast<double>(rows) * static_cast<double>(shape.size_k + shape.size_v));
  const int64_t count = static_cast<int64_t>(blocks.size());
  if (threads == 1) {
    ThisWorker worker(shape, operands, most_queries);
    for (int64_t b = 0; b < count; ++b) worker.run(blocks[b], y);
  } else if (count >= 4 * threads || chunks < 2 * count) {
#pragma omp parallel num_threads(threads)
    {
      ThisWorker worker(shape, operands, most_queries);
#pragma omp for schedule(dynamic, 1)
      for (int64_t b = 0; b < count; ++b) worker.run(blocks[b], y);
    }
  } else {
    const int64_t step = padded(shape.size_v);
    Scratch memory(chunks * ThisWorker::floats_of(most_queries, step));
    float *at = memory.get();
    std::vector<Seen> seen;
    std::vector<int64_t> block_of, first(1, 0);
    for (int64_t b = 0; b < count; ++b) {
      const int64_t queries = blocks[b].groups * blocks[b].tokens * shape.of_group();
      for (int64_t c = 0; c < blocks[b].chunks; ++c) {
        seen.push_back(ThisWorker::seen(at, queries, step));
        block_of.push_back(b);
      }
      first.push_back(static_cast<int64_t>(seen.size()));
    }
#pragma omp parallel num_threads(threads)
    {
      ThisWorker worker(shape, operands, most_queries);
#pragma omp for schedule(dynamic, 1)
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t b = block_of[c];
        worker.run_chunk(blocks[b], c - first[b], seen[c]);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t b = 0; b < count; ++b) worker.run_merge(blocks[b], seen.data() + first[b], y);
    }
  }
}

}  // namespace row_attention
}  // namespace kernels
}  // namespace hidet_dist

#endif
