// Memory for intermediate values of CPU kernels. See workspace.h.
#include "hidet_dist/workspace.h"

#include <cstdlib>
#include <memory>

namespace {

constexpr std::size_t kAlignment = 64;

struct Freed {
  void operator()(void *memory) const { std::free(memory); }
};

thread_local std::unique_ptr<void, Freed> memory;
thread_local std::size_t allocated = 0;

} // namespace

extern "C" void *hidet_dist_workspace(int64_t nbytes) {
  if (nbytes < 0) return nullptr;
  const auto wanted = static_cast<std::size_t>(nbytes);
  if (wanted > SIZE_MAX - kAlignment) return nullptr;
  if (memory == nullptr || wanted > allocated) {
    memory.reset(); // before the new memory is asked for: a thread never holds both
    allocated = 0;
    const std::size_t rounded = (wanted / kAlignment + 1) * kAlignment;
    memory.reset(std::aligned_alloc(kAlignment, rounded));
    if (memory != nullptr) allocated = rounded;
  }
  return memory.get();
}
