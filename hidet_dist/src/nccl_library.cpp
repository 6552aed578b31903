#include "nccl_library.hpp"

#include <dlfcn.h>

#include <mutex>

#include "hidet_dist/nccl.h"

namespace hidet_dist::nccl {

namespace {

std::mutex mutex;
Library loaded{};
int loaded_version = 0;  // 0 until everything is loaded
std::string loaded_from;

class Loader {
 public:
  Loader(const std::string &path, std::string *problem) : path_(path), problem_(problem) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) *problem_ = dlerror();
  }

  template <typename Function>
  void find(const char *name, Function *function) {
    if (!problem_->empty()) return;
    void *symbol = dlsym(handle_, name);
    if (symbol == nullptr) *problem_ = path_ + " has no function " + name;
    *function = reinterpret_cast<Function>(symbol);
  }

 private:
  const std::string path_;
  std::string *const problem_;
  void *handle_;
};

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

int load(const std::string &nccl_path, const std::string &driver_path, std::string *problem) {
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string from = nccl_path + " and " + driver_path;
  if (loaded_version != 0) {
    if (from == loaded_from) return loaded_version;
    *problem = "this process has loaded " + loaded_from + " before: it cannot load " + from;
    return 0;
  }
  Library library{};
  Loader nccl(nccl_path, problem);
  nccl.find("ncclGetVersion", &library.get_version);
  int version = 0;
  if (problem->empty() && library.get_version(&version) != kSuccess)
    *problem = nccl_path + " does not tell its version";
  if (problem->empty() && version < HIDET_DIST_NCCL_OLDEST) {
    *problem = nccl_path + " is NCCL " + version_text(version) + ", but " + version_text(HIDET_DIST_NCCL_OLDEST) +
               " or later is needed";
  }
  nccl.find("ncclGetUniqueId", &library.get_unique_id);
  nccl.find("ncclCommInitRankConfig", &library.comm_init_rank_config);
  nccl.find("ncclCommSplit", &library.comm_split);
  nccl.find("ncclCommGetAsyncError", &library.comm_get_async_error);
  nccl.find("ncclCommAbort", &library.comm_abort);
  nccl.find("ncclCommFinalize", &library.comm_finalize);
  nccl.find("ncclCommDestroy", &library.comm_destroy);
  nccl.find("ncclAllReduce", &library.all_reduce);
  nccl.find("ncclAllGather", &library.all_gather);
  nccl.find("ncclReduceScatter", &library.reduce_scatter);
  nccl.find("ncclBroadcast", &library.broadcast);
  nccl.find("ncclReduce", &library.reduce);
  nccl.find("ncclSend", &library.send);
  nccl.find("ncclRecv", &library.recv);
  nccl.find("ncclGroupStart", &library.group_start);
  nccl.find("ncclGroupEnd", &library.group_end);
  nccl.find("ncclGetErrorString", &library.get_error_string);
  nccl.find("ncclGetLastError", &library.get_last_error);
  if (!problem->empty()) return 0;
  Loader driver(driver_path, problem);
  // The numbered names are the current ones of functions whose first ones took 32-bit addresses, or are out of date.
  driver.find("cuInit", &library.cu_init);
  driver.find("cuDeviceGetCount", &library.cu_device_get_count);
  driver.find("cuDeviceGet", &library.cu_device_get);
  driver.find("cuDeviceGetUuid_v2", &library.cu_device_get_uuid);
  driver.find("cuDevicePrimaryCtxRetain", &library.cu_device_primary_ctx_retain);
  driver.find("cuDevicePrimaryCtxRelease_v2", &library.cu_device_primary_ctx_release);
  driver.find("cuCtxSetCurrent", &library.cu_ctx_set_current);
  driver.find("cuStreamCreate", &library.cu_stream_create);
  driver.find("cuStreamDestroy_v2", &library.cu_stream_destroy);
  driver.find("cuStreamQuery", &library.cu_stream_query);
  driver.find("cuStreamIsCapturing", &library.cu_stream_is_capturing);
  driver.find("cuStreamWaitEvent", &library.cu_stream_wait_event);
  driver.find("cuEventCreate", &library.cu_event_create);
  driver.find("cuEventQuery", &library.cu_event_query);
  driver.find("cuEventRecord", &library.cu_event_record);
  driver.find("cuEventDestroy_v2", &library.cu_event_destroy);
  driver.find("cuMemcpyAsync", &library.cu_memcpy_async);
  driver.find("cuMemcpyDtoHAsync_v2", &library.cu_memcpy_dtoh_async);
  driver.find("cuMemAlloc_v2", &library.cu_mem_alloc);
  driver.find("cuMemFree_v2", &library.cu_mem_free);
  driver.find("cuGetErrorString", &library.cu_get_error_string);
  if (!problem->empty()) return 0;
  const int error = library.cu_init(0);
  if (error != 0) {
    const char *text = nullptr;
    library.cu_get_error_string(error, &text);
    *problem = driver_path + ": cuInit failed: " + (text == nullptr ? std::to_string(error) : text);
    return 0;
  }
  loaded = library;
  loaded_from = from;
  loaded_version = version;
  return version;
}

const Library *library() {
  const std::lock_guard<std::mutex> lock(mutex);
  return loaded_version == 0 ? nullptr : &loaded;
}

}  // namespace hidet_dist::nccl
