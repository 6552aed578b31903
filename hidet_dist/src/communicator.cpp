#include "communicator.hpp"

#include <limits>
#include <utility>

namespace {

thread_local hidet_dist_communicator *current_communicator = nullptr;
thread_local std::string last_error;

// What is wrong with the mesh, or an empty string.
std::string check_mesh(const int64_t *shape, int32_t axes, int64_t rank, int64_t *size) {
  if (axes < 0 || axes > HIDET_DIST_MAX_MESH_AXES || (axes > 0 && shape == nullptr)) {
    return "a mesh has 0 to " + std::to_string(HIDET_DIST_MAX_MESH_AXES) + " axes, not " + std::to_string(axes);
  }
  *size = 1;
  for (int32_t axis = 0; axis < axes; ++axis) {
    if (shape[axis] < 1 || shape[axis] > std::numeric_limits<int32_t>::max() / *size) {
      return "mesh axis " + std::to_string(axis) + " cannot have " + std::to_string(shape[axis]) + " devices";
    }
    *size *= shape[axis];
  }
  if (rank < 0 || rank >= *size) {
    return "rank " + std::to_string(rank) + " is not in a mesh of " + std::to_string(*size) + " devices";
  }
  return "";
}

}  // namespace

int64_t hidet_dist_communicator::group_size(int32_t group) const {
  if (group < 0 || (group >> mesh_shape_.size()) != 0) return -1;
  int64_t size = 1;
  for (size_t axis = 0; axis < mesh_shape_.size(); ++axis) {
    if ((group >> axis) & 1) size *= mesh_shape_[axis];
  }
  return size;
}

void hidet_dist_communicator::fail(const std::string &message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return;
  error_ = message;
  failed_.store(true, std::memory_order_release);
}

namespace hidet_dist {

hidet_dist_communicator *current() { return current_communicator; }

void set_last_error(std::string message) { last_error = std::move(message); }

}  // namespace hidet_dist

extern "C" {

int32_t hidet_dist_abi_version(void) { return HIDET_DIST_ABI_VERSION; }

hidet_dist_communicator *hidet_dist_communicator_create(const hidet_dist_transport *transport,
                                                        const int64_t *mesh_shape, int32_t mesh_axes, int64_t rank) {
  int64_t size = 0;
  std::string problem = check_mesh(mesh_shape, mesh_axes, rank, &size);
  hidet_dist_transport table{};
  if (problem.empty() && transport != nullptr) {
    table = *transport;
    if (table.all_reduce == nullptr || table.all_gather == nullptr || table.reduce_scatter == nullptr ||
        table.all_to_all == nullptr) {
      problem = "the transport lacks a function";
    }
  } else if (problem.empty() && size != 1) {
    problem = "a mesh of " + std::to_string(size) + " devices needs a transport";
  }
  if (!problem.empty()) {
    hidet_dist::set_last_error(std::move(problem));
    return nullptr;
  }
  return new hidet_dist_communicator(table, std::vector<int64_t>(mesh_shape, mesh_shape + mesh_axes));
}

void hidet_dist_communicator_destroy(hidet_dist_communicator *communicator) {
  if (communicator == current_communicator) current_communicator = nullptr;
  delete communicator;
}

void hidet_dist_bind(hidet_dist_communicator *communicator) { current_communicator = communicator; }

const char *hidet_dist_communicator_error(const hidet_dist_communicator *communicator) { return communicator->error(); }

void hidet_dist_fail(hidet_dist_communicator *communicator, const char *message) {
  communicator->fail(message == nullptr ? "unknown error" : message);
}

int64_t hidet_dist_communicator_sequence(const hidet_dist_communicator *communicator) {
  return communicator->sequence();
}

int64_t hidet_dist_communicator_group_size(const hidet_dist_communicator *communicator, int32_t group) {
  return communicator->group_size(group);
}

const char *hidet_dist_last_error(void) { return last_error.c_str(); }

}  // extern "C"
