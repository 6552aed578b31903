/*
 * Instructions of tensor cores, and the copies that feed them, as functions: PTX ISA, "Warp-level matrix instructions"
 * and "Data Movement and Conversion Instructions: Asynchronous copy". All are there from sm_80 on.
 *
 * A product is d = a b + c, of 16 x 16 by 16 x 8 elements of half precision, summed in float32. Of a lane with `group`
 * lane / 4 and `within` lane % 4, register i of `a` has the elements of row group + 8 (i % 2) and columns
 * 2 within + 8 (i / 2) and the next one; register i of `b` those of column group and rows 2 within + 8 i and the next
 * one; d and c have rows group + 8 (i / 2) and columns 2 within + i % 2.
 */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace hidet_dist {
namespace cuda {
namespace tensor_cores {

template <class Element>
struct Half;
template <>
struct Half<__half> {
  static constexpr uint32_t kOnes = 0x3c003c00u, kNoNumber = 0x7fffu;
  __device__ static uint32_t pair(float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t *>(&both);
  }
  /* The differences of pairs. */
  __device__ static uint32_t minus(uint32_t x, uint32_t y) {
    const __half2 both = __hsub2(*reinterpret_cast<const __half2 *>(&x), *reinterpret_cast<const __half2 *>(&y));
    return *reinterpret_cast<const uint32_t *>(&both);
  }
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                  const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
};
template <>
struct Half<__nv_bfloat16> {
  static constexpr uint32_t kOnes = 0x3f803f80u, kNoNumber = 0x7fffu;
  __device__ static uint32_t pair(float x, float y) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const uint32_t *>(&both);
  }
  /* The differences of pairs. */
  __device__ static uint32_t minus(uint32_t x, uint32_t y) {
    const __nv_bfloat162 both =
        __hsub2(*reinterpret_cast<const __nv_bfloat162 *>(&x), *reinterpret_cast<const __nv_bfloat162 *>(&y));
    return *reinterpret_cast<const uint32_t *>(&both);
  }
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                  const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
};

/* The address of what is in shared memory, as instructions take it. */
__device__ inline uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/* Lets a compiler take a number for a new one, so that what follows from it is not kept in registers but computed again
 * where it is needed. */
template <class Integer>
__device__ inline void renew(Integer &x) {
  asm volatile("" : "+r"(x));
}

/* Four matrices of 8 x 8 elements: lane 8 j + i has the address of row i of matrix j, a multiple of 16 bytes. */
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

/* Copy kBytes to shared memory, which are zeros if they are not present. The addresses are multiples of kBytes. */
template <int kBytes>
__device__ inline void copy_async(uint32_t to, const void *from, bool is_present) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "the widths of cp.async");
  const uint32_t present = is_present ? kBytes : 0;
  if (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(present) : "memory");
  } else if (kBytes == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" : : "r"(to), "l"(from), "r"(present) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(to), "l"(from), "r"(present) : "memory");
  }
}
/* Close a group of copies, which may be empty; wait until no more than so many of the last groups are under way. */
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int kLeft>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kLeft) : "memory");
}

/* 2 to the power of x, with an error of 2 units in the last place; 0 for minus infinity. */
__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tensor_cores
}  // namespace cuda
}  // namespace hidet_dist
