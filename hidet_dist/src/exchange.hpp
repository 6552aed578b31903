// The checks before ranks exchange data, and the errors of an exchange.
#pragma once

#include <cstdint>
#include <string>

#include "hidet_dist/collectives.h"

namespace hidet_dist {

// A failure that another rank caused.
struct PeerFailure {
  std::string message;
};

// A failure of this rank: its data must not be sent.
struct LocalFailure {
  std::string message;
};

// Another rank is in a different collective; the communicator has recorded it.
struct OutOfStep {};

// The envelope of this rank's current collective; zeros outside a collective.
hidet_dist_envelope own_envelope();

// Throws OutOfStep if rank `from` of the mesh is in a different collective. Must be called before its data is read.
void check_envelope(const hidet_dist_envelope &theirs, int64_t from);

// Throws LocalFailure where what this rank is about to let others read was made of a file that has been changed.
void check_files();

}  // namespace hidet_dist
