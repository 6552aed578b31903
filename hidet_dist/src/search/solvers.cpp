#include "solvers.hpp"

#include <utility>

namespace {

thread_local std::string last_error;

}

namespace hidet_dist {

void set_search_error(std::string message) { last_error = std::move(message); }

}  // namespace hidet_dist

int32_t hidet_dist_search_abi_version(void) { return HIDET_DIST_SEARCH_ABI_VERSION; }

const char *hidet_dist_search_last_error(void) { return last_error.c_str(); }
