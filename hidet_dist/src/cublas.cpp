// Products by cuBLAS, loaded at run time. See cublas.h. The declarations here are the used part of its documented
// interface (cuBLAS Library user's guide).
#include "hidet_dist/cublas.h"

#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <cstddef>
#include <mutex>
#include <string>
#include <utility>

#include "communicator.hpp"

namespace {

enum Operation : int { kAsItIs = 0, kTransposed = 1 };
enum DataType : int { kFloat32 = 0, kFloat16 = 2, kBfloat16 = 14 };
enum Property : int { kMajor = 0, kMinor = 1, kPatch = 2 };
enum ComputeType : int { kInFloat32 = 68, kInFloat32FastTf32 = 77 };
constexpr int kDefaultAlgorithm = -1;
constexpr unsigned kNoReducedPrecisionReduction = 16;  // CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION

using Handle = void *;

struct Library {
  int (*create)(Handle *);
  int (*destroy)(Handle);
  int (*get_property)(int, int *);
  int (*set_stream)(Handle, void *);
  int (*set_workspace)(Handle, void *, size_t);
  int (*set_math_mode)(Handle, unsigned);
  int (*gemm_strided_batched)(Handle, int, int, int, int, int, const void *, const void *, int, int, long long,
                              const void *, int, int, long long, const void *, void *, int, int, long long, int, int,
                              int);
  const char *(*get_status_string)(int);
};

std::mutex mutex;
Library loaded{};
bool is_loaded = false;
std::string loaded_from;

template <typename Function>
bool find(void *library, const std::string &path, const char *name, Function *function) {
  void *symbol = dlsym(library, name);
  if (symbol == nullptr) hidet_dist::set_last_error(path + " has no function " + name);
  *function = reinterpret_cast<Function>(symbol);
  return symbol != nullptr;
}

bool load(const std::string &path) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (is_loaded) {
    if (path == loaded_from) return true;
    hidet_dist::set_last_error("this process has loaded " + loaded_from + " before: it cannot load " + path);
    return false;
  }
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    hidet_dist::set_last_error(dlerror());
    return false;
  }
  Library functions{};
  if (!find(library, path, "cublasCreate_v2", &functions.create) ||
      !find(library, path, "cublasDestroy_v2", &functions.destroy) ||
      !find(library, path, "cublasGetProperty", &functions.get_property) ||
      !find(library, path, "cublasSetStream_v2", &functions.set_stream) ||
      !find(library, path, "cublasSetWorkspace_v2", &functions.set_workspace) ||
      !find(library, path, "cublasSetMathMode", &functions.set_math_mode) ||
      !find(library, path, "cublasGemmStridedBatchedEx", &functions.gemm_strided_batched) ||
      !find(library, path, "cublasGetStatusString", &functions.get_status_string)) {
    return false;
  }
  loaded = functions;
  loaded_from = path;
  is_loaded = true;
  return true;
}

const Library *library() {
  const std::lock_guard<std::mutex> lock(mutex);
  return is_loaded ? &loaded : nullptr;
}

thread_local hidet_dist_cublas *bound = nullptr;

}  // namespace

struct hidet_dist_cublas {
 public:
  hidet_dist_cublas(const Library &library, Handle handle, hidet_dist_cublas_stream stream,
                    hidet_dist_cublas_report report, hidet_dist_cublas_allocate allocate, void *workspace,
                    int64_t workspace_bytes)
      : library_(library),
        handle_(handle),
        stream_(stream),
        report_(report),
        allocate_(allocate),
        workspace_(workspace),
        workspace_bytes_(static_cast<size_t>(workspace_bytes)) {}
  hidet_dist_cublas(const hidet_dist_cublas &) = delete;
  hidet_dist_cublas &operator=(const hidet_dist_cublas &) = delete;
  ~hidet_dist_cublas() { library_.destroy(handle_); }

  void product(int32_t dtype, bool as_tf32, int64_t batch, int64_t m, int64_t n, int64_t k, const void *a,
               int64_t batch_a, const void *b, int64_t batch_b, bool transposed, void *c) {
    int type = kFloat32;
    switch (dtype) {
      case HIDET_DIST_F32:
        break;
      case HIDET_DIST_F16:
        type = kFloat16;
        break;
      case HIDET_DIST_BF16:
        type = kBfloat16;
        break;
      default:
        report_("cuBLAS is given a product of a dtype that is not float32, float16 or bfloat16");
        return;
    }
    for (const int64_t extent : {batch, m, n, k}) {
      if (extent < 1 || extent > INT_MAX) {
        report_(("cuBLAS does not take a product of the extent " + std::to_string(extent)).c_str());
        return;
      }
    }
    if (!use_stream()) return;
    // cuBLAS is column-major: it computes the transpose of c, which is the product of the transposes of b and a.
    const float one = 1.0f, zero = 0.0f;
    const int rows = static_cast<int>(m), columns = static_cast<int>(n), depth = static_cast<int>(k);
    const int compute = type == kFloat32 && as_tf32 ? kInFloat32FastTf32 : kInFloat32;
    check(
        "cublasGemmStridedBatchedEx",
        library_.gemm_strided_batched(handle_, transposed ? kTransposed : kAsItIs, kAsItIs, columns, rows, depth, &one,
                                      b, type, transposed ? depth : columns, batch_b, a, type, depth, batch_a, &zero, c,
                                      type, columns, m * n, static_cast<int>(batch), compute, kDefaultAlgorithm));
  }

