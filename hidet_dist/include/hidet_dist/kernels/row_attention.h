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
const int kLanes = 16, kQueries = 4; /* queries in one pass over four rows: as many as registers allow */
const int kRowsOfFour = 4;           /* rows in one pass of four queries */
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
const int kLanes = 8, kQueries = 3, kRowsOfFour = 2;
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
const int kLanes = 4, kQueries = 3, kRowsOfFour = 2;
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

/* The scores of N queries with four rows, or of four queries with two, from the sums in each lane. */
template <int N>
inline void store_sums(const Vec (&x)[N][4], float *y, int64_t step) {
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) _mm_storeu_ps(y + i * step, sums(x[i][0], x[i][1], x[i][2], x[i][3]));
}
inline void store_sums(const Vec (&x)[4][2], float *y, int64_t step) {
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    const __m128 both = sums(x[i][0], x[i][1], x[i + 1][0], x[i + 1][1]);
    _mm_storel_pi(reinterpret_cast<__m64 *>(y + i * step), both);
    _mm_storeh_pi(reinterpret_cast<__m64 *>(y + (i + 1) * step), both);
  }
}

const int64_t kChunk = 128; /* rows of a chunk: merging two costs as much as a few rows */
const int64_t kQuad = 4;    /* rows that are read together */
const int64_t kWindow = 32; /* rows that are asked for while the same number before them is read */
const int64_t kLine = 64;   /* bytes of a cache line */
const int kSecondLevel = 2; /* the cache that rows are asked into: rows of many groups fill the first one */
const int64_t kBlockQueries = 48; /* queries of a group in a block of tokens: their sums stay in a first-level cache */
const float kNothing = -FLT_MAX;

/* The queries of the next pass over rows: as many as registers allow, or half where that would leave one alone. */
inline int64_t of_a_pass(int64_t queries) {
  if (queries == 4) return 4;
  if (queries == kQueries + 1) return queries / 2;
  return queries < kQueries ? queries : kQueries;
}

inline int64_t padded(int64_t size) { return divide_up(size, 16) * 16; }

/*
 * Runs of bytes that are asked for while others are read, a line of each at a time: a processor that is asked for more
 * lines than it can wait for stops.
 */
struct Ahead {
  const char *at[kQuad];
  int64_t next, bytes; /* of each run */

  __attribute__((always_inline)) inline void ask() {
    if (next >= bytes) return;
    for (int64_t j = 0; j < kQuad; ++j) __builtin_prefetch(at[j] + next, 0, kSecondLevel);
    next += kLine;
  }
};

/* Scores of N queries with four rows, R at a time. Without the pragmas GCC keeps the sums in memory around the loop. */
template <int N, int R, class E>
HIDET_DIST_NOINLINE void dots(const float *query, int64_t query_step, const E *const *rows, int64_t size, float *scores,
                              Ahead &asked) {
  Ahead ahead = asked;
  const int64_t lines = kLine * kQuad / R / static_cast<int64_t>(sizeof(E)); /* elements of a row for a line of four */
  for (int64_t first = 0; first < kQuad; first += R) {
    Vec total[N][R];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < R; ++j) total[i][j] = zero();
    for (int64_t d = 0; d < size;) {
      ahead.ask();
      for (const int64_t end = std::min(size, d + lines); d < end; d += kLanes) {
        Vec q[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) q[i] = load(query + i * query_step + d);
#pragma GCC unroll 4
        for (int j = 0; j < R; ++j) {
          const Vec k = load(rows[first + j] + d);
#pragma GCC unroll 4
          for (int i = 0; i < N; ++i) total[i][j] = fma(q[i], k, total[i][j]);
        }
      }
    }
    store_sums(total, scores + first, kChunk);
  }
  asked.next = ahead.next;
}

