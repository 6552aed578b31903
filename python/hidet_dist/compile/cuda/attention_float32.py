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
from hidet.utils import prod

_THREADS = 128
_SIDE = 16  # threads of a group of queries
_GROUPS = _THREADS // _SIDE
_MOST_OF_A_GROUP = 4  # queries, at most
_LEAST_OF_A_GROUP = 2  # queries, at least: with fewer, loading tiles takes longer than computing
_KEYS = 64  # keys in shared memory at a time
_VECTOR = 4  # elements in 16 bytes
_AT_ONCE = 8  # elements of queries that a thread loads before it stores them

Place = Callable[[Sequence[Any], Sequence[Any], Any, Any], list[Any]]


def float32_kernel(
    shapes: Sequence[list[int]], scale: float, copied: bool, place: Place, bias_place: Callable[..., list[Any]]
) -> IRModule:
    """Build the kernel for q, k, v and bias of these shapes.

    ``place`` computes the indices of an element from a tensor's outer dims, a head, a row and a column. ``bias_place``
    computes those of the bias, from the same arguments without the first.
    """
    from hidet.lang import attrs, grid, register_tensor, spatial, tensor_pointer
    from hidet.lang.cuda import (
        blockIdx,
        cp_async,
        cp_async_wait_all,
        dynamic_shared_memory,
        shfl_xor_sync,
        syncthreads,
        threadIdx,
    )

    q_shape, k_shape, v_shape, bias_shape = shapes
    *outer, queries, size = q_shape
    keys, k_outer, v_outer = k_shape[-2], k_shape[:-2], v_shape[:-2]

    group_queries = queries_of_a_group(queries, prod(outer), hidet.cuda.properties().multiProcessorCount)
    rows = group_queries * _GROUPS
    blocks = -(-queries // rows)  # blocks per head
    tiles, per_thread, columns = -(-keys // _KEYS), _KEYS // _SIDE, size // _SIDE
    row_vectors = size // _VECTOR
    vectors, q_vectors, q_elements = _KEYS * row_vectors // _THREADS, rows * row_vectors, rows * size // _THREADS
    padded, padded_keys = size + _VECTOR, _KEYS + _VECTOR  # rows that are read together are in different banks
    q_bytes, tile_bytes, powers_bytes = (4 * n for n in (rows * padded, _KEYS * padded, rows * padded_keys))

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
                for i in grid((q_vectors + _THREADS - 1) // _THREADS, "u+"):
                    row = (i * _THREADS + threadIdx.x) // row_vectors
                    d = (i * _THREADS + threadIdx.x) % row_vectors * _VECTOR
                    if row < rows:
                        cp_async(
                            ~q_tile[row, d],
                            ~q[place(outer, head, primitives.min(first + row, queries - 1), d)],
                            cp_size=16,
                            src_size=(first + row < queries) * 16,
                        )
            else:
                # A thread issues all its loads before it uses the first.
                q_part = register_tensor("float32", shape=[_AT_ONCE])
                for part in range((q_elements + _AT_ONCE - 1) // _AT_ONCE):
                    for i in grid(_AT_ONCE, "u+"):
                        row = ((part * _AT_ONCE + i) * _THREADS + threadIdx.x) // size
                        d = ((part * _AT_ONCE + i) * _THREADS + threadIdx.x) % size
                        q_part[i] = float32.zero
                        if row < rows and first + row < queries:
                            q_part[i] = q[place(outer, head, first + row, d)]
                    for i in grid(_AT_ONCE, "u+"):
                        row = ((part * _AT_ONCE + i) * _THREADS + threadIdx.x) // size
                        d = ((part * _AT_ONCE + i) * _THREADS + threadIdx.x) % size
                        if row < rows:
                            q_tile[row, d] = q_part[i]

            most = register_tensor("float32", shape=[group_queries])
            total = register_tensor("float32", shape=[group_queries])
            mixed = register_tensor("float32", shape=[group_queries, columns])
            scores = register_tensor("float32", shape=[group_queries, per_thread])
            added = register_tensor("float32", shape=[group_queries, per_thread])
            left = register_tensor("float32", shape=[group_queries, _VECTOR])
            right = register_tensor("float32", shape=[per_thread, _VECTOR])
            value = register_tensor("float32", shape=[columns])
            for i in grid(group_queries, "u+"):
                most[i] = float32.min_value
                total[i] = float32.zero
                for n in grid(columns, "u+"):
                    mixed[i, n] = float32.zero

            for tile in range(tiles):
                for i in grid(vectors, "u+"):
                    key = (i * _THREADS + threadIdx.x) // row_vectors
                    d = (i * _THREADS + threadIdx.x) % row_vectors * _VECTOR
                    cp_async(
                        ~kv_tile[key, d],
                        ~k[place(k_outer, head, primitives.min(tile * _KEYS + key, keys - 1), d)],
                        cp_size=16,
                        src_size=(tile * _KEYS + key < keys) * 16,
                    )
                for i, j in grid(group_queries, per_thread, "u+u+"):
                    row = first + group * group_queries + i
                    column = tile * _KEYS + j * _SIDE + side
                    scores[i, j] = float32.zero
                    if row < queries and column < keys:
                        added[i, j] = bias[bias_place(head, row, column)]
                cp_async_wait_all()
                syncthreads()
                for step in range(row_vectors):
                    for i, e in grid(group_queries, _VECTOR, "u+u+"):
                        left[i, e] = q_tile[group * group_queries + i, step * _VECTOR + e]
                    for j, e in grid(per_thread, _VECTOR, "u+u+"):
                        right[j, e] = kv_tile[j * _SIDE + side, step * _VECTOR + e]
                    for i, j, e in grid(group_queries, per_thread, _VECTOR, "u+u+u+"):
                        scores[i, j] = scores[i, j] + left[i, e] * right[j, e]
                syncthreads()
                for i in grid(vectors, "u+"):
                    key = (i * _THREADS + threadIdx.x) // row_vectors
                    d = (i * _THREADS + threadIdx.x) % row_vectors * _VECTOR
                    cp_async(
                        ~kv_tile[key, d],
                        ~v[place(v_outer, head, primitives.min(tile * _KEYS + key, keys - 1), d)],
                        cp_size=16,
                        src_size=(tile * _KEYS + key < keys) * 16,
                    )

                for i in grid(group_queries, "u+"):
                    row = first + group * group_queries + i
                    greatest = most[i]
                    for j in grid(per_thread, "u+"):
                        if row < queries and tile * _KEYS + j * _SIDE + side < keys:
                            scores[i, j] = scores[i, j] * float32(scale) + added[i, j]
                            greatest = primitives.max(greatest, scores[i, j])
                    for lanes in grid(4, "u+"):
                        greatest = primitives.max(greatest, shfl_xor_sync(0xFFFFFFFF, greatest, 1 << lanes))
                    shrunk = primitives.exp(most[i] - greatest)
                    most[i] = greatest
                    part_sum = float32.zero
                    for j in grid(per_thread, "u+"):
                        power = float32.zero
                        if row < queries and tile * _KEYS + j * _SIDE + side < keys:
                            power = primitives.exp(scores[i, j] - greatest)
                        part_sum += power
                        powers[group * group_queries + i, j * _SIDE + side] = power
                    for lanes in grid(4, "u+"):
                        part_sum += shfl_xor_sync(0xFFFFFFFF, part_sum, 1 << lanes)
                    total[i] = total[i] * shrunk + part_sum
                    for n in grid(columns, "u+"):
                        mixed[i, n] = mixed[i, n] * shrunk
                cp_async_wait_all()
                syncthreads()
                for step in range(_KEYS // _VECTOR):
                    for i, e in grid(group_queries, _VECTOR, "u+u+"):
                        left[i, e] = powers[group * group_queries + i, step * _VECTOR + e]
                    for e in grid(_VECTOR, "u+"):
                        for n in grid(columns, "u+"):
                            value[n] = kv_tile[step * _VECTOR + e, side * columns + n]
                        for i, n in grid(group_queries, columns, "u+u+"):
                            mixed[i, n] = mixed[i, n] + left[i, e] * value[n]
                syncthreads()

            for i in grid(group_queries, "u+"):
                row = first + group * group_queries + i
                if row < queries:
                    for n in grid(columns, "u+"):
                        o.write(place(outer, head, row, side * columns + n), mixed[i, n] / total[i])

    return module.ir_module()


def queries_of_a_group(queries: int, heads: int, multiprocessors: int) -> int:
    """Choose the queries per group: up to four, fewer to give each multiprocessor a block and each thread work."""
    count = _MOST_OF_A_GROUP
    while count > 1:
        idle = count // 2 * _GROUPS >= queries
        few = count > _LEAST_OF_A_GROUP and heads * -(-queries // (count * _GROUPS)) < multiprocessors
        if not idle and not few:
            break
        count //= 2
    return count
