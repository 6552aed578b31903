// The state of a communicator: its transport, its first error, and the number and peers of its collectives.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "hidet_dist/collectives.h"
#include "mapped_file.hpp"
#include "overlap.hpp"

namespace hidet_dist {

static_assert(sizeof(hidet_dist_envelope) == 24, "envelopes are compared as bytes, so they must not have padding");

inline bool equal(const hidet_dist_envelope &a, const hidet_dist_envelope &b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// An envelope as text, for errors.
std::string in_words(const hidet_dist_envelope &envelope);

// The ranks of a mesh, and one of them.
struct Mesh {
  std::vector<int64_t> shape;
  int64_t rank = 0;  // this rank

  int64_t size() const;

  // The ranks of the rank's group, by group rank; none for a mask with an axis that the mesh does not have.
  std::vector<int64_t> group_ranks(int32_t group) const;

  // The number of ranks in the group, or -1.
  int64_t group_size(int32_t group) const;

  // The rank's group rank, or -1.
  int64_t group_rank(int32_t group) const;
};

}  // namespace hidet_dist

struct hidet_dist_communicator {
 public:
  hidet_dist_communicator(const hidet_dist_transport &transport, std::vector<int64_t> mesh_shape, int64_t rank)
      : transport_(transport), mesh_{std::move(mesh_shape), rank} {}

  const hidet_dist_transport &transport() const { return transport_; }

  const hidet_dist::Mesh &mesh() const { return mesh_; }

  // Records the first message only: later failures are consequences of it.
  void fail(const std::string &message);

  // The first message, or null.
  const char *error() const { return failed_.load(std::memory_order_acquire) ? error_.c_str() : nullptr; }

  // Begins a collective of the group.
  void begin(int32_t group, const hidet_dist_envelope &envelope);

  // Begins a message to and from these ranks of the mesh or nobody, with the envelopes of the sent and received data.
  void begin(int64_t to, const hidet_dist_envelope &sent, int64_t from, const hidet_dist_envelope &received);

  // Begins a wait for earlier collectives of this group.
  void await(int32_t group);

  // Ends a collective, message or wait that succeeded. A failed one stays, to tell its peers.
  void end() { under_way_.store(false, std::memory_order_release); }

  // Sets the number of the program's call that further collectives belong to.
  void begin_call(int64_t call) { call_ = call; }
  int64_t call() const { return call_; }

  // The envelopes of the current collective, and of the received data. They differ only for messages.
  const hidet_dist_envelope &envelope() const { return envelope_; }
  const hidet_dist_envelope &expected() const { return expected_; }

  // The rank in the mesh of a group rank, in the group of the current collective.
  int64_t mesh_rank(int64_t group_rank) const { return mesh_.group_ranks(group_)[static_cast<size_t>(group_rank)]; }

  // Fails because another rank is in a different collective. Both are to blame.
  void fail_out_of_step(int64_t other, const hidet_dist_envelope &theirs);
  int64_t out_of_step() const { return error() == nullptr ? HIDET_DIST_NOBODY : out_of_step_; }

  int64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  // The other ranks of the current or failed collective.
  std::vector<int64_t> peers() const;

  void rely_on(const hidet_dist_mapped_file *file) { files_.push_back(file); }

  // The reason why no data may be sent, because a file on which it depends was changed; otherwise an empty string. Must
  // be called after the data to send was read for the last time, and before another rank can read it.
  std::string spoiled() const;

  // Used only by the thread that runs its collectives.
  hidet_dist::Overlap overlap;

 private:
  void begin(int32_t group, int64_t to, int64_t from);
  void fail(const std::string &message, int64_t out_of_step);

  const hidet_dist_transport transport_;
  const hidet_dist::Mesh mesh_;
  std::atomic<int64_t> sequence_{0};
  std::atomic<bool> under_way_{false};
  mutable std::mutex mutex_;
  // Written once, before failed_ is set; read only after it.
  std::string error_;
  int64_t out_of_step_ = HIDET_DIST_NOBODY;
  std::atomic<bool> failed_{false};
  std::vector<const hidet_dist_mapped_file *> files_;
  // Used only by the thread that runs collectives.
  int64_t call_ = 0;
  hidet_dist_envelope envelope_{};
  hidet_dist_envelope expected_{};
  // The state of the last collective.
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
