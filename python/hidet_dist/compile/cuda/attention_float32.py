"""The kernel of attention in float32, without tensor cores, which would round its operands.

The queries of a block are split into eight groups, each computed by 16 threads. They go through keys and values tile by
tile, as the kernel for half precision does. The exponentials of the scores are in shared memory, since each thread
needs those of the others, too.
"""

from collections.abc import Callable, Sequence
from typing import Any, no_type_check

import hidet
from hidet.ir import primitives
from hidet.ir.dtypes import float32
from hidet.ir.module import IRModule
from hidet.lang import attrs, grid, register_tensor, spatial, tensor_pointer
from hidet.lang.cuda import (
    blockIdx,
    cp_async_wait_all,
    dynamic_shared_memory,
    shfl_xor_sync,
    syncthreads,
    threadIdx,
)
from hidet.utils import prod

from hidet_dist.compile.cuda.inlined import script_part
from hidet_dist.compile.cuda.occupancy import parts_of_block
from hidet_dist.compile.cuda.tiles import Place, Tiles

_THREADS = 128
_SIDE = 16  # threads of a group of queries
_GROUPS = _THREADS // _SIDE
_MOST_OF_A_GROUP = 4  # queries, at most
_LEAST_OF_A_GROUP = 2  # queries, at least: with fewer, loading tiles takes longer than computing
_KEYS = 64  # keys in shared memory at a time
_PER_THREAD = _KEYS // _SIDE  # scores of a query
_VECTOR = 4  # elements in 16 bytes


