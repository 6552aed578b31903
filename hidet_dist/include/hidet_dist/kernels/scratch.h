// Scratch memory for hidet's kernels: see cublas.h. A separate header, because it throws exceptions.
#ifndef HIDET_DIST_KERNELS_SCRATCH_H
#define HIDET_DIST_KERNELS_SCRATCH_H

#include "hidet_dist/cublas.h"
#include "hidet_dist/kernels/cuda/runtime.h"

// Without memory, no kernel of the launch may run.
inline void *hidet_dist_scratch(int64_t nbytes) {
  void *memory = hidet_dist_cublas_scratch(nbytes);
  if (memory == nullptr && nbytes > 0) throw KernelError("there is no device memory for a product's result");
  return memory;
}

#endif
