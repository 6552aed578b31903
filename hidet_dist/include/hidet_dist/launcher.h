/*
 * The library that launches a whole graph: the part of it that is the same for all graphs.
 *
 * A generated source defines the tables of its graph first, and includes this header then:
 *
 * kInputs, kOutputs, kWeights, kLocals   counts of tensors; locals are buffers in the workspace
 * kSizes                                 count of distinct sizes of locals
 * size_of_local, memory_of_local         for each local the number of its size, and of the kind of memory it lies in
 * whole_of_part, start_of_part           for each part of a tensor the tensor, and the bytes of it before the part
 * code                                   for each node in execution order: its kernel; the count of arguments, and the
 *                                        tensors that they are; the count of locals to allocate before it, and these;
 *                                        the count of locals to free after it, and these. Ends with -1.
 * void sizes(int64_t *bytes)             writes the distinct sizes, at the present values of symbolic dims
 * void call(kernel, arguments, count)    calls a kernel with `count` arguments
 *
 * Tensors are numbered: inputs, outputs, weights, locals; -1 - n is part n. Locals lie in the workspace
 * (hidet_dist/placement.h). Their places are computed again only after a symbolic dim has changed.
 */
#ifndef HIDET_DIST_LAUNCHER_H
#define HIDET_DIST_LAUNCHER_H

#include <assert.h>
#include <hidet_dist/launch.h>
#include <hidet_dist/placement.h>
#include <hidet_dist/symbols.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int kMemories = 3; /* host, CUDA, HIP: the numbers of hidet's runtime */
constexpr int kFirstWeight = kInputs + kOutputs;
constexpr int kFirstLocal = kFirstWeight + kWeights;

uint8_t *workspaces[kMemories];
void *addresses[kFirstLocal + kLocals];
int64_t offsets[kLocals + 1];
Placement<kLocals> placements[kMemories];
int64_t used[kMemories];
int64_t placed_for[kSizes + 1];
bool placed;

/* Skips a count and the numbers after it. */
inline const int32_t *after(const int32_t *counted) { return counted + 1 + *counted; }

/* Computes the offset of each local in the workspace, and the bytes used of each kind of memory. */
void place() {
  int64_t bytes[kSizes + 1];
  sizes(bytes);
  if (placed && memcmp(bytes, placed_for, kSizes * sizeof(int64_t)) == 0) return;
  for (int memory = 0; memory < kMemories; ++memory) {
    placements[memory].clear();
    used[memory] = 0;
  }
  for (const int32_t *at = code; *at >= 0;) {
    const int32_t *allocated = after(at + 1), *freed = after(allocated);
    for (int i = 1; i <= *allocated; ++i) {
      const int local = allocated[i];
      offsets[local] = placements[memory_of_local[local]].place(bytes[size_of_local[local]]);
    }
    for (int memory = 0; memory < kMemories; ++memory) {
      const int64_t now = placements[memory].used();
      if (now > used[memory]) used[memory] = now;
    }
    for (int i = 1; i <= *freed; ++i) {
      const int local = freed[i];
      placements[memory_of_local[local]].free(offsets[local], bytes[size_of_local[local]]);
    }
    at = after(freed);
  }
  memcpy(placed_for, bytes, kSizes * sizeof(int64_t));
  placed = true;
}

/* Runs all kernels; the addresses of inputs and outputs are set. */
void run(void **kernels) {
  place();
  for (int local = 0; local < kLocals; ++local) {
    addresses[kFirstLocal + local] = workspaces[memory_of_local[local]] + offsets[local];
  }
  void *arguments[kMostArguments + 1];
  int64_t mark = 0;
  for (const int32_t *at = code; *at >= 0;) {
    const int32_t *tensors = at + 1;
    for (int i = 0; i < *tensors; ++i) {
      const int tensor = tensors[i + 1], part = -1 - tensor;
      arguments[i] = tensor >= 0 ? addresses[tensor]
                                 : static_cast<uint8_t *>(addresses[whole_of_part[part]]) + start_of_part[part];
    }
    hidet_dist_mark(mark++);
    call(kernels[*at], arguments, *tensors);
    hidet_dist_mark(mark++);
    at = after(after(after(tensors)));
  }
}

}  // namespace

/* Takes the addresses of the weights. */
DLL void hidet_init(int32_t count, void **weights) {
  assert(count == kWeights);
  memcpy(addresses + kFirstWeight, weights, count * sizeof(void *));
}

/* Writes the bytes of workspace of each kind of memory, three numbers. */
DLL void hidet_get_workspace_size(int64_t *bytes) {
  place();
  memcpy(bytes, used, sizeof(used));
}

/* Takes the address of the workspace of one kind of memory. */
DLL void hidet_set_workspace(int32_t memory, void *address) {
  assert(0 <= memory && memory < kMemories);
  workspaces[memory] = static_cast<uint8_t *>(address);
}

#endif
