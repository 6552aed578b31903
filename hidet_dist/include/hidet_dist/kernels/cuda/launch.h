// Launches of kernels that are written in CUDA C++. Compiled into generated kernels, as C++17.
#pragma once
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include "hidet_dist/kernels/cuda/runtime.h"

namespace hidet_dist {
namespace cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;                          // threads
constexpr size_t kUsualSharedBytes = 48 * 1024;    // of a block; a kernel that needs more must say so
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;  // along the first dim of a grid

inline cudaStream_t stream() { return static_cast<cudaStream_t>(get_cuda_stream()); }

// Reports an error of a launch, or of what was asked for before it, as hidet's generated launches do.
inline void check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  KernelError said(what);
  said.add(": ");
  said.add(cudaGetErrorString(error));
  hidet_set_last_error(said.what());
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace cuda
}  // namespace hidet_dist
