// The message of a solver that failed.
#pragma once

#include <string>

#include "hidet_dist/search/solvers.h"

namespace hidet_dist {

// Sets what hidet_dist_search_last_error returns on this thread.
void set_search_error(std::string message);

}  // namespace hidet_dist
