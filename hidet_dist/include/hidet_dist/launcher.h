/*
 * The library that launches a whole graph: the part of it that is the same for all graphs.
 *
 * A generated source defines the tables of its graph first, and includes this header then:
 *
 * kInputs, kOutputs, kWeights, kLocals   counts of tensors; locals are buffers in the workspace
 * kSizes                                 count of distinct sizes of locals
 * size_of_local, memory_of_local         for each local the number of its size, and of the kind of memory it lies in
 * whole_of_part, start_of_part           for each part of a tensor the tensor, and the bytes of it before the part
 * placing                                for each local, in the order in which they are placed: its number; the count of
 *                                        locals that are live at the same time, in the same memory, and placed before
 *                                        it, and these. Ends with -1.
 * code                                   for each node in execution order: its kernel; the count of arguments, and the
 *                                        tensors that they are. Ends with -1.
 * void sizes(int64_t *bytes)             writes the distinct sizes, at the present values of symbolic dims
 * void call(kernel, arguments, count)    calls a kernel with `count` arguments
 *
 * Tensors are numbered: inputs, outputs, weights, locals; -1 - n is part n. Locals lie in the workspace: each at the
 * lowest offset where no local lies that is placed before it and live at the same time. Their places are computed again
 * only after a symbolic dim has changed.
 */
#ifndef HIDET_DIST_LAUNCHER_H
#define HIDET_DIST_LAUNCHER_H

#include <assert.h>
#include <hidet_dist/launch.h>
#include <hidet_dist/symbols.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int kMemories = 3; /* host, CUDA, HIP: the numbers of hidet's runtime */
constexpr int64_t kBufferAlignment = 128; /* bytes */
constexpr int kFirstWeight = kInputs + kOutputs;
constexpr int kFirstLocal = kFirstWeight + kWeights;

uint8_t *workspaces[kMemories];
void *addresses[kFirstLocal + kLocals];
int64_t offsets[kLocals + 1];
int64_t used[kMemories];
int64_t placed_for[kSizes + 1];
bool placed;

/* Skips a count and the numbers after it. */
inline const int32_t *after(const int32_t *counted) { return counted + 1 + *counted; }

/* Rounds bytes up to whole aligned units. */
inline int64_t aligned(int64_t nbytes) { return (nbytes + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment; }

/* Returns the lowest offset of `size` bytes that none of `count` placed locals overlap. */
int64_t lowest(int64_t size, const int32_t *others, int count, const int64_t *bytes) {
  int64_t offset = 0;
  for (bool moved = size != 0; moved;) {
    moved = false;
    for (int i = 0; i < count; ++i) {
      const int64_t begin = offsets[others[i]], end = begin + aligned(bytes[size_of_local[others[i]]]);
      if (begin < end && offset < end && begin < offset + size) {
        offset = end;
        moved = true;
      }
    }
  }
  return offset;
}

/* Computes the offset of each local in the workspace, and the bytes used of each kind of memory. */
void place() {
  int64_t bytes[kSizes + 1];
  sizes(bytes);
  if (placed && memcmp(bytes, placed_for, kSizes * sizeof(int64_t)) == 0) return;
  memset(used, 0, sizeof(used));
  for (const int32_t *at = placing; *at >= 0; at = after(at + 1)) {
    const int local = at[0], memory = memory_of_local[local];
    const int64_t size = aligned(bytes[size_of_local[local]]);
    offsets[local] = lowest(size, at + 2, at[1], bytes);
    if (offsets[local] + size > used[memory]) used[memory] = offsets[local] + size;
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
    at = after(tensors);
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
