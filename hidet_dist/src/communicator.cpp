#include "communicator.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "transport.hpp"

namespace {

thread_local hidet_dist_communicator *current_communicator = nullptr;
thread_local std::string last_error;

// The error in a mesh, or an empty string.
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

// Whether a table lacks a function that every transport has.
bool lacks_function(const hidet_dist_transport &table) {
#define HIDET_DIST_LACKS(name, reduces) table.name == nullptr ||
#define HIDET_DIST_LACKS_FORM(name) HIDET_DIST_LACKS(name, false)
  return HIDET_DIST_KINDS(HIDET_DIST_LACKS) HIDET_DIST_FORMS(HIDET_DIST_LACKS_FORM) table.send_recv == nullptr;
#undef HIDET_DIST_LACKS_FORM
#undef HIDET_DIST_LACKS
}

}  // namespace

namespace hidet_dist {

std::string in_words(const hidet_dist_envelope &envelope) {
  const auto name = [](auto &names, size_t number) { return number < std::size(names) ? names[number] : "an unknown"; };
#define HIDET_DIST_NAME(name, reduces) #name,
#define HIDET_DIST_REDUCES(name, reduces) reduces,
  static constexpr const char *kKinds[] = {HIDET_DIST_KINDS(HIDET_DIST_NAME)
                                               HIDET_DIST_KINDS_OF_ROWS(HIDET_DIST_NAME) "message"};
  static constexpr bool kReduces[] = {HIDET_DIST_KINDS(HIDET_DIST_REDUCES)
                                          HIDET_DIST_KINDS_OF_ROWS(HIDET_DIST_REDUCES) false};
#undef HIDET_DIST_REDUCES
#undef HIDET_DIST_NAME
  static constexpr const char *kTypes[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                           "int32",   "int64",   "uint8",   "bool"};
  static constexpr const char *kReduceOps[] = {"sum", "max", "min", "product", "mean"};
  std::string words = name(kKinds, envelope.kind);
  if (envelope.kind < std::size(kReduces) && kReduces[envelope.kind]) {
    words += std::string(" (") + name(kReduceOps, envelope.reduce_op) + ")";
  }
  if (envelope.kind == HIDET_DIST_BROADCAST) words += " from group rank " + std::to_string(envelope.root);
  if (envelope.kind == HIDET_DIST_GATHER_ROWS || envelope.kind == HIDET_DIST_REDUCE_SCATTER_ROWS) {
    words += " by the mask with checksum " + std::to_string(envelope.root);
  }
  return words + " of " + std::to_string(envelope.count) + " " + name(kTypes, envelope.dtype) + " of call " +
         std::to_string(envelope.call);
}

int64_t Mesh::size() const { return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()); }

int64_t Mesh::group_size(int32_t group) const {
  if (group < 0 || (group >> shape.size()) != 0) return -1;
  int64_t size = 1;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    if ((group >> axis) & 1) size *= shape[axis];
  }
  return size;
}

int64_t Mesh::group_rank(int32_t group) const {
  if (group_size(group) < 0) return -1;
  int64_t group_rank = 0;
  int64_t stride = 1;
  int64_t rest = rank;
  for (size_t axis = shape.size(); axis-- > 0;) {
    if ((group >> axis) & 1) {
      group_rank += rest % shape[axis] * stride;
      stride *= shape[axis];
    }
    rest /= shape[axis];
  }
  return group_rank;
}

std::vector<int64_t> Mesh::group_ranks(int32_t group) const {
  if (group_size(group) < 0) return {};
  std::vector<int64_t> ranks{0};
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const bool spanned = (group >> axis) & 1;
    const int64_t coordinate = rank / strides[axis] % shape[axis];
    std::vector<int64_t> longer;
    for (const int64_t first : ranks) {
      for (int64_t index = spanned ? 0 : coordinate; index < (spanned ? shape[axis] : coordinate + 1); ++index) {
        longer.push_back(first + index * strides[axis]);
      }
    }
    ranks = std::move(longer);
  }
  return ranks;
}

}  // namespace hidet_dist

void hidet_dist_communicator::begin(int32_t group, const hidet_dist_envelope &envelope) {
  envelope_ = expected_ = envelope;
  begin(group, HIDET_DIST_NOBODY, HIDET_DIST_NOBODY);
}

void hidet_dist_communicator::begin(int64_t to, const hidet_dist_envelope &sent, int64_t from,
                                    const hidet_dist_envelope &received) {
  envelope_ = sent;
  expected_ = received;
  begin(0, to, from);
}