/* Add four rows to the results of N queries, R at a time, each times its weight for the row. */
template <int N, int R, class E>
HIDET_DIST_NOINLINE void mix(const float *weights, const E *const *rows, int64_t size, float *result, int64_t step,
                             Ahead &asked) {
  Ahead ahead = asked;
  const int64_t lines = kLine * kQuad / R / static_cast<int64_t>(sizeof(E));
  for (int64_t first = 0; first < kQuad; first += R) {
    Vec w[N][R];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < R; ++j) w[i][j] = all(weights[i * kChunk + first + j]);
    for (int64_t d = 0; d < size;) {
      ahead.ask();
      for (const int64_t end = std::min(size, d + lines); d < end; d += kLanes) {
        Vec y[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) y[i] = load(result + i * step + d);
#pragma GCC unroll 4
        for (int j = 0; j < R; ++j) {
          const Vec v = load(rows[first + j] + d);
#pragma GCC unroll 4
          for (int i = 0; i < N; ++i) y[i] = fma(w[i][j], v, y[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) store(result + i * step + d, y[i]);
      }
    }
  }
  asked.next = ahead.next;
}

/* The same for one query and some of the rows, with the same sums. */
template <class E>
HIDET_DIST_NOINLINE void mix_some(const float *weights, const E *const *rows, int64_t begin, int64_t end, int64_t size,
                                  float *result) {
  for (int64_t j = begin; j < end; ++j) {
    const Vec w = all(weights[j]);
    for (int64_t d = 0; d < size; d += kLanes) store(result + d, fma(w, load(rows[j] + d), load(result + d)));
  }
}

/* Always whole runs of 16, so that a value does not depend on how a compiler treats the rest of a loop. */
HIDET_DIST_NOINLINE inline void exponentials(float *x, float most) {
  for (int i = 0; i < 16; ++i) x[i] = hd::exp(x[i] - most);
}
HIDET_DIST_NOINLINE inline void cap(float *x, float softcap) {
  for (int i = 0; i < 16; ++i) x[i] = softcap * hd::tanh(x[i] / softcap);
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
  exponentials(scales, most);
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
        memory_(most_queries * (step_k_ + kChunk + 2 * (step_v_ + 16)) + kQuad * (step_k_ + step_v_) + 64) {
    float *at = memory_.get();
    query_ = take(at, most_queries * step_k_);
    scores_ = take(at, most_queries * kChunk);
    converted_ = take(at, kQuad * std::max(step_k_, step_v_));
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
  /* Four rows of keys or values, of one group of heads after the other, and what is asked for beside them. */
  struct Quad {
    const Pool *rows[kQuad];
    int64_t step; /* elements from one group's row to the next one's */
    bool is_known; /* all four are rows of the pool */
    Ahead ahead;

    void advance() {
      for (int64_t j = 0; j < kQuad; ++j) {
        rows[j] += step;
        ahead.at[j] += ahead.bytes;
      }
    }
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
    least = least / kQuad * kQuad;
    const int64_t behind = divide_up(most, kQuad) * kQuad, last = (behind - 1) / kWindow;
    find_rows(block, first, most);
    for (int64_t l = least; l < behind; l += kQuad) {
      Quad quad = quad_of(operands_.keys, shape_.size_k, block, l);
      if (l / kWindow < last)
        ask_for(quad, operands_.keys, shape_.size_k, block, l, l / kWindow + 1, behind);
      else /* behind the last keys come the first values */
        ask_for(quad, operands_.values, shape_.value_step, block, l, least / kWindow, behind);
      for (int64_t g = 0; g < block.groups; ++g) {
        Ahead ahead = quad.ahead;
        scores_of_quad(block, g, l, quad, ahead);
        while (ahead.next < ahead.bytes) ahead.ask();
        quad.advance();
      }
    }
    for (int64_t g = 0; g < block.groups; ++g)
      for (int64_t t = 0; t < block.tokens; ++t)
        for (int64_t r = 0; r < of_group && begin_[t] < end_[t]; ++r)
          weigh(g * in_group + t * of_group + r, begin_[t], end_[t], result);
    for (int64_t l = least; l < behind; l += kQuad) {
      Quad quad = quad_of(operands_.values, shape_.value_step, block, l);
      if (l / kWindow < last)
        ask_for(quad, operands_.values, shape_.value_step, block, l, l / kWindow + 1, behind);
      else if (behind == kChunk)
        ask_for(quad, operands_.keys, shape_.size_k, block, l, kChunk / kWindow, kChunk + kWindow);
      for (int64_t g = 0; g < block.groups; ++g) {
        Ahead ahead = quad.ahead;
        mix_quad(block, g, l, quad, result, ahead);
        while (ahead.next < ahead.bytes) ahead.ask();
        quad.advance();
      }
    }
  }

  /* The rows of a chunk's places, in the pools; -1 for a place that the table has no row for. */
  void find_rows(const Block &block, int64_t first, int64_t count) {
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
    for (int64_t l = count; l < divide_up(count, kQuad) * kQuad; ++l) rows_[l] = -1;
  }

  const Pool *row_of(const Pool *pool, int64_t step, const Block &block, int64_t l) const {
    const int64_t row = block.part * shape_.rows + std::max<int64_t>(rows_[l], 0);
    return pool + (row * shape_.groups + block.group) * step;
  }

  Quad quad_of(const Pool *pool, int64_t step, const Block &block, int64_t l) const {
    Quad quad = {{}, step, true, {{}, 0, 0}};
    for (int64_t j = 0; j < kQuad; ++j) {
      quad.rows[j] = row_of(pool, step, block, l + j);
      quad.is_known = quad.is_known && rows_[l + j] >= 0;
    }
    return quad;
  }

  /*
   * Ask for rows of a window before `limit` beside a quad, one of each fourth of the window: a processor follows such
   * streams ahead, each in a page of memory of its own, and reads several together in less time than one.
   */
  void ask_for(Quad &quad, const Pool *pool, int64_t step, const Block &block, int64_t l, int64_t window,
               int64_t limit) const {
    const int64_t first = window * kWindow + l % kWindow / kQuad;
    for (int64_t j = 0; j < kQuad; ++j) {
      const int64_t row = first + j * (kWindow / kQuad);
      quad.ahead.at[j] = reinterpret_cast<const char *>(row_of(pool, step, block, row < limit ? row : first));
    }
    quad.ahead.bytes = step * static_cast<int64_t>(sizeof(Pool));
  }

  void scores_of_quad(const Block &block, int64_t g, int64_t l, const Quad &quad, Ahead &ahead) {
    const int64_t in_group = block.tokens * shape_.of_group();
    const float *const query = query_ + g * in_group * step_k_;
    float *const scores = scores_ + g * in_group * kChunk + l;
    if (shape_.size_k % kLanes == 0) {
      all_dots(query, in_group, quad.rows, shape_.size_k, scores, ahead);
    } else {
      const float *wide[kQuad];
      convert(quad.rows, shape_.size_k, step_k_, wide);
      all_dots(query, in_group, wide, step_k_, scores, ahead);
    }
    for (int64_t j = 0; j < kQuad && !quad.is_known; ++j) {
      if (rows_[l + j] >= 0) continue; /* what a token sees of it is no number, and shows */
      for (int64_t q = 0; q < in_group; ++q) scores[q * kChunk + j] = NAN;
    }
  }

  template <class E>
  void all_dots(const float *query, int64_t count, const E *const *rows, int64_t size, float *scores, Ahead &ahead) {
    int64_t some;
    for (int64_t q = 0; q < count; q += some) {
      some = of_a_pass(count - q);
      const float *const from = query + q * step_k_;
      float *const to = scores + q * kChunk;
      if (some == 4) dots<4, kRowsOfFour>(from, step_k_, rows, size, to, ahead);
      if (some == 3) dots<3, kQuad>(from, step_k_, rows, size, to, ahead);
      if (some == 2) dots<2, kQuad>(from, step_k_, rows, size, to, ahead);
      if (some == 1) dots<1, kQuad>(from, step_k_, rows, size, to, ahead);
    }
  }

  void convert(const Pool *const *rows, int64_t size, int64_t step, const float **wide) {
    for (int64_t j = 0; j < kQuad; ++j) {
      float *const y = converted_ + j * step;
      for (int64_t d = 0; d < size; ++d) y[d] = hd::load(rows[j][d]);
      for (int64_t d = size; d < step; ++d) y[d] = 0.0f;
      wide[j] = y;
    }
  }

  /* Scores to weights, for the rows of a chunk that a query sees. */
  HIDET_DIST_NOINLINE void weigh(int64_t query, int64_t begin, int64_t end, Seen result) {
    float *const x = scores_ + query * kChunk;
    const int64_t from = begin / 16 * 16, to = divide_up(end, 16) * 16;
    const Vec scale = all(shape_.scale);
    for (int64_t l = from; l < to; l += kLanes) store(x + l, mul(load(x + l), scale));
    for (int64_t l = from; l < to && shape_.softcap != 0.0f; l += 16) cap(x + l, shape_.softcap);
    for (int64_t l = from; l < begin; ++l) x[l] = kNothing;
    for (int64_t l = end; l < to; ++l) x[l] = kNothing;
    Vec greatest = all(kNothing);
    for (int64_t l = from; l < to; l += kLanes) greatest = greater(load(x + l), greatest);
    float lanes[kLanes];
    store(lanes, greatest);
    float most = lanes[0];
    for (int i = 1; i < kLanes; ++i) most = most < lanes[i] ? lanes[i] : most;
    for (int64_t l = from; l < to; l += 16) exponentials(x + l, most);
    Vec total = zero();
    for (int64_t l = from; l < to; l += kLanes) total = add(total, load(x + l));
    const float sum = _mm_cvtss_f32(sums(total, zero(), zero(), zero()));
    result.most[query] = most;
    result.total[query] = sum == 0.0f ? NAN : sum; /* scores that are all minus infinity */
  }

  void mix_quad(const Block &block, int64_t g, int64_t l, const Quad &quad, Seen result, Ahead &ahead) {
    if (shape_.size_v % kLanes == 0) {
      all_mixed(block, g, l, quad.rows, shape_.size_v, result, ahead);
    } else {
      const float *wide[kQuad];
      convert(quad.rows, shape_.size_v, step_v_, wide);
      all_mixed(block, g, l, wide, step_v_, result, ahead);
    }
  }

  template <class E>
  void all_mixed(const Block &block, int64_t g, int64_t l, const E *const *rows, int64_t size, Seen result,
                 Ahead &ahead) {
    const int64_t of_group = shape_.of_group(), in_group = block.tokens * of_group;
    const float *const weights = scores_ + g * in_group * kChunk + l;
    float *const y = result.result + g * in_group * step_v_;
    int64_t q = 0; /* the first query that has not been served */
    for (int64_t t = 0; t < block.tokens; ++t) {
      const int64_t after = (t + 1) * of_group;
      if (begin_[t] <= l && l + kQuad <= end_[t]) {
        if (t + 1 < block.tokens) continue; /* together with the next token's */
        all_whole(weights, q, after, rows, size, y, ahead);
      } else {
        all_whole(weights, q, t * of_group, rows, size, y, ahead);
        const int64_t from = std::max<int64_t>(begin_[t] - l, 0), to = std::min<int64_t>(end_[t] - l, kQuad);
        for (int64_t each = t * of_group; each < after; ++each)
          mix_some(weights + each * kChunk, rows, from, to, size, y + each * step_v_);
      }
      q = after;
    }
  }

  template <class E>
  void all_whole(const float *weights, int64_t q, int64_t end, const E *const *rows, int64_t size, float *y,
                 Ahead &ahead) {
    int64_t some;
    for (; q < end; q += some) {
      some = of_a_pass(end - q);
      const float *const from = weights + q * kChunk;
      float *const to = y + q * step_v_;
      if (some == 4) mix<4, kRowsOfFour>(from, rows, size, to, step_v_, ahead);
      if (some == 3) mix<3, kQuad>(from, rows, size, to, step_v_, ahead);
      if (some == 2) mix<2, kQuad>(from, rows, size, to, step_v_, ahead);
      if (some == 1) mix<1, kQuad>(from, rows, size, to, step_v_, ahead);
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
