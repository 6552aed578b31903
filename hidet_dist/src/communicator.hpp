// One rank's end of a mesh: its transport, its first error, and how many collectives it has started.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "hidet_dist/collectives.h"

struct hidet_dist_communicator {
 public:
  hidet_dist_communicator(const hidet_dist_transport &transport, std::vector<int64_t> mesh_shape)
      : transport_(transport), mesh_shape_(std::move(mesh_shape)) {}

  const hidet_dist_transport &transport() const { return transport_; }

  // The number of ranks in a group, or -1 for a mask with an axis that the mesh does not have.
  int64_t group_size(int32_t group) const;

  // Keeps the first message only: what fails after it is a consequence of it.
  void fail(const std::string &message);

  // The first message, or null.
  const char *error() const { return failed_.load(std::memory_order_acquire) ? error_.c_str() : nullptr; }

  void start_collective() { sequence_.fetch_add(1, std::memory_order_relaxed); }

  int64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

 private:
  const hidet_dist_transport transport_;
  const std::vector<int64_t> mesh_shape_;
  std::atomic<int64_t> sequence_{0};
  std::mutex mutex_;
  // Written once, before failed_ is set; read only after it.
  std::string error_;
  std::atomic<bool> failed_{false};
};

namespace hidet_dist {

// The calling thread's current communicator, or null.
hidet_dist_communicator *current();

// Sets what hidet_dist_last_error returns on this thread.
void set_last_error(std::string message);

}  // namespace hidet_dist
