// Starting collectives and waiting for them. See overlap.h.
#include "hidet_dist/overlap.h"

#include <string>

#include "communicator.hpp"

namespace {

int32_t fail(hidet_dist_communicator &communicator, const std::string &message, int32_t status) {
  communicator.fail(message);
  hidet_dist::set_last_error(communicator.error());
  return status;
}

// The current communicator, or null after setting `status`.
hidet_dist_communicator *ready(const char *what, int32_t *status) {
  hidet_dist_communicator *communicator = hidet_dist::current();
  if (communicator == nullptr) {
    hidet_dist::set_last_error(std::string(what) + ": this thread has no current communicator");
    *status = HIDET_DIST_NO_COMMUNICATOR;
    return nullptr;
  }
  if (const char *error = communicator->error()) {
    hidet_dist::set_last_error(error);
    *status = HIDET_DIST_FAILED;
    return nullptr;
  }
  return communicator;
}

int32_t checked(hidet_dist_communicator &communicator, const char *what, int32_t status) {
  if (status == HIDET_DIST_OK) return status;
  return fail(communicator, std::string(what) + ": failed with status " + std::to_string(status), HIDET_DIST_FAILED);
}

}  // namespace

extern "C" {

int32_t hidet_dist_start(const void *) {
  int32_t status = HIDET_DIST_OK;
  hidet_dist_communicator *communicator = ready("start", &status);
  if (communicator == nullptr) return status;
  hidet_dist::Overlap &overlap = communicator->overlap;
  return overlap.present ? checked(*communicator, "start", overlap.table.fork(overlap.table.context)) : HIDET_DIST_OK;
}

int32_t hidet_dist_started(const void *recv) {
  int32_t status = HIDET_DIST_OK;
  hidet_dist_communicator *communicator = ready("started", &status);
  if (communicator == nullptr) return status;
  hidet_dist::Overlap &overlap = communicator->overlap;
  const int64_t ticket = ++overlap.started;
  overlap.tickets[recv] = ticket;
  if (!overlap.present) return HIDET_DIST_OK;
  return checked(*communicator, "started", overlap.table.mark(overlap.table.context, ticket));
}

int32_t hidet_dist_wait(const void *recv) {
  int32_t status = HIDET_DIST_OK;
  hidet_dist_communicator *communicator = ready("wait", &status);
  if (communicator == nullptr) return status;
  hidet_dist::Overlap &overlap = communicator->overlap;
  const auto entry = overlap.tickets.find(recv);
  if (entry == overlap.tickets.end()) {
    return fail(*communicator, "wait: no collective was started that receives there", HIDET_DIST_INVALID_ARGUMENT);
  }
  const int64_t ticket = entry->second;
  overlap.tickets.erase(entry);
  ++overlap.waited;
  if (ticket <= overlap.passed) return HIDET_DIST_OK;
  overlap.passed = ticket;
  return overlap.present ? checked(*communicator, "wait", overlap.table.wait(overlap.table.context, ticket))
                         : HIDET_DIST_OK;
}

void hidet_dist_communicator_set_overlap(hidet_dist_communicator *communicator, const hidet_dist_overlap *overlap) {
  communicator->overlap.present = overlap != nullptr;
  if (overlap != nullptr) communicator->overlap.table = *overlap;
}

int64_t hidet_dist_communicator_started(const hidet_dist_communicator *communicator) {
  return communicator->overlap.started;
}

int64_t hidet_dist_communicator_waited(const hidet_dist_communicator *communicator) {
  return communicator->overlap.waited;
}

}  // extern "C"
