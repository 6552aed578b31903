/*
 * Matrix products by NVIDIA's cuBLAS, for kernels to call.
 *
 * cuBLAS is loaded when it is asked for: this library is built and linked without it. A handle belongs to one device
 * and has a workspace of its own. So nothing is allocated when a product is computed, which can then be captured into a
 * CUDA graph, and the same product always gives the same bits (cuBLAS Library, "Results Reproducibility").
 */
#ifndef HIDET_DIST_CUBLAS_H
#define HIDET_DIST_CUBLAS_H

#include "hidet_dist/collectives.h"

/* The oldest version of cuBLAS that will do, encoded as cuBLAS does: 11.0.0, the first with its compute types. */
#define HIDET_DIST_CUBLAS_OLDEST 110000

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hidet_dist_cublas hidet_dist_cublas;

/* The CUDA stream that the calling thread launches kernels on. */
typedef void *(*hidet_dist_cublas_stream)(void);

/* Told why a product could not be put on the stream. */
typedef void (*hidet_dist_cublas_report)(const char *message);

/* Memory of the device, of so many bytes, for as long as the handle, or a graph with its products, is used; or null, once
 * it has said why as a report does. */
typedef void *(*hidet_dist_cublas_allocate)(int64_t nbytes);

/* Loads cuBLAS from this file, once a process. Returns its version, such as 130100 for 13.1.0, or 0 (see
 * hidet_dist_last_error). */
HIDET_DIST_API int32_t hidet_dist_cublas_load(const char *path);

/* A handle for the device whose context is current, or null (see hidet_dist_last_error). The workspace, in the device's
 * memory, must stay for as long as the handle, or a graph with its products, is used. */
HIDET_DIST_API hidet_dist_cublas *hidet_dist_cublas_create(hidet_dist_cublas_stream stream,
                                                           hidet_dist_cublas_report report,
                                                           hidet_dist_cublas_allocate allocate, void *workspace,
                                                           int64_t workspace_bytes);

/* Frees it. Its context must be current, and no thread may be bound to it. */
HIDET_DIST_API void hidet_dist_cublas_destroy(hidet_dist_cublas *handle);

/* Makes it the calling thread's; null for none. One thread at a time may use it. */
HIDET_DIST_API void hidet_dist_cublas_bind(hidet_dist_cublas *handle);

/*
 * Puts `batch` products on the calling thread's current stream: c = a b, with a of [m, k], b of [k, n], or of [n, k] if
 * it is transposed, and c of [m, n], all row by row. Products are batch_a, batch_b and m n elements apart.
 *
 * Operands are of one dtype: HIDET_DIST_F32, HIDET_DIST_F16 or HIDET_DIST_BF16. Sums are in float32, also where cuBLAS
 * splits them; float32 operands are rounded to tf32 only where `as_tf32` says so. What goes wrong is reported to the
 * handle's function; where no handle is bound, the thread's current communicator fails.
 */
HIDET_DIST_API void hidet_dist_cublas_product(int32_t dtype, int32_t as_tf32, int64_t batch, int64_t m, int64_t n,
                                              int64_t k, const void *a, int64_t batch_a, const void *b, int64_t batch_b,
                                              int32_t transposed, void *c);

/* Memory of the device for what is between the kernels of one launch, on the calling thread's handle: the next launch has
 * the same. Null where there is none. It grows when more is asked for than ever before, not else. */
HIDET_DIST_API void *hidet_dist_cublas_scratch(int64_t nbytes);

#ifdef __cplusplus
}
#endif

#endif
