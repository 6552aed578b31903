"""Attention over rows by kernels that read each row once; see ``hidet_dist/kernels/cuda/row_attention.h``.

It is two launches. The first computes the results of chunks of rows, where a step has too few tokens to fill the device
with one block for each; the second merges them, or computes everything where the first did nothing. What is between
them is an activation, so the workspace has its place. Which it is depends on the number of tokens alone.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.ir.expr import if_then_else

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall, NativeCallOp
from hidet_dist.compile.guards import GuardedOp
from hidet_dist.errors import CompileError
from hidet_dist.operators.row_attention import RowAttentionOp, RowAttentionPartsOp, rows_read
from hidet_dist.rewriting import rewrite
from hidet_dist.spec.extents import Extent, evaluate, extents_of, symbols_in
from hidet_dist.spec.parts import values_of_symbol
from hidet_dist.traits import has_traits
from hidet_dist.weights.panels import HALF_PRECISIONS

_ELEMENTS = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
_NAMESPACE = "hidet_dist::cuda::row_attention"
_HEADER = "hidet_dist/kernels/cuda/row_attention.h"
CHUNKS, RESULTS = "attend_chunks", "attend"
_MOST_SIZE = 1024  # elements of a row: with more, the sums of a thread would not be in registers
_MOST_VALUES = 512  # elements of a row of values that four warps have in registers, as tensor cores leave them
_CHUNKS = (128, 64, 32)  # rows, as a warp has whole results of instructions for each number of warps
_FLOAT32_CHUNK = 128  # rows: one for each thread of a block
_TILE_BYTES = 76 * 1024
"""Shared memory for a chunk of keys and values: queries and weights have room beside it on all GPUs."""
_PADDING = 8  # elements behind a row in shared memory: ``kPadding`` of the header


def _rows_read(op: Operator, shapes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Of the two launches, the first one is the one that reads rows where there are few tokens."""
    pools, page = op.attrs["pools"], op.attrs["page"]
    return rows_read(pools, page, shapes) if op.attrs["function"] == CHUNKS else dict.fromkeys(range(1, 1 + pools), 0)


@has_traits(kernel="reduction", read_elements=_rows_read)
class RowAttentionLaunchOp(NativeCallOp):
    """One of the two launches.

    Parameters
    ----------
    tensors: Tensor
        The inputs of the operator, and for the second launch the results of chunks.
    function: str
        The function of the header.
    call: NativeCall
        The call of it.
    shape, dtype:
        Those of the output.
    pools, page: int
        The number of pools, and the rows of a page.
    """

    def __init__(
        self,
        *tensors: Tensor,
        function: str,
        call: NativeCall,
        shape: Sequence[Extent],
        dtype: str,
        pools: int,
        page: int,
    ):
        parts = [call.statement, dtype, *map(str, shape), *(f"{name}={value}" for name, value in call.values.items())]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        attributes = {
            "function": function,
            "call": call,
            "shape": list(shape),
            "dtype": dtype,
            "pools": pools,
            "page": page,
        }
        inputs = {f"x{number}": x for number, x in enumerate(tensors)}
        super().__init__(f"hidet_dist_row_attention_{digest}", inputs, shape, call, attributes, dtype)
        self.name = "RowAttentionChunks" if function == CHUNKS else "RowAttention"


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def chunk_of(dtype: str, pool_dtype: str, size_k: int, size_v: int, values_in_keys: bool) -> tuple[int, bool]:
    """Return the rows of a chunk, and whether tensor cores compute the attention.

    They do where queries and pools have one dtype of half precision, and a chunk has room in shared memory.
    """
    if dtype == pool_dtype and dtype in HALF_PRECISIONS and size_v <= _MOST_VALUES:
        elements = _round_up(size_k, 16) + _PADDING
        elements += 0 if values_in_keys else _round_up(size_v, 16) + _PADDING
        for rows in _CHUNKS:
            if rows * elements * 2 <= _TILE_BYTES:
                return rows, True
    return _FLOAT32_CHUNK, False


