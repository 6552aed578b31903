/*
 * Matrix products by NVIDIA's cuBLAS, for kernels to call.
 *
 * cuBLAS is loaded on request: this library is built and linked without it. A handle belongs to one device and has a
 * separate workspace. So nothing is allocated when a product is computed, which can then be captured into a CUDA graph,
 * and the same product always gives the same bits (cuBLAS Library, "Results Reproducibility").
 */
#ifndef HIDET_DIST_CUBLAS_H
#define HIDET_DIST_CUBLAS_H

#include "hidet_dist/collectives.h"

/* The oldest supported version of cuBLAS, encoded as cuBLAS does: 11.0.0, the first with compute types. */
#define HIDET_DIST_CUBLAS_OLDEST 110000

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hidet_dist_cublas hidet_dist_cublas;

/* Returns the CUDA stream on which the calling thread launches kernels. */
typedef void *(*hidet_dist_cublas_stream)(void);

/* Called with the reason why a product could not be enqueued on the stream. */
typedef void (*hidet_dist_cublas_report)(const char *message);

/* Allocates device memory, which must live as long as the handle and graphs with its products are used. Returns null
 * after reporting the reason. */
typedef void *(*hidet_dist_cublas_allocate)(int64_t nbytes);

/* Loads cuBLAS from this file, once per process. Returns its version, such as 130100 for 13.1.0, or 0 (see
 * hidet_dist_last_error). */
HIDET_DIST_API int32_t hidet_dist_cublas_load(const char *path);

/* Makes a handle for the device whose context is current, or returns null (see hidet_dist_last_error). The workspace,
 * in device memory, must live as long as the handle and graphs with its products are used. */
HIDET_DIST_API hidet_dist_cublas *hidet_dist_cublas_create(hidet_dist_cublas_stream stream,
                                                           hidet_dist_cublas_report report,
                                                           hidet_dist_cublas_allocate allocate, void *workspace,
                                                           int64_t workspace_bytes);

/* Frees a handle. Its context must be current, and no thread may be bound to it. */
HIDET_DIST_API void hidet_dist_cublas_destroy(hidet_dist_cublas *handle);

/* Binds a handle to the calling thread; null for none. One thread at a time may use it. */
HIDET_DIST_API void hidet_dist_cublas_bind(hidet_dist_cublas *handle);

/*
 * Enqueues `batch` products on the calling thread's current stream: c = a b, with a[m, k], b[k, n] (b[n, k] if
 * `transposed`) and c[m, n], all row-major. Consecutive matrices are batch_a, batch_b and m n elements apart.
 *
 * Operands have one dtype: HIDET_DIST_F32, HIDET_DIST_F16 or HIDET_DIST_BF16. Sums are in float32, also where cuBLAS
 * splits them; float32 operands are rounded to tf32 only if `as_tf32` is not 0. Errors are reported to the handle's
 * function; if no handle is bound, the thread's current communicator fails.
 */
HIDET_DIST_API void hidet_dist_cublas_product(int32_t dtype, int32_t as_tf32, int64_t batch, int64_t m, int64_t n,
                                              int64_t k, const void *a, int64_t batch_a, const void *b, int64_t batch_b,
                                              int32_t transposed, void *c);

/* Returns device memory for intermediate values between the kernels of one launch, from the calling thread's handle.
 * All launches share it, and it grows only when more is requested than ever before. Null if there is none. */
HIDET_DIST_API void *hidet_dist_cublas_scratch(int64_t nbytes);

#ifdef __cplusplus
}
#endif

#endif
