"""Attention as one kernel: ``softmax(q k^T * scale + bias) v``, whose scores never reach memory.

Scores are computed tile by tile, together with their maximum, the sum of their exponentials and the weighted sum of the
values, all in float32 (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1). A warp has 16 queries. Its scores
stay in the registers in which the tensor cores leave them, as an operand of the next product. This kernel is for half
precision; :mod:`hidet_dist.compile.cuda.attention_float32` has the kernel for float32.

Keys and values may have fewer heads than queries; each of their heads then serves several heads of queries (grouped
queries, Ainslie et al. 2023). The bias is read element by element, so that hidet can fuse its computation as a
prologue, and so are queries that are rotated there. Other operands are copied from memory 16 bytes at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, no_type_check

import hidet
from hidet.graph import Operator, Tensor
from hidet.graph.ops.utils import Task, TensorNode, compute, input_like, reduce
from hidet.ir import primitives
from hidet.ir.dtypes import float32
from hidet.ir.expr import Expr, cast
from hidet.ir.module import IRModule
from hidet.ir.utils import broadcast_indices
from hidet.utils import prod

from hidet_dist.compile.cuda.attention_float32 import float32_kernel
from hidet_dist.partitioning.once import MadeOnce
from hidet_dist.patterns.attention import HEAD_STEP

_WARP = 32
_WARPS = 4  # warps of a block, at most
_LEAST_WARPS = 2  # warps of a block, unless it has fewer queries: one would copy tiles too slowly
_ROWS = 16  # queries per warp
_KEYS = 64  # keys in shared memory at a time
_COLUMNS = 8  # columns of the tensor cores' product
_VECTOR = 8  # elements in 16 bytes
_AT_ONCE = 8  # elements of queries that a thread loads before it stores them


class AttentionTask(Task, metaclass=MadeOnce):
    """The definition. q: ``[..., queries, size]``; k, v: ``[..., keys, size]``; bias: ``[..., queries, keys]``.

    The outer dims of k and v divide those of q; the bias broadcasts to ``q k^T``. Queries that are ``copied`` are read
    from memory; hidet must not fuse their computation.
    """

    def __init__(self, q: TensorNode, k: TensorNode, v: TensorNode, bias: TensorNode, scale: float, copied: bool):
        outer, (queries, size), keys = list(q.shape[:-2]), q.shape[-2:], k.shape[-2]
        dtype = q.type.dtype

        def score(*at: Any) -> Any:
            *stack, row, column = at
            held = _held(stack, outer, k.shape[:-2])
            products = reduce(
                [size], lambda d: cast(q[(*stack, row, d)], float32) * cast(k[(*held, column, d)], float32), "sum"
            )
            return products * float32(scale) + bias[_broadcast(at, bias.shape, [*outer, queries, keys])]

        scores = compute("scores", shape=[*outer, queries, keys], fcompute=score)
        most = compute(
            "most", shape=[*outer, queries], fcompute=lambda *at: reduce([keys], lambda j: scores[(*at, j)], "max")
        )
        powers = compute(
            "powers", shape=[*outer, queries, keys], fcompute=lambda *at: primitives.exp(scores[at] - most[at[:-1]])
        )
        total = compute(
            "total", shape=[*outer, queries], fcompute=lambda *at: reduce([keys], lambda j: powers[(*at, j)], "sum")
        )

        def mixed(*at: Any) -> Any:
            *stack, row, d = at
            held = _held(stack, outer, v.shape[:-2])
            weighted = reduce([keys], lambda j: powers[(*stack, row, j)] * cast(v[(*held, j, d)], float32), "sum")
            return cast(weighted / total[(*stack, row)], dtype)

        output = compute("o", shape=[*outer, queries, size], fcompute=mixed)
        attributes = {"scale": scale, "copied": copied}
        super().__init__("attention", inputs=[q, k, v, bias], outputs=[output], attributes=attributes)
        self.scale, self.copied = scale, copied

    def implement_cuda(self, working_dir: str) -> IRModule:
        """Build the kernel: blocks of up to four warps, fewer if there would be too few blocks for the GPU."""
        if self.inputs[0].type.dtype == float32:
            return self._in_float32()
        from hidet.ir.primitives.cuda.mma import MmaConfig, ldmatrix, mma_sync
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

        q_shape, k_shape, v_shape, bias_shape = (list(map(int, x.shape)) for x in self.inputs)
        *outer, queries, size = q_shape
        keys, scale = k_shape[-2], self.scale
        k_outer, v_outer = k_shape[:-2], v_shape[:-2]
        dtype = self.inputs[0].type.dtype
        half = dtype.name == "float16"
        config = MmaConfig.m16n8k16_f16_f32() if half else MmaConfig.m16n8k16_bf16_f32()

        warps = warps_of_block(queries, prod(outer), hidet.cuda.properties().multiProcessorCount)
        threads, rows = warps * _WARP, warps * _ROWS
        blocks = -(-queries // rows)  # blocks per head
        tiles = -(-keys // _KEYS)
        steps, columns, score_columns = size // HEAD_STEP, size // _COLUMNS, _KEYS // _COLUMNS
        row_vectors = size // _VECTOR
        vectors = _KEYS * row_vectors // threads
        copied, q_vectors, q_elements = self.copied, rows * row_vectors // threads, rows * size // threads
        padded = size + _VECTOR  # rows that are read together are in different banks
        tile_bytes = _KEYS * padded * dtype.nbytes

        place, bias_place = self._places()
        with hidet.script_module() as module:

            @no_type_check
            @hidet.script
            def attention(
                q: dtype[q_shape], k: dtype[k_shape], v: dtype[v_shape], bias: float32[bias_shape], o: dtype[q_shape]
            ):
                attrs.func_kind = "cuda_kernel"
                attrs.cuda.block_dim = threads
                attrs.cuda.grid_dim = blocks * prod(outer)
                attrs.cuda.dynamic_smem_bytes = 2 * tile_bytes
                k_tile = tensor_pointer(dtype, shape=[_KEYS, padded], init=dynamic_shared_memory(0, dtype))
                # The tile of values holds queries at first.
                v_tile = tensor_pointer(dtype, shape=[_KEYS, padded], init=dynamic_shared_memory(tile_bytes, dtype))
                head = spatial(*outer).map(blockIdx.x // blocks)
                first = blockIdx.x % blocks * rows
                warp = threadIdx.x // _WARP
                lane = threadIdx.x % _WARP

                # Keys of the first tile are copied while queries are computed.
                for i in grid(vectors, "u+"):
                    key = (i * threads + threadIdx.x) // row_vectors
                    d = (i * threads + threadIdx.x) % row_vectors * _VECTOR
                    cp_async(
                        ~k_tile[key, d],
                        ~k[place(k_outer, head, primitives.min(key, keys - 1), d)],
                        cp_size=16,
                        src_size=(key < keys) * 16,
                    )
                if copied:
                    for i in grid(q_vectors, "u+"):
                        query = (i * threads + threadIdx.x) // row_vectors
                        d = (i * threads + threadIdx.x) % row_vectors * _VECTOR
                        cp_async(
                            ~v_tile[query, d],
                            ~q[place(outer, head, primitives.min(first + query, queries - 1), d)],
                            cp_size=16,
                            src_size=(first + query < queries) * 16,
                        )
                    cp_async_wait_all()
                else:
                    # A thread issues all its loads before it uses the first.
                    q_part = register_tensor(dtype, shape=[_AT_ONCE])
                    for part in range(q_elements // _AT_ONCE):
                        for i in grid(_AT_ONCE, "u+"):
                            query = ((part * _AT_ONCE + i) * threads + threadIdx.x) // size
                            d = ((part * _AT_ONCE + i) * threads + threadIdx.x) % size
                            q_part[i] = dtype.zero
                            if first + query < queries:
                                q_part[i] = q[place(outer, head, first + query, d)]
                        for i in grid(_AT_ONCE, "u+"):
                            query = ((part * _AT_ONCE + i) * threads + threadIdx.x) // size
                            d = ((part * _AT_ONCE + i) * threads + threadIdx.x) % size
                            v_tile[query, d] = q_part[i]
                syncthreads()
                q_regs = register_tensor("uint32", shape=[steps, 4])
                for step in grid(steps, "u+"):
                    ldmatrix(
                        regs=[q_regs[step, 0], q_regs[step, 1], q_regs[step, 2], q_regs[step, 3]],
                        smem_addr=~v_tile[warp * _ROWS + lane % 16, step * 16 + lane // 16 * 8],
                    )

                # A thread has parts of two rows of the tensor cores' results.
                most = register_tensor("float32", shape=[2])
                total = register_tensor("float32", shape=[2])
                mixed = register_tensor("float32", shape=[columns, 4])
                scores = register_tensor("float32", shape=[score_columns, 4])
                added = register_tensor("float32", shape=[score_columns, 4])
                operand = register_tensor("uint32", shape=[4])
                powers = register_tensor(dtype, shape=[8])
                for i in grid(2, "u+"):
                    most[i] = float32.min_value
                    total[i] = float32.zero
                for n, i in grid(columns, 4, "u+u+"):
                    mixed[n, i] = float32.zero

                for tile in range(tiles):
                    # The bias is loaded while scores are computed.
                    for n, i, j in grid(score_columns, 2, 2, "u+u+u+"):
                        row = first + warp * _ROWS + lane // 4 + i * 8
                        column = tile * _KEYS + n * 8 + lane % 4 * 2 + j
                        if row < queries and column < keys:
                            added[n, i * 2 + j] = bias[bias_place(head, row, column)]
                    cp_async_wait_all()
                    syncthreads()
                    for i in grid(vectors, "u+"):
                        key = (i * threads + threadIdx.x) // row_vectors
                        d = (i * threads + threadIdx.x) % row_vectors * _VECTOR
                        cp_async(
                            ~v_tile[key, d],
                            ~v[place(v_outer, head, primitives.min(tile * _KEYS + key, keys - 1), d)],
                            cp_size=16,
                            src_size=(tile * _KEYS + key < keys) * 16,
                        )
                    for n, i in grid(score_columns, 4, "u+u+"):
                        scores[n, i] = float32.zero
                    for step, pair in grid(steps, score_columns // 2, "u+u+"):
                        ldmatrix(
                            regs=[operand[0], operand[1], operand[2], operand[3]],
                            smem_addr=~k_tile[pair * 16 + lane // 16 * 8 + lane % 8, step * 16 + lane // 8 % 2 * 8],
                        )
                        for n in grid(2, "u+"):
                            mma_sync(
                                config,
                                cast(~q_regs[step, 0], ~dtype),
                                cast(~operand[n * 2], ~dtype),
                                ~scores[pair * 2 + n, 0],
                            )
                    cp_async_wait_all()
                    syncthreads()
                    if tile + 1 < tiles:
                        for i in grid(vectors, "u+"):
                            key = (i * threads + threadIdx.x) // row_vectors
                            d = (i * threads + threadIdx.x) % row_vectors * _VECTOR
                            after = (tile + 1) * _KEYS + key
                            cp_async(
                                ~k_tile[key, d],
                                ~k[place(k_outer, head, primitives.min(after, keys - 1), d)],
                                cp_size=16,
                                src_size=(after < keys) * 16,
                            )

                    for i in grid(2, "u+"):
                        row = first + warp * _ROWS + lane // 4 + i * 8
                        greatest = most[i]
                        for n, j in grid(score_columns, 2, "u+u+"):
                            column = tile * _KEYS + n * 8 + lane % 4 * 2 + j
                            if row < queries and column < keys:
                                scores[n, i * 2 + j] = scores[n, i * 2 + j] * float32(scale) + added[n, i * 2 + j]
                                greatest = primitives.max(greatest, scores[n, i * 2 + j])
                        greatest = primitives.max(greatest, shfl_xor_sync(0xFFFFFFFF, greatest, 2))
                        greatest = primitives.max(greatest, shfl_xor_sync(0xFFFFFFFF, greatest, 1))
                        shrunk = primitives.exp(most[i] - greatest)
                        most[i] = greatest
                        part = float32.zero
                        for n, j in grid(score_columns, 2, "u+u+"):
                            if row < queries and tile * _KEYS + n * 8 + lane % 4 * 2 + j < keys:
                                scores[n, i * 2 + j] = primitives.exp(scores[n, i * 2 + j] - greatest)
                                part += scores[n, i * 2 + j]
                            else:
                                scores[n, i * 2 + j] = float32.zero
                        part += shfl_xor_sync(0xFFFFFFFF, part, 2)
                        part += shfl_xor_sync(0xFFFFFFFF, part, 1)
                        total[i] = total[i] * shrunk + part
                        for n, j in grid(columns, 2, "u+u+"):
                            mixed[n, i * 2 + j] = mixed[n, i * 2 + j] * shrunk

                    for step in grid(_KEYS // 16, "u+"):
                        for n, i in grid(2, 4, "u+u+"):
                            powers[n * 4 + i] = cast(scores[step * 2 + n, i], dtype)
                        for pair in grid(columns // 2, "u+"):
                            ldmatrix(
                                regs=[operand[0], operand[1], operand[2], operand[3]],
                                smem_addr=~v_tile[step * 16 + lane % 16, pair * 16 + lane // 16 * 8],
                                trans=True,
                            )
                            for n in grid(2, "u+"):
                                mma_sync(config, ~powers[0], cast(~operand[n * 2], ~dtype), ~mixed[pair * 2 + n, 0])

                for i in grid(2, "u+"):
                    row = first + warp * _ROWS + lane // 4 + i * 8
                    if row < queries:
                        for n, j in grid(columns, 2, "u+u+"):
                            o.write(
                                place(outer, head, row, n * 8 + lane % 4 * 2 + j),
                                cast(mixed[n, i * 2 + j] / total[i], dtype),
                            )

        return module.ir_module()

    def _in_float32(self) -> IRModule:
        shapes = [list(map(int, x.shape)) for x in self.inputs]
        return float32_kernel(shapes, self.scale, self.copied, *self._places())

    def _places(self) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]]]:
        """Make functions that compute the indices of an element of q, k, v or o, and of the bias."""
        q_shape, k_shape, _, bias_shape = (list(map(int, x.shape)) for x in self.inputs)
        *outer, queries, _ = q_shape

        def place(outer_indices: Sequence[Any], head: Sequence[Any], row: Any, column: Any) -> list[Any]:
            return [*_held(head, outer, outer_indices), row, column]

        def bias_place(head: Sequence[Any], row: Any, column: Any) -> list[Any]:
            return _broadcast([*head, row, column], bias_shape, [*outer, queries, k_shape[-2]])

        return place, bias_place


def warps_of_block(queries: int, heads: int, multiprocessors: int) -> int:
    """Choose the warps that share tiles of keys and values: up to four, fewer to give each multiprocessor a block."""
    warps = _WARPS
    while warps > 1:
        idle = warps // 2 * _ROWS >= queries
        few = warps > _LEAST_WARPS and heads * -(-queries // (warps * _ROWS)) < multiprocessors
        if not idle and not few:
            break
        warps //= 2
    return warps


def _held(indices: Sequence[Any], outer: Sequence[Any], key_shape: Sequence[Any]) -> list[Any]:
    """Map the outer indices of a query to those of its keys and values."""
    return [
        i if int(n) == int(m) else i // (int(n) // int(m)) for i, n, m in zip(indices, outer, key_shape, strict=True)
    ]


def _broadcast(indices: Sequence[Any], source: Sequence[Any], shape: Sequence[Any]) -> list[Expr]:
    result: list[Expr] = broadcast_indices(list(indices), list(source), list(shape))
    return result


class AttentionOp(Operator):
    """``softmax(q k^T * scale + bias) v``; shapes are those of :class:`AttentionTask`, the bias is float32.

    hidet must not fuse the computation of k and v, and of q if it is ``copied``: a barrier before them prevents it.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, copied: bool):
        nodes = [input_like(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"), (bias, "bias"))]
        task = AttentionTask(nodes[0], nodes[1], nodes[2], nodes[3], scale, copied)
        super().__init__(inputs=[q, k, v, bias], attributes={"scale": scale, "copied": copied}, task=task)