  // The earlier memory stays allocated, because graphs have its address.
  void *scratch(int64_t nbytes) {
    if (nbytes > scratch_bytes_) {
      const int64_t wanted = std::max(nbytes, 2 * scratch_bytes_);
      void *memory = allocate_(wanted);
      if (memory == nullptr) return nullptr;
      scratch_ = memory;
      scratch_bytes_ = wanted;
    }
    return scratch_;
  }

 private:
  // Setting a handle's stream resets its workspace.
  bool use_stream() {
    void *stream = stream_();
    if (has_stream_ && stream == last_stream_) return true;
    has_stream_ = check("cublasSetStream", library_.set_stream(handle_, stream)) &&
                  check("cublasSetWorkspace", library_.set_workspace(handle_, workspace_, workspace_bytes_));
    last_stream_ = stream;
    return has_stream_;
  }

  bool check(const char *what, int status) {
    if (status == 0) return true;
    report_((std::string(what) + " failed: " + library_.get_status_string(status)).c_str());
    return false;
  }

  const Library &library_;
  const Handle handle_;
  const hidet_dist_cublas_stream stream_;
  const hidet_dist_cublas_report report_;
  const hidet_dist_cublas_allocate allocate_;
  void *const workspace_;
  const size_t workspace_bytes_;
  bool has_stream_ = false;
  void *last_stream_ = nullptr;
  void *scratch_ = nullptr;
  int64_t scratch_bytes_ = 0;
};

int32_t hidet_dist_cublas_load(const char *path) {
  if (path == nullptr || !load(path)) return 0;
  int version = 0;
  for (const auto &[property, weight] : {std::pair(kMajor, 10000), std::pair(kMinor, 100), std::pair(kPatch, 1)}) {
    int value = 0;
    if (library()->get_property(property, &value) != 0) {
      hidet_dist::set_last_error(std::string(path) + " does not tell its version");
      return 0;
    }
    version += value * weight;
  }
  if (version < HIDET_DIST_CUBLAS_OLDEST) {
    hidet_dist::set_last_error(std::string(path) + " is too old: its version is " + std::to_string(version) + ", not " +
                               std::to_string(HIDET_DIST_CUBLAS_OLDEST) + " or later");
    return 0;
  }
  return version;
}

hidet_dist_cublas *hidet_dist_cublas_create(hidet_dist_cublas_stream stream, hidet_dist_cublas_report report,
                                            hidet_dist_cublas_allocate allocate, void *workspace,
                                            int64_t workspace_bytes) {
  const Library *cublas = library();
  const bool lacks_functions = stream == nullptr || report == nullptr || allocate == nullptr;
  if (cublas == nullptr || lacks_functions || workspace == nullptr || workspace_bytes < 1) {
    hidet_dist::set_last_error(cublas == nullptr ? "cuBLAS is not loaded"
                                                 : "a handle of cuBLAS needs its functions and a workspace");
    return nullptr;
  }
  Handle handle = nullptr;
  int status = cublas->create(&handle);
  if (status == 0) {
    status = cublas->set_math_mode(handle, kNoReducedPrecisionReduction);
    if (status == 0) {
      return new hidet_dist_cublas(*cublas, handle, stream, report, allocate, workspace, workspace_bytes);
    }
    cublas->destroy(handle);
  }
  hidet_dist::set_last_error(std::string("cublasCreate failed: ") + cublas->get_status_string(status));
  return nullptr;
}

void *hidet_dist_cublas_scratch(int64_t nbytes) { return bound == nullptr ? nullptr : bound->scratch(nbytes); }

void hidet_dist_cublas_destroy(hidet_dist_cublas *handle) { delete handle; }

void hidet_dist_cublas_bind(hidet_dist_cublas *handle) { bound = handle; }

void hidet_dist_cublas_product(int32_t dtype, int32_t as_tf32, int64_t batch, int64_t m, int64_t n, int64_t k,
                               const void *a, int64_t batch_a, const void *b, int64_t batch_b, int32_t transposed,
                               void *c) {
  if (bound != nullptr) {
    bound->product(dtype, as_tf32 != 0, batch, m, n, k, a, batch_a, b, batch_b, transposed != 0, c);
  } else if (hidet_dist_communicator *communicator = hidet_dist::current(); communicator != nullptr) {
    communicator->fail("a kernel calls cuBLAS, which this thread has no handle of");
  }
}
