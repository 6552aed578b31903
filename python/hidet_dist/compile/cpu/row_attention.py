"""Attention over rows by a kernel that reads each row once; see ``hidet_dist/kernels/row_attention.h``.

The operator's definition would be computed in passes over the scores of all columns of the table. A row number that the
table or the pool does not have stands for a row of NaN, as in guarded definitions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall, NativeCallOp, Values
from hidet_dist.compile.cpu.tiled import headers_digest
from hidet_dist.compile.guards import GuardedOp
from hidet_dist.operators.row_attention import RowAttentionOp, RowAttentionPartsOp
from hidet_dist.rewriting import rewrite
from hidet_dist.spec.extents import Extent, extents_of

_ELEMENTS = {"float32": "float", "float16": "hd::f16", "bfloat16": "hd::bf16"}
_NAMESPACE = "hidet_dist::kernels::row_attention"


class RowAttentionKernelOp(NativeCallOp):
    """The kernel of :class:`RowAttentionOp` or :class:`RowAttentionPartsOp`.

    Parameters
    ----------
    tensors: Tensor
        The operator's inputs.
    shape: sequence of int or expression
        The shape of its output.
    dtype: str
        The dtype of its output.
    options: mapping
        Its attributes.
    has_parts: bool
        Whether its pools have parts.
    """

    def __init__(
        self, *tensors: Tensor, shape: Sequence[Extent], dtype: str, options: Mapping[str, Any], has_parts: bool
    ):
        text = Values()
        statement = _statement(tensors, options, has_parts, text)
        parts = [statement, dtype, headers_digest(), *(f"{name}={value}" for name, value in text.values.items())]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        headers = ("hidet_dist/kernels/row_attention.h",)
        call = NativeCall(statement, headers, (str(native.include_dir()),), values=text.values)
        attributes = {"shape": list(shape), "dtype": dtype, "options": dict(options), "has_parts": has_parts}
        inputs = {f"x{number}": x for number, x in enumerate(tensors)}
        super().__init__(f"hidet_dist_row_attention_{digest}", inputs, shape, call, attributes, dtype)
        self.name = "RowAttention"


def _statement(tensors: Sequence[Tensor], options: Mapping[str, Any], has_parts: bool, text: Values) -> str:
    query, keys, *rest = tensors
    value_size = int(options["value_size"])
    values, table = (keys, rest[0]) if value_size else rest[:2]
    tokens, heads, size_k = extents_of(query)
    *lead, rows, groups, _ = extents_of(keys)
    step = extents_of(values)[-1]
    table_shape = extents_of(table)
    sizes = [
        *(tokens, heads, groups, size_k, value_size or step),
        *(lead[0] if has_parts else 1, rows, table_shape[0], table_shape[-1], int(options["page"]), step),
    ]
    numbers = [f"{float(options[name])!r}f" for name in ("scale", "softcap")]
    shape = ", ".join([*map(text, sizes), *numbers, str(has_parts).lower()])
    query_type, pool_type = _ELEMENTS[query.dtype.name], _ELEMENTS[keys.dtype.name]
    types = f"<{query_type}, {pool_type}>"
    pools = f"(const {pool_type} *)({{}}), "
    addresses = f"(const {query_type} *)({{}}), {pools}" + ("nullptr, " if value_size else pools)
    addresses += "(const int32_t *)({}), " * 4
    addresses += "(const float *)({})" if options.get("has_sinks") else "nullptr"
    fill = "operands.values = operands.keys; " if value_size else ""
    return (
        f"const {_NAMESPACE}::Shape shape = {{{{ {shape} }}}}; "
        f"{_NAMESPACE}::Operands{types} operands = {{{{ {addresses} }}}}; "
        f"{fill}{_NAMESPACE}::attend{types}(shape, operands, (void *)({{}}));"
    )


def row_attention_kernels(graph: FlowGraph) -> FlowGraph:
    """Give each attention over rows its kernel; return ``graph`` itself if there is none."""

    def kernel(node: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        op = node.attrs["guarded"] if isinstance(node, GuardedOp) else node
        if not isinstance(op, RowAttentionOp | RowAttentionPartsOp):
            return None
        (y,) = node.outputs
        inputs = [replaced.get(x, x) for x in node.inputs]
        has_parts = isinstance(op, RowAttentionPartsOp)
        options = {name: op.attrs[name] for name in sorted(op.attrs)}
        return RowAttentionKernelOp(
            *inputs, shape=list(extents_of(y)), dtype=y.dtype.name, options=options, has_parts=has_parts
        ).outputs[0]

    return rewrite(graph, kernel)
