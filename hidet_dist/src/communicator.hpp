// One rank's end of a mesh: its transport, its first error, how many collectives it has started, and with whom.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "hidet_dist/collectives.h"
#include "mapped_file.hpp"
#include "overlap.hpp"

namespace hidet_dist {

// The ranks of a mesh, as one of them sees them.
struct Mesh {
  std::vector<int64_t> shape;
  int64_t rank = 0;  // of the one that sees it

  int64_t size() const;

  // The ranks of its group, in their order; none for a mask with an axis that the mesh does not have.
  std::vector<int64_t> group_ranks(int32_t group) const;

  // Their number, or -1.
  int64_t group_size(int32_t group) const;

  // Its place among them, or -1.
  int64_t group_place(int32_t group) const;
};

}  // namespace hidet_dist

struct hidet_dist_communicator {
 public:
  hidet_dist_communicator(const hidet_dist_transport &transport, std::vector<int64_t> mesh_shape, int64_t rank)
      : transport_(transport), mesh_{std::move(mesh_shape), rank} {}

  const hidet_dist_transport &transport() const { return transport_; }

  const hidet_dist::Mesh &mesh() const { return mesh_; }

  // Keeps the first message only: what fails after it is a consequence of it.
  void fail(const std::string &message);

  // The first message, or null.
  const char *error() const { return failed_.load(std::memory_order_acquire) ? error_.c_str() : nullptr; }

  // A collective begins, with all of the group, or with these two ranks only where there is no group.
  void begin(int32_t group, int64_t to, int64_t from);

  // The rank begins to wait for collectives with this group to end, that it began before.
  void await(int32_t group);

  // It went well. After a failure it stays, to tell whom this rank had to do with.
  void end() { under_way_.store(false, std::memory_order_release); }

  int64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  // The other ranks of the collective under way, or of the one that failed.
  std::vector<int64_t> peers() const;

  void rely_on(const hidet_dist_mapped_file *file) { files_.push_back(file); }

  // Why nothing may be sent: a file that it was made of was changed. Else an empty string. Asked for after the data to
  // send was read for the last time, and before anyone else can have it.
  std::string spoiled() const;

  // Of the thread that runs its collectives.
  hidet_dist::Overlap overlap;

 private:
  const hidet_dist_transport transport_;
  const hidet_dist::Mesh mesh_;
  std::atomic<int64_t> sequence_{0};
  std::atomic<bool> under_way_{false};
  mutable std::mutex mutex_;
  // Written once, before failed_ is set; read only after it.
  std::string error_;
  std::atomic<bool> failed_{false};
  std::vector<const hidet_dist_mapped_file *> files_;
  // Of the collective that began last.
  int32_t group_ = 0;
  int64_t to_ = HIDET_DIST_NOBODY;
  int64_t from_ = HIDET_DIST_NOBODY;
};

namespace hidet_dist {

// The calling thread's current communicator, or null.
hidet_dist_communicator *current();

// Sets what hidet_dist_last_error returns on this thread.
void set_last_error(std::string message);

}  // namespace hidet_dist
