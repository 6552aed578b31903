"""The kernel of attention in half precision, on tensor cores.

A warp has 16 queries. Its scores stay in the registers in which the tensor cores leave them, as an operand of the next
product: a thread has parts of two rows, 8 apart.
"""

from collections.abc import Callable, Sequence
from typing import Any, no_type_check

import hidet
from hidet.ir import primitives
from hidet.ir.dtypes import float32
from hidet.ir.expr import cast
from hidet.ir.module import IRModule
from hidet.ir.primitives.cuda.mma import MmaConfig, ldmatrix, mma_sync
from hidet.ir.type import DataType
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
from hidet_dist.patterns.attention import HEAD_STEP

_WARP = 32
_WARPS = 4  # warps of a block, at most
_LEAST_WARPS = 2  # warps of a block, unless it has fewer queries: one would copy tiles too slowly
_ROWS = 16  # queries per warp
_KEYS = 64  # keys in shared memory at a time
_COLUMNS = 8  # columns of the tensor cores' product
_SCORE_COLUMNS = _KEYS // _COLUMNS
_PADDING = 8  # elements: rows that are read together are in different banks


def half_kernel(
    shapes: Sequence[list[int]],
    dtype: DataType,
    scale: float,
    copied: bool,
    place: Place,
    bias_place: Callable[..., list[Any]],
) -> IRModule:
    """Build the kernel for q, k, v and bias of these shapes; the arguments are those of ``float32_kernel``.

    Blocks are of up to four warps, fewer if there would be too few blocks for the GPU.
    """
    q_shape, k_shape, v_shape, bias_shape = shapes
    *outer, queries, size = q_shape
    keys, k_outer, v_outer = k_shape[-2], k_shape[:-2], v_shape[:-2]

    multiprocessors = hidet.cuda.properties().multiProcessorCount
    warps = parts_of_block(_WARPS, _LEAST_WARPS, _ROWS, queries, prod(outer), multiprocessors)
    threads, rows = warps * _WARP, warps * _ROWS
    blocks = -(-queries // rows)  # blocks per head
    tile_count = -(-keys // _KEYS)
    steps, columns = size // HEAD_STEP, size // _COLUMNS
    padded = size + _PADDING
    tile_bytes = _KEYS * padded * dtype.nbytes
    tiles, products = Tiles(dtype, size, threads, place), _TensorCoreProducts(dtype, size)

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
            tiles.copy(k_tile, k, k_outer, head, 0, _KEYS, keys)
            if copied:
                tiles.copy(v_tile, q, outer, head, first, rows, queries)
                cp_async_wait_all()
            else:
                tiles.load(v_tile, q, outer, head, first, rows, queries)
            syncthreads()
            q_regs = register_tensor("uint32", shape=[steps, 4])
            for step in grid(steps, "u+"):
                ldmatrix(
                    regs=[q_regs[step, 0], q_regs[step, 1], q_regs[step, 2], q_regs[step, 3]],
                    smem_addr=~v_tile[warp * _ROWS + lane % 16, step * 16 + lane // 16 * 8],
                )

            most = register_tensor("float32", shape=[2])
            total = register_tensor("float32", shape=[2])
            mixed = register_tensor("float32", shape=[columns, 4])
            scores = register_tensor("float32", shape=[_SCORE_COLUMNS, 4])
            added = register_tensor("float32", shape=[_SCORE_COLUMNS, 4])
            operand = register_tensor("uint32", shape=[4])
            powers = register_tensor(dtype, shape=[8])
            for i in grid(2, "u+"):
                most[i] = float32.min_value
                total[i] = float32.zero
            for n, i in grid(columns, 4, "u+u+"):
                mixed[n, i] = float32.zero
            top = first + warp * _ROWS + lane // 4  # the upper of the thread's two rows
            left = lane % 4 * 2  # its first column of each product

            for tile in range(tile_count):
                # The bias is loaded while scores are computed.
                for n, i, j in grid(_SCORE_COLUMNS, 2, 2, "u+u+u+"):
                    row = top + i * 8
                    column = tile * _KEYS + n * 8 + left + j
                    if row < queries and column < keys:
                        added[n, i * 2 + j] = bias[bias_place(head, row, column)]
                cp_async_wait_all()
                syncthreads()
                tiles.copy(v_tile, v, v_outer, head, tile * _KEYS, _KEYS, keys)
                products.by_keys(scores, q_regs, k_tile, operand, lane)
                cp_async_wait_all()
                syncthreads()
                if tile + 1 < tile_count:
                    tiles.copy(k_tile, k, k_outer, head, (tile + 1) * _KEYS, _KEYS, keys)
                _take_powers(scores, added, most, total, mixed, scale, top, tile * _KEYS + left, queries, keys, columns)
                products.by_values(mixed, scores, v_tile, powers, operand, lane)

            for i in grid(2, "u+"):
                if top + i * 8 < queries:
                    for n, j in grid(columns, 2, "u+u+"):
                        o.write(
                            place(outer, head, top + i * 8, n * 8 + left + j),
                            cast(mixed[n, i * 2 + j] / total[i], dtype),
                        )

    return module.ir_module()


class _TensorCoreProducts:
    """The products of a warp on tensor cores, 16 rows by 8 columns at a time."""

    def __init__(self, dtype: DataType, size: int):
        half = dtype.name == "float16"
        self.config = MmaConfig.m16n8k16_f16_f32() if half else MmaConfig.m16n8k16_bf16_f32()
        self.dtype = dtype
        self.steps, self.columns = size // HEAD_STEP, size // _COLUMNS

    @no_type_check
    @script_part
    def by_keys(self, scores, q_regs, k_tile, operand, lane):
        """Compute the scores of a tile."""
        for n, i in grid(_SCORE_COLUMNS, 4, "u+u+"):
            scores[n, i] = float32.zero
        for step, pair in grid(self.steps, _SCORE_COLUMNS // 2, "u+u+"):
            ldmatrix(
                regs=[operand[0], operand[1], operand[2], operand[3]],
                smem_addr=~k_tile[pair * 16 + lane // 16 * 8 + lane % 8, step * 16 + lane // 8 % 2 * 8],
            )
            for n in grid(2, "u+"):
                mma_sync(
                    self.config,
                    cast(~q_regs[step, 0], ~self.dtype),
                    cast(~operand[n * 2], ~self.dtype),
                    ~scores[pair * 2 + n, 0],
                )

    @no_type_check
    @script_part
    def by_values(self, mixed, scores, v_tile, powers, operand, lane):
        """Add the values of a tile, weighted by the exponentials of its scores."""
        for step in grid(_KEYS // 16, "u+"):
            for n, i in grid(2, 4, "u+u+"):
                powers[n * 4 + i] = cast(scores[step * 2 + n, i], self.dtype)
            for pair in grid(self.columns // 2, "u+"):
                ldmatrix(
                    regs=[operand[0], operand[1], operand[2], operand[3]],
                    smem_addr=~v_tile[step * 16 + lane % 16, pair * 16 + lane // 16 * 8],
                    trans=True,
                )
                for n in grid(2, "u+"):
                    mma_sync(self.config, ~powers[0], cast(~operand[n * 2], ~self.dtype), ~mixed[pair * 2 + n, 0])


@no_type_check
@script_part
def _take_powers(scores, added, most, total, mixed, scale, top, left, queries, keys, columns):
    """Put exponentials in place of a tile's scores, less the greatest so far; what was summed up before is scaled."""
    for i in grid(2, "u+"):
        row = top + i * 8
        greatest = most[i]
        for n, j in grid(_SCORE_COLUMNS, 2, "u+u+"):
            if row < queries and left + n * 8 + j < keys:
                scores[n, i * 2 + j] = scores[n, i * 2 + j] * float32(scale) + added[n, i * 2 + j]
                greatest = primitives.max(greatest, scores[n, i * 2 + j])
        greatest = primitives.max(greatest, shfl_xor_sync(0xFFFFFFFF, greatest, 2))
        greatest = primitives.max(greatest, shfl_xor_sync(0xFFFFFFFF, greatest, 1))
        shrunk = primitives.exp(most[i] - greatest)
        most[i] = greatest
        part = float32.zero
        for n, j in grid(_SCORE_COLUMNS, 2, "u+u+"):
            if row < queries and left + n * 8 + j < keys:
                scores[n, i * 2 + j] = primitives.exp(scores[n, i * 2 + j] - greatest)
                part += scores[n, i * 2 + j]
            else:
                scores[n, i * 2 + j] = float32.zero
        part += shfl_xor_sync(0xFFFFFFFF, part, 2)
        part += shfl_xor_sync(0xFFFFFFFF, part, 1)
        total[i] = total[i] * shrunk + part
        for n, j in grid(columns, 2, "u+u+"):
            mixed[n, i * 2 + j] = mixed[n, i * 2 + j] * shrunk
