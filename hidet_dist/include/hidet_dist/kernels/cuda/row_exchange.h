/*
 * Packing of the rows that a rank exchanges with the others of its group, and what is done with those that it receives;
 * see hidet_dist_gather_packed_rows in hidet_dist/collectives.h.
 *
 * A block has some rows of one rank. It counts the wanted rows before them, which says where theirs lie among the packed
 * ones, and then copies them one after the other.
 */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hidet_dist/kernels/cuda/launch.h"

namespace hidet_dist {
namespace cuda {
namespace row_exchange {

constexpr int kThreads = 256;
constexpr int kRows = 16; /* of a block */

/* The mask of a group: each of `ranks` has `rows` rows. With `of_others`, the rows that are exchanged are those of the
 * other ranks that `own` wants, and else those of `own` that the others want. */
struct Wanted {
  const uint8_t *mask;
  int64_t ranks, rows, own;
  bool of_others;

  /* Whether each of the rows that are exchanged with another rank is wanted. */
  __device__ const uint8_t *with(int64_t rank) const {
    return mask + (of_others ? own * ranks + rank : rank * ranks + own) * rows;
  }
};

/* How many flags are set, for all threads of a block. */
__device__ inline int64_t count(const uint8_t *flags, int64_t size) {
  __shared__ int counts[kThreads / kWarp];
  int own = 0;
  for (int64_t s = threadIdx.x; s < size; s += kThreads) own += flags[s] != 0 ? 1 : 0;
  for (int distance = kWarp / 2; distance > 0; distance /= 2) own += __shfl_xor_sync(kAllLanes, own, distance);
  if (threadIdx.x % kWarp == 0) counts[threadIdx.x / kWarp] = own;
  __syncthreads();
  int64_t sum = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) sum += counts[warp];
  __syncthreads();
  return sum;
}

/* The place of the first wanted row from `begin` on of those that are exchanged with a rank, among the packed ones. */
__device__ inline int64_t place_of(const Wanted &wanted, int64_t rank, int64_t begin) {
  int64_t place = count(wanted.with(rank), begin);
  for (int64_t before = 0; before < rank; ++before) {
    if (before != wanted.own) place += count(wanted.with(before), wanted.rows);
  }
  return place;
}

template <class Word>
__device__ inline void copy_row(Word *to, const Word *from, int64_t words) {
  for (int64_t i = threadIdx.x; i < words; i += kThreads) to[i] = from[i];
}

template <class Word>
__global__ void __launch_bounds__(kThreads) pack_kernel(Wanted wanted, const Word *rows, Word *packed, int64_t words) {
  const int64_t rank = blockIdx.y, begin = int64_t(blockIdx.x) * kRows;
  if (rank == wanted.own) return;
  const uint8_t *const flags = wanted.with(rank);
  const int64_t first = wanted.of_others ? rank * wanted.rows : 0;
  int64_t place = place_of(wanted, rank, begin);
  for (int64_t s = begin; s < begin + kRows && s < wanted.rows; ++s) {
    if (flags[s] == 0) continue;
    copy_row(packed + place * words, rows + (first + s) * words, words);
    ++place;
  }
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(Wanted wanted, const Word *own_rows, const Word *packed, Word *result, int64_t words) {
  const int64_t rank = blockIdx.y, begin = int64_t(blockIdx.x) * kRows;
  const uint8_t *const flags = wanted.with(rank);
  int64_t place = place_of(wanted, rank, begin);
  for (int64_t s = begin; s < begin + kRows && s < wanted.rows; ++s) {
    Word *const row = result + (rank * wanted.rows + s) * words;
    if (flags[s] == 0) {
      for (int64_t i = threadIdx.x; i < words; i += kThreads) row[i] = Word{};
    } else if (rank == wanted.own) {
      copy_row(row, own_rows + s * words, words);
    } else {
      copy_row(row, packed + place * words, words);
      ++place;
    }
  }
}

/* In group order, as reduce-scatters of the host do. */
template <class Element, class Sum>
__global__ void __launch_bounds__(kThreads)
    add_kernel(Wanted wanted, const Element *rows, const Element *packed, Element *result, int64_t row) {
  extern __shared__ int64_t exchange_places[];
  const int64_t begin = int64_t(blockIdx.x) * kRows;
  int64_t place = 0;
  for (int64_t rank = 0; rank < wanted.ranks; ++rank) {
    if (rank == wanted.own) continue;
    const uint8_t *const flags = wanted.with(rank);
    const int64_t before = count(flags, begin);
    if (threadIdx.x == 0) exchange_places[rank] = place + before;
    place += before + count(flags + begin, wanted.rows - begin);
  }
  __syncthreads();
  for (int64_t s = begin; s < begin + kRows && s < wanted.rows; ++s) {
    for (int64_t i = threadIdx.x; i < row; i += kThreads) {
      Sum sum = Sum(0);
      for (int64_t rank = 0; rank < wanted.ranks; ++rank) {
        if (wanted.with(rank)[s] == 0) continue;
        sum += static_cast<Sum>(rank == wanted.own ? rows[(rank * wanted.rows + s) * row + i]
                                                   : packed[exchange_places[rank] * row + i]);
      }
      result[s * row + i] = static_cast<Element>(sum);
    }
    __syncthreads();
    for (int64_t rank = threadIdx.x; rank < wanted.ranks; rank += kThreads) {
      if (rank != wanted.own && wanted.with(rank)[s] != 0) ++exchange_places[rank];
    }
    __syncthreads();
  }
}

/* Packs the rows that a rank sends, of so many words each: of its rows, or with `of_others` of those of all ranks. */
template <class Word>
inline void pack(const Wanted &wanted, const Word *rows, Word *packed, int64_t words) {
  if (wanted.rows * words == 0) return;
  const dim3 grid(static_cast<unsigned>(divide_up(wanted.rows, kRows)), static_cast<unsigned>(wanted.ranks));
  pack_kernel<Word><<<grid, kThreads, 0, stream()>>>(wanted, rows, packed, words);
  check(cudaGetLastError(), "packing of rows");
}

/* Writes the rows that a rank wants to their places among those of all ranks, and zeros to the others. */
template <class Word>
inline void unpack(const Wanted &wanted, const Word *own_rows, const Word *packed, Word *result, int64_t words) {
  if (wanted.rows * words == 0) return;
  const dim3 grid(static_cast<unsigned>(divide_up(wanted.rows, kRows)), static_cast<unsigned>(wanted.ranks));
  unpack_kernel<Word><<<grid, kThreads, 0, stream()>>>(wanted, own_rows, packed, result, words);
  check(cudaGetLastError(), "unpacking of rows");
}

/* Adds up what the ranks have for each of this rank's rows: `rows` are those of all ranks, as this rank has them. */
template <class Element, class Sum>
inline void add(const Wanted &wanted, const Element *rows, const Element *packed, Element *result, int64_t row) {
  if (wanted.rows * row == 0) return;
  const unsigned blocks = static_cast<unsigned>(divide_up(wanted.rows, kRows));
  const size_t bytes = static_cast<size_t>(wanted.ranks) * sizeof(int64_t);
  add_kernel<Element, Sum><<<blocks, kThreads, bytes, stream()>>>(wanted, rows, packed, result, row);
  check(cudaGetLastError(), "adding up of rows");
}

}  // namespace row_exchange
}  // namespace cuda
}  // namespace hidet_dist
