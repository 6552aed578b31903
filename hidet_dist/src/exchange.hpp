// What is checked before ranks give data to one another, and how an exchange between them fails.
#pragma once

#include <cstdint>
#include <string>

#include "hidet_dist/collectives.h"

namespace hidet_dist {

// A failure that another rank caused, with what is to be said of it.
struct PeerFailure {
  std::string message;
};

// A failure that no other rank caused: data that must not be sent.
struct OwnFailure {
  std::string message;
};

// Other ranks are in another collective; the communicator has been told.
struct OutOfStep {};

// What this rank says of its collective; nothing outside of one.
hidet_dist_envelope own_envelope();

// Throws OutOfStep where rank `from` of the mesh is in another collective, before its data is taken.
void check_envelope(const hidet_dist_envelope &theirs, int64_t from);

// Throws OwnFailure where what this rank is about to let others read was made of a file that has been changed.
void check_files();

}  // namespace hidet_dist
