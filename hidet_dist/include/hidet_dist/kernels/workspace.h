// Memory between the loops of hidet's kernels, in place of that of hidet's runtime. The runtime takes it from functions
// that importing hidet registers, but serving processes do not import hidet; and it gives all threads the same memory.
#ifndef HIDET_DIST_KERNELS_WORKSPACE_H
#define HIDET_DIST_KERNELS_WORKSPACE_H

#include <string.h>

#include "hidet_dist/kernels/runtime.h"
#include "hidet_dist/workspace.h"

inline void *hidet_dist_kernel_workspace(int64_t nbytes, bool require_clean) {
  void *memory = hidet_dist_workspace(nbytes);
  if (memory == nullptr) throw KernelError("there is no memory for a kernel's workspace");
  if (require_clean) memset(memory, 0, static_cast<size_t>(nbytes));
  return memory;
}

#define request_cpu_workspace hidet_dist_kernel_workspace

#endif
