#include "transport.hpp"

#include <algorithm>

#include "communicator.hpp"

namespace {

using hidet_dist::DeviceTransport;
using hidet_dist::HostTransport;
using hidet_dist::Transport;

// Wraps a member function as a C function whose context is the transport.
template <auto Method, class Type = decltype(Method)>
struct Entry;

template <auto Method, class Class, class... Arguments>
struct Entry<Method, int32_t (Class::*)(Arguments...)> {
  static int32_t call(void *context, Arguments... arguments) {
    return (static_cast<Class *>(static_cast<Transport *>(context))->*Method)(arguments...);
  }
};

template <auto Method>
constexpr auto kEntry = &Entry<Method>::call;

}  // namespace

namespace hidet_dist {

std::chrono::nanoseconds from_seconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e9)));
}

std::string in_seconds(std::chrono::nanoseconds time) {
  std::string text = std::to_string(std::chrono::duration<double>(time).count());
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

bool failed_meanwhile() {
  const auto *communicator = current();
  return communicator != nullptr && communicator->error() != nullptr;
}

hidet_dist_transport Transport::table() {
  hidet_dist_transport table{};
  table.context = this;
  table.send_recv = kEntry<&Transport::send_recv>;
#define HIDET_DIST_SET(name, reduces) table.name = kEntry<&Transport::name>;
#define HIDET_DIST_SET_FORM(name) HIDET_DIST_SET(name, false)
  HIDET_DIST_KINDS(HIDET_DIST_SET)
  HIDET_DIST_FORMS(HIDET_DIST_SET_FORM)
#undef HIDET_DIST_SET_FORM
#undef HIDET_DIST_SET
  return table;
}

hidet_dist_transport HostTransport::table() {
  hidet_dist_transport table = Transport::table();
  table.all_gather_blocks = kEntry<&HostTransport::all_gather_blocks>;
  table.reduce_scatter_blocks = kEntry<&HostTransport::reduce_scatter_blocks>;
  table.all_to_all_blocks = kEntry<&HostTransport::all_to_all_blocks>;
  table.gather_rows = kEntry<&HostTransport::gather_rows>;
  table.reduce_scatter_rows = kEntry<&HostTransport::reduce_scatter_rows>;
  return table;
}

hidet_dist_transport DeviceTransport::table() {
  hidet_dist_transport table = Transport::table();
  table.copy = kEntry<&DeviceTransport::copy>;
  table.read = kEntry<&DeviceTransport::read>;
  return table;
}

}  // namespace hidet_dist