def float32_kernel(
    shapes: Sequence[list[int]], scale: float, copied: bool, place: Place, bias_place: Callable[..., list[Any]]
) -> IRModule:
    """Build the kernel for q, k, v and bias of these shapes.

    ``place`` computes the indices of an element from a tensor's outer dims, a head, a row and a column. ``bias_place``
    computes those of the bias, from the same arguments without the first.
    """
    q_shape, k_shape, v_shape, bias_shape = shapes
    *outer, queries, size = q_shape
    keys, k_outer, v_outer = k_shape[-2], k_shape[:-2], v_shape[:-2]

    multiprocessors = hidet.cuda.properties().multiProcessorCount
    group_queries = parts_of_block(_MOST_OF_A_GROUP, _LEAST_OF_A_GROUP, _GROUPS, queries, prod(outer), multiprocessors)
    rows = group_queries * _GROUPS
    blocks = -(-queries // rows)  # blocks per head
    tile_count, columns = -(-keys // _KEYS), size // _SIDE
    padded, padded_keys = size + _VECTOR, _KEYS + _VECTOR  # rows that are read together are in different banks
    q_bytes, tile_bytes, powers_bytes = (4 * n for n in (rows * padded, _KEYS * padded, rows * padded_keys))
    tiles, products = Tiles(float32, size, _THREADS, place), _VectorProducts(group_queries, size)

    with hidet.script_module() as module:

        @no_type_check
        @hidet.script
        def attention(
            q: float32[q_shape],
            k: float32[k_shape],
            v: float32[v_shape],
            bias: float32[bias_shape],
            o: float32[q_shape],
        ):
            attrs.func_kind = "cuda_kernel"
            attrs.cuda.block_dim = _THREADS
            attrs.cuda.grid_dim = blocks * prod(outer)
            attrs.cuda.dynamic_smem_bytes = q_bytes + tile_bytes + powers_bytes
            q_tile = tensor_pointer("float32", shape=[rows, padded], init=dynamic_shared_memory(0, float32))
            # The tile of keys, then that of values.
            kv_tile = tensor_pointer("float32", shape=[_KEYS, padded], init=dynamic_shared_memory(q_bytes, float32))
            powers = tensor_pointer(
                "float32", shape=[rows, padded_keys], init=dynamic_shared_memory(q_bytes + tile_bytes, float32)
            )
            head = spatial(*outer).map(blockIdx.x // blocks)
            first = blockIdx.x % blocks * rows
            group = threadIdx.x // _SIDE
            side = threadIdx.x % _SIDE

            if copied:
                tiles.copy(q_tile, q, outer, head, first, rows, queries)
            else:
                tiles.load(q_tile, q, outer, head, first, rows, queries)

            most = register_tensor("float32", shape=[group_queries])
            total = register_tensor("float32", shape=[group_queries])
            mixed = register_tensor("float32", shape=[group_queries, columns])
            scores = register_tensor("float32", shape=[group_queries, _PER_THREAD])
            added = register_tensor("float32", shape=[group_queries, _PER_THREAD])
            for i in grid(group_queries, "u+"):
                most[i] = float32.min_value
                total[i] = float32.zero
                for n in grid(columns, "u+"):
                    mixed[i, n] = float32.zero

            for tile in range(tile_count):
                tiles.copy(kv_tile, k, k_outer, head, tile * _KEYS, _KEYS, keys)
                for i, j in grid(group_queries, _PER_THREAD, "u+u+"):
                    row = first + group * group_queries + i
                    column = tile * _KEYS + j * _SIDE + side
                    scores[i, j] = float32.zero
                    if row < queries and column < keys:
                        added[i, j] = bias[bias_place(head, row, column)]
                cp_async_wait_all()
                syncthreads()
                products.by_keys(scores, q_tile, kv_tile, group, side)
                syncthreads()
                tiles.copy(kv_tile, v, v_outer, head, tile * _KEYS, _KEYS, keys)
                products.take_powers(
                    scores, added, powers, most, total, mixed, scale, first, tile * _KEYS, queries, keys, group, side
                )
                cp_async_wait_all()
                syncthreads()
                products.by_values(mixed, powers, kv_tile, group, side)
                syncthreads()

            for i in grid(group_queries, "u+"):
                row = first + group * group_queries + i
                if row < queries:
                    for n in grid(columns, "u+"):
                        o.write(place(outer, head, row, side * columns + n), mixed[i, n] / total[i])

    return module.ir_module()


class _VectorProducts:
    """The products of a group of queries, and what is between them; ``group`` and ``side`` are a thread's numbers."""

    def __init__(self, queries: int, size: int):
        self.queries, self.columns, self.steps = queries, size // _SIDE, size // _VECTOR

    @no_type_check
    @script_part
    def by_keys(self, scores, q_tile, kv_tile, group, side):
        """Add the products of queries and a tile of keys to scores."""
        left = register_tensor("float32", shape=[self.queries, _VECTOR])
        right = register_tensor("float32", shape=[_PER_THREAD, _VECTOR])
        for step in range(self.steps):
            for i, e in grid(self.queries, _VECTOR, "u+u+"):
                left[i, e] = q_tile[group * self.queries + i, step * _VECTOR + e]
            for j, e in grid(_PER_THREAD, _VECTOR, "u+u+"):
                right[j, e] = kv_tile[j * _SIDE + side, step * _VECTOR + e]
            for i, j, e in grid(self.queries, _PER_THREAD, _VECTOR, "u+u+u+"):
                scores[i, j] = scores[i, j] + left[i, e] * right[j, e]

    @no_type_check
    @script_part
    def take_powers(self, scores, added, powers, most, total, mixed, scale, first, begin, queries, keys, group, side):
        """Write the exponentials of a tile's scores, less the greatest so far; what was summed up before is scaled."""
        for i in grid(self.queries, "u+"):
            row = first + group * self.queries + i
            greatest = most[i]
            for j in grid(_PER_THREAD, "u+"):
                if row < queries and begin + j * _SIDE + side < keys:
                    scores[i, j] = scores[i, j] * float32(scale) + added[i, j]
                    greatest = primitives.max(greatest, scores[i, j])
            for lanes in grid(4, "u+"):
                greatest = primitives.max(greatest, shfl_xor_sync(0xFFFFFFFF, greatest, 1 << lanes))
            shrunk = primitives.exp(most[i] - greatest)
            most[i] = greatest
            part_sum = float32.zero
            for j in grid(_PER_THREAD, "u+"):
                power = float32.zero
                if row < queries and begin + j * _SIDE + side < keys:
                    power = primitives.exp(scores[i, j] - greatest)
                part_sum += power
                powers[group * self.queries + i, j * _SIDE + side] = power
            for lanes in grid(4, "u+"):
                part_sum += shfl_xor_sync(0xFFFFFFFF, part_sum, 1 << lanes)
            total[i] = total[i] * shrunk + part_sum
            for n in grid(self.columns, "u+"):
                mixed[i, n] = mixed[i, n] * shrunk

    @no_type_check
    @script_part
    def by_values(self, mixed, powers, kv_tile, group, side):
        """Add the values of a tile, weighted by the exponentials of its scores."""
        left = register_tensor("float32", shape=[self.queries, _VECTOR])
        value = register_tensor("float32", shape=[self.columns])
        for step in range(_KEYS // _VECTOR):
            for i, e in grid(self.queries, _VECTOR, "u+u+"):
                left[i, e] = powers[group * self.queries + i, step * _VECTOR + e]
            for e in grid(_VECTOR, "u+"):
                for n in grid(self.columns, "u+"):
                    value[n] = kv_tile[step * _VECTOR + e, side * self.columns + n]
                for i, n in grid(self.queries, self.columns, "u+u+"):
                    mixed[i, n] = mixed[i, n] + left[i, e] * value[n]
