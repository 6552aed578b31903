#include "exchange.hpp"

#include <utility>

#include "communicator.hpp"

namespace hidet_dist {

hidet_dist_envelope own_envelope() {
  hidet_dist_envelope envelope{};
  static_cast<void>(hidet_dist_current_envelope(&envelope));
  return envelope;
}

void check_envelope(const hidet_dist_envelope &theirs, int64_t from) {
  if (hidet_dist_check_envelope(&theirs, from) == HIDET_DIST_FAILED) throw OutOfStep{};
}

void check_files() {
  const auto *communicator = current();
  if (communicator == nullptr) return;
  if (std::string problem = communicator->spoiled(); !problem.empty()) throw LocalFailure{std::move(problem)};
}

}  // namespace hidet_dist
