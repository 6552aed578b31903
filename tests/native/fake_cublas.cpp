// Stands in for cuBLAS where there is no GPU: exactly the functions that the native runtime uses. Products are computed by
// the stand-in for CUDA, in their turn on the stream, column by column as cuBLAS has them. What it refuses: a product
// before a stream and a workspace are set, sums that are not in float32, and as much as FAKE_CUBLAS_FAIL says:
// `create`, or `product`. FAKE_CUBLAS_VERSION is its version, and FAKE_CUBLAS_SECONDS what a product takes.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

extern "C" int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data);

namespace {

constexpr int kNotInitialized = 1, kInvalidValue = 7, kExecutionFailed = 13, kNotSupported = 15;
constexpr int kFloat32 = 0, kFloat16 = 2, kBfloat16 = 14;
constexpr int kInFloat32 = 68, kInFloat32FastTf32 = 77;

struct Handle {
  void *stream = nullptr;
  bool has_stream = false;
  void *workspace = nullptr;
  unsigned mode = 0;
};

struct Matrix {
  char *data;
  int type;
  int64_t stride;
  long long apart;
  bool transposed;

  size_t bytes() const { return type == kFloat32 ? 4 : 2; }
  char *at(int64_t row, int64_t column, int64_t number) const {
    const int64_t place = transposed ? row * stride + column : column * stride + row;
    return data + static_cast<size_t>(number * apart + place) * bytes();
  }
  float get(int64_t row, int64_t column, int64_t number) const {
    const char *from = at(row, column, number);
    if (type == kFloat16) return static_cast<float>(*reinterpret_cast<const _Float16 *>(from));
    if (type == kFloat32) return *reinterpret_cast<const float *>(from);
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    const uint32_t whole = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &whole, sizeof value);
    return value;
  }
  void set(int64_t row, int64_t column, int64_t number, float value) const {
    char *to = at(row, column, number);
    if (type == kFloat16) {
      *reinterpret_cast<_Float16 *>(to) = static_cast<_Float16>(value);
    } else if (type == kFloat32) {
      *reinterpret_cast<float *>(to) = value;
    } else {
      uint32_t whole;
      std::memcpy(&whole, &value, sizeof whole);
      const auto half = static_cast<uint16_t>((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
      std::memcpy(to, &half, sizeof half);
    }
  }
};

struct Product {
  int m, n, k, batch;
  Matrix a, b, c;
};

bool is_to_fail(const char *what) {
  const char *fail = std::getenv("FAKE_CUBLAS_FAIL");
  return fail != nullptr && std::strcmp(fail, what) == 0;
}

void compute(void *data) {
  const auto &[m, n, k, batch, a, b, c] = *static_cast<Product *>(data);  // kept: a graph runs it again
  if (const char *seconds = std::getenv("FAKE_CUBLAS_SECONDS"); seconds != nullptr) {
    std::this_thread::sleep_for(std::chrono::duration<double>(std::atof(seconds)));
  }
  for (int number = 0; number < batch; ++number) {
    for (int row = 0; row < m; ++row) {
      for (int column = 0; column < n; ++column) {
        float sum = 0;
        for (int inner = 0; inner < k; ++inner) sum += a.get(row, inner, number) * b.get(inner, column, number);
        c.set(row, column, number, sum);
      }
    }
  }
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int cublasGetProperty(int property, int *value) {
  const char *text = std::getenv("FAKE_CUBLAS_VERSION");
  const int version = text == nullptr ? 130100 : std::atoi(text);
  *value = property == 0 ? version / 10000 : property == 1 ? version / 100 % 100 : version % 100;
  return 0;
}

API int cublasCreate_v2(void **handle) {
  if (is_to_fail("create")) return kNotInitialized;
  *handle = new Handle;
  return 0;
}

API int cublasDestroy_v2(void *handle) {
  delete static_cast<Handle *>(handle);
  return 0;
}

API int cublasSetStream_v2(void *handle, void *stream) {
  auto *own = static_cast<Handle *>(handle);
  own->stream = stream;
  own->has_stream = true;
  own->workspace = nullptr;
  return 0;
}

API int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes) {
  static_cast<Handle *>(handle)->workspace = bytes > 0 ? workspace : nullptr;
  return 0;
}

API int cublasSetMathMode(void *handle, unsigned mode) {
  static_cast<Handle *>(handle)->mode = mode;
  return 0;
}

API int cublasGemmStridedBatchedEx(void *handle, int trans_a, int trans_b, int m, int n, int k, const void *alpha,
                                   const void *a, int a_type, int lda, long long stride_a, const void *b, int b_type,
                                   int ldb, long long stride_b, const void *beta, void *c, int c_type, int ldc,
                                   long long stride_c, int batch, int compute_type, int) {
  const auto *own = static_cast<const Handle *>(handle);
  if (is_to_fail("product")) return kExecutionFailed;
  if (!own->has_stream || own->workspace == nullptr) return kNotInitialized;
  const bool in_float32 = compute_type == kInFloat32 || (compute_type == kInFloat32FastTf32 && a_type == kFloat32);
  if (!in_float32 || (own->mode & 16u) == 0) return kNotSupported;
  for (const int type : {a_type, b_type, c_type}) {
    if (type != kFloat32 && type != kFloat16 && type != kBfloat16) return kNotSupported;
  }
  const bool fits = lda >= (trans_a != 0 ? k : m) && ldb >= (trans_b != 0 ? n : k) && ldc >= m;
  if (!fits || *static_cast<const float *>(alpha) != 1.0f || *static_cast<const float *>(beta) != 0.0f) {
    return kInvalidValue;
  }
  const auto matrix = [](const void *data, int type, int stride, long long apart, int transposed) {
    return Matrix{static_cast<char *>(const_cast<void *>(data)), type, stride, apart, transposed != 0};
  };
  auto *product = new Product{m,
                              n,
                              k,
                              batch,
                              matrix(a, a_type, lda, stride_a, trans_a),
                              matrix(b, b_type, ldb, stride_b, trans_b),
                              matrix(c, c_type, ldc, stride_c, 0)};
  return cuLaunchHostFunc(own->stream, compute, product);
}

API const char *cublasGetStatusString(int status) {
  return status == kNotInitialized    ? "the library was not initialized"
         : status == kExecutionFailed ? "the GPU program failed to execute"
         : status == kNotSupported    ? "the functionality is not supported"
                                      : "an unsupported value or parameter was passed to the function";
}
