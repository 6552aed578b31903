/*
 * Attention of tokens to the rows of pools of keys and values, on a CUDA device: see ../row_attention.h, whose results
 * this gives but for rounding. Where queries and pools have one dtype of half precision, tensor cores compute it.
 */
#pragma once
#include "hidet_dist/kernels/cuda/row_attention_float32.h"
#include "hidet_dist/kernels/cuda/row_attention_tiles.h"

namespace hidet_dist {
namespace cuda {
namespace row_attention {

/* The kernels of a program: those of one namespace or the other. */
template <class S, bool kTensorCores>
struct Kernels {
  static void attend_chunks(const Shape &shape, const Operands<S> &operands, float *results) {
    in_tiles::attend_chunks<S>(shape, operands, results);
  }
  static void attend(const Shape &shape, const Operands<S> &operands, float *results, void *y) {
    in_tiles::attend<S>(shape, operands, results, y);
  }
};
template <class S>
struct Kernels<S, false> {
  typedef in_float32::Sizes<S> Sizes;
  static Operands<Sizes> sized(const Operands<S> &given) {
    return {given.query, given.keys, given.values, given.table, given.sequences, given.begins, given.ends, given.sinks};
  }
  static void attend_chunks(const Shape &shape, const Operands<S> &operands, float *results) {
    in_float32::attend_chunks<Sizes>(shape, sized(operands), results);
  }
  static void attend(const Shape &shape, const Operands<S> &operands, float *results, void *y) {
    in_float32::attend<Sizes>(shape, sized(operands), results, y);
  }
};

/* The results of chunks, where these are taken in turns; else nothing is done. */
template <class S, bool kTensorCores>
inline void attend_chunks(const Shape &shape, const Operands<S> &operands, float *results) {
  Kernels<S, kTensorCores>::attend_chunks(shape, operands, results);
}

/* The results, from those of chunks if there are any. */
template <class S, bool kTensorCores>
inline void attend(const Shape &shape, const Operands<S> &operands, float *results, void *y) {
  Kernels<S, kTensorCores>::attend(shape, operands, results, y);
}

}  // namespace row_attention
}  // namespace cuda
}  // namespace hidet_dist