def _launches(
    tensors: Sequence[Tensor], y: Tensor, options: Mapping[str, Any], has_parts: bool, multiprocessors: int
) -> Tensor:
    query, keys, *rest = tensors
    value_size, page = int(options["value_size"]), int(options["page"])
    values, table = (keys, rest[0]) if value_size else rest[:2]
    tokens, heads, size_k = extents_of(query)
    *lead, rows, groups, _ = extents_of(keys)
    step = int(extents_of(values)[-1])
    size_v = value_size or step
    sequences, columns = extents_of(table)[0], extents_of(table)[-1]
    parts = int(lead[0]) if has_parts else 1
    if max(int(size_k), size_v) > _MOST_SIZE:
        raise CompileError(
            f"Attention over rows of {size_k} and {size_v} elements: on GPUs they have at most {_MOST_SIZE}."
        )
    dtypes = query.dtype.name, keys.dtype.name
    chunk_rows, on_tensor_cores = chunk_of(*dtypes, int(size_k), size_v, bool(value_size))
    types = [_ELEMENTS[dtype] for dtype in dtypes]
    flags = [str(bool(one)).lower() for one in (has_parts, value_size, options["softcap"])]
    # Not by the names of symbolic dims, which are variables already.
    extents: dict[str, Extent] = {
        f"extent{number}": extent for number, extent in enumerate((tokens, parts, rows, sequences, columns))
    }
    shape = f"{', '.join(extents)}, {float(options['scale'])!r}f, {float(options['softcap'])!r}f, {multiprocessors}"
    chosen = _head_counts(heads, groups)
    if len(chosen) > 1:
        extents |= {"own_heads": heads, "own_groups": groups}
    inputs = [f"of_{number}" for number in range(len(tensors))]
    query_of, keys_of, *others = inputs
    pools = f"(const Static::Pool *){keys_of}, "
    pools += "nullptr, " if value_size else f"(const Static::Pool *){others.pop(0)}, "
    places = "".join(f"(const int32_t *){name}, " for name in others[:4])
    sinks = f"(const float *){others[4]}" if options.get("has_sinks") else "nullptr"

    def call(function: str, results: Sequence[str]) -> NativeCall:
        opened = "".join(f"void *{name} = (void *)({{}}); " for name in (*inputs, *results))
        branches = []
        for own_heads, own_groups in chosen:
            static = [*types, own_heads, own_groups, int(size_k), size_v, step, page, *flags, chunk_rows]
            branches.append(
                f"{{{{ typedef {_NAMESPACE}::Static<{', '.join(map(str, static))}> Static; "
                f"const {_NAMESPACE}::Shape shape = {{{{ {shape} }}}}; "
                f"{_NAMESPACE}::Operands<Static> operands = "
                f"{{{{ (const Static::Query *){query_of}, {pools}{places}{sinks} }}}}; "
                + ("operands.values = operands.keys; " if value_size else "")
                + f"{_NAMESPACE}::{function}<Static, {str(on_tensor_cores).lower()}>(shape, operands, "
                f"(float *){', '.join(results)}); }}}}"
            )
        tests = [f"own_heads == {own_heads} && own_groups == {own_groups}" for own_heads, own_groups in chosen[:-1]]
        chain = "".join(f"if ({test}) {branch} else " for test, branch in zip(tests, branches, strict=False))
        headers, folders = (_HEADER,), (str(native.include_dir()),)
        return NativeCall(f"{opened}{chain}{branches[-1]}", headers, folders, values=extents)

    numbers = {"pools": 1 if value_size else 2, "page": page}
    # As is_split and record of the header have it. Where a group's heads are several blocks, fewer are assumed here, so
    # there is room whenever chunks have results.
    blocks = tokens * (parts * groups)
    chunks = (columns * page + (chunk_rows - 1)) // chunk_rows
    records = tokens * (parts * heads) * chunks
    count = if_then_else(blocks < multiprocessors, records, 1) if not isinstance(records, int) else records
    if isinstance(blocks, int) and blocks >= multiprocessors:
        count = 1
    between = RowAttentionLaunchOp(
        *tensors,
        function=CHUNKS,
        call=call(CHUNKS, ["of_chunks"]),
        shape=[count, size_v + 2],
        dtype="float32",
        **numbers,
    ).outputs[0]
    result: Tensor = RowAttentionLaunchOp(
        *tensors,
        between,
        function=RESULTS,
        call=call(RESULTS, ["of_chunks", "of_results"]),
        shape=extents_of(y),
        dtype=y.dtype.name,
        **numbers,
    ).outputs[0]
    return result


def _head_counts(heads: Extent, groups: Extent) -> list[tuple[int, int]]:
    """List the numbers of heads of queries, and of keys and values, that ranks have: several where parts are unequal.

    Kernels are compiled for each of them.
    """
    names = symbols_in([heads, groups])
    chosen = itertools.product(*map(values_of_symbol, names))
    sizes = [dict(zip(names, values, strict=True)) for values in chosen]
    return list(dict.fromkeys((evaluate(heads, own), evaluate(groups, own)) for own in sizes))


def row_attention_kernels(graph: FlowGraph, multiprocessors: int) -> FlowGraph:
    """Give each attention over rows its kernels; return ``graph`` itself if there is none.

    Raises
    ------
    CompileError
        When rows are longer than the kernels take.
    """

    def kernels(node: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        op = node.attrs["guarded"] if isinstance(node, GuardedOp) else node
        if not isinstance(op, RowAttentionOp | RowAttentionPartsOp):
            return None
        inputs = [replaced.get(x, x) for x in node.inputs]
        has_parts = isinstance(op, RowAttentionPartsOp)
        return _launches(inputs, node.outputs[0], op.attrs, has_parts, multiprocessors)

    return rewrite(graph, kernels)