void hidet_dist_communicator::begin(int32_t group, int64_t to, int64_t from) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    group_ = group;
    to_ = to;
    from_ = from;
  }
  under_way_.store(true, std::memory_order_release);
  sequence_.fetch_add(1, std::memory_order_relaxed);
}

void hidet_dist_communicator::await(int32_t group) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    group_ = group;
    to_ = from_ = HIDET_DIST_NOBODY;
  }
  under_way_.store(true, std::memory_order_release);
}

std::vector<int64_t> hidet_dist_communicator::peers() const {
  if (!under_way_.load(std::memory_order_acquire)) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int64_t> peers;
  for (const int64_t rank : mesh_.group_ranks(group_)) {
    if (rank != mesh_.rank) peers.push_back(rank);
  }
  for (const int64_t rank : {to_, from_}) {
    if (rank >= 0 && rank != mesh_.rank && (peers.empty() || peers.back() != rank)) peers.push_back(rank);
  }
  return peers;
}

std::string hidet_dist_communicator::spoiled() const {
  for (const hidet_dist_mapped_file *file : files_) {
    if (file->changed()) return file->name + " was changed while it was in use";
  }
  return "";
}

void hidet_dist_communicator::fail_out_of_step(int64_t other, const hidet_dist_envelope &theirs) {
  fail("the ranks are out of step: rank " + std::to_string(mesh_.rank) + " is in " + hidet_dist::in_words(expected_) +
           ", but rank " + std::to_string(other) + " in " + hidet_dist::in_words(theirs) +
           ". All ranks must make the same calls in the same order",
       other);
}

void hidet_dist_communicator::fail(const std::string &message) { fail(message, HIDET_DIST_NOBODY); }

void hidet_dist_communicator::fail(const std::string &message, int64_t out_of_step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return;
  error_ = message;
  out_of_step_ = out_of_step;
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
    if (lacks_function(table)) problem = "the transport lacks a function";
  } else if (problem.empty() && size != 1) {
    problem = "a mesh of " + std::to_string(size) + " devices needs a transport";
  }
  if (!problem.empty()) {
    hidet_dist::set_last_error(std::move(problem));
    return nullptr;
  }
  return new hidet_dist_communicator(table, std::vector<int64_t>(mesh_shape, mesh_shape + mesh_axes), rank);
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

void hidet_dist_communicator_begin_call(hidet_dist_communicator *communicator, int64_t call) {
  communicator->begin_call(call);
}

int32_t hidet_dist_current_envelope(hidet_dist_envelope *envelope) {
  if (current_communicator == nullptr) return HIDET_DIST_NO_COMMUNICATOR;
  *envelope = current_communicator->envelope();
  return HIDET_DIST_OK;
}

int32_t hidet_dist_check_envelope(const hidet_dist_envelope *theirs, int64_t from) {
  if (current_communicator == nullptr) return HIDET_DIST_NO_COMMUNICATOR;
  if (hidet_dist::equal(*theirs, current_communicator->expected())) return HIDET_DIST_OK;
  current_communicator->fail_out_of_step(from, *theirs);
  return HIDET_DIST_FAILED;
}

int64_t hidet_dist_communicator_out_of_step(const hidet_dist_communicator *communicator) {
  return communicator->out_of_step();
}

int64_t hidet_dist_communicator_sequence(const hidet_dist_communicator *communicator) {
  return communicator->sequence();
}

int64_t hidet_dist_communicator_group_size(const hidet_dist_communicator *communicator, int32_t group) {
  return communicator->mesh().group_size(group);
}

int64_t hidet_dist_communicator_peers(const hidet_dist_communicator *communicator, int64_t *ranks, int64_t capacity) {
  const std::vector<int64_t> peers = communicator->peers();
  const auto count = static_cast<int64_t>(peers.size());
  std::copy_n(peers.begin(), std::max<int64_t>(std::min(count, capacity), 0), ranks);
  return count;
}

int32_t hidet_dist_group_rank(int32_t group) {
  return current_communicator == nullptr ? -1 : static_cast<int32_t>(current_communicator->mesh().group_rank(group));
}

int32_t hidet_dist_group_size(int32_t group) {
  return current_communicator == nullptr ? -1 : static_cast<int32_t>(current_communicator->mesh().group_size(group));
}

const char *hidet_dist_last_error(void) { return last_error.c_str(); }

}  // extern "C"
