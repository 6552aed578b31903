"""Attention as one kernel, whose scores never reach memory; see ``hidet_dist/kernels/attention.h``.

Queries, keys, values and a bias are read through the reshapes, permutes and slices before them. Keys and values may
have fewer heads than queries, each for several of them in turn. Dims may be symbolic, those of a head excepted.
Attention in half precision, or of few queries, is left to products and a softmax.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from hidet.graph import FlowGraph, Operator, Tensor, ops

from hidet_dist import native
from hidet_dist.compat.native_call import NativeCall, NativeCallOp, Values
from hidet_dist.compile.cpu.tiled import headers_digest
from hidet_dist.compile.cpu.views import View, contiguous, view_of
from hidet_dist.patterns.attention import Attention, attention_of, groups_of, has_cpu_kernel
from hidet_dist.rewriting import Build, Uses, copy_operator, replace_operators
from hidet_dist.spec.extents import Extent, extents_of, same_extent

_NAMESPACE = "hidet_dist::kernels::attention"
_NAMES = ("q", "k", "v", "bias")


class AttentionKernelOp(NativeCallOp):
    """``softmax(q k^T * scale + bias) v`` in float32.

    Parameters
    ----------
    tensors: Tensor
        The memory of q, k and v, and of a bias if there is one, in any shapes.
    operands: sequence of (steps, row, column, offset)
        The access to each: elements from one matrix to the next for each dim of the stack of heads, from one row to the
        next, from one column to the next, and before the first one.
    stack: sequence of int or expression
        The dims of the stack of heads.
    sizes: sequence of int or expression
        The numbers of queries and of keys, and the sizes of a head of queries and of values.
    scale: float
        The factor of the scores.
    shape: sequence of int or expression
        The shape of the output, which has the heads one after the other.
    """

    def __init__(
        self,
        *tensors: Tensor,
        operands: Sequence[Sequence[Any]],
        stack: Sequence[Extent],
        sizes: Sequence[Extent],
        scale: float,
        shape: Sequence[Extent],
    ):
        text = Values()
        numbers = ", ".join(map(text, sizes))
        statement = [
            text.array("sizes", stack),
            f"const {_NAMESPACE}::Shape shape = {{{{ {len(stack)}, sizes, {numbers}, {float(scale)!r}f }}}};",
        ]
        for name, operand in zip(_NAMES, operands, strict=False):
            steps, row, column, offset = operand
            statement.append(text.array(f"{name}_steps", steps))
            statement.append(
                f"const {_NAMESPACE}::Operand of_{name} = {{{{ (const float *)({{}}) + {text(offset)}, {name}_steps, "
                f"{text(row)}, {text(column)} }}}};"
            )
        if len(tensors) < len(_NAMES):
            statement.append(f"const {_NAMESPACE}::Operand of_bias = {{{{ nullptr, nullptr, 0, 0 }}}};")
        statement.append(f"{_NAMESPACE}::attend(shape, of_q, of_k, of_v, of_bias, (float *)({{}}));")
        written = " ".join(statement)
        digest = hashlib.sha256("\n".join([written, headers_digest()]).encode()).hexdigest()[:16]
        headers = ("hidet_dist/kernels/attention.h",)
        call = NativeCall(written, headers, (str(native.include_dir()),), values=text.values)
        attributes = {
            "operands": [list(operand) for operand in operands],
            "stack": list(stack),
            "sizes": list(sizes),
            "scale": scale,
            "shape": list(shape),
        }
        inputs = dict(zip(_NAMES, tensors, strict=False))
        super().__init__(f"hidet_dist_attention_{digest}", inputs, shape, call, attributes)
        self.name = "Attention"


def attention_kernels(graph: FlowGraph, sizes: Mapping[str, int]) -> FlowGraph:
    """Return an equivalent graph with attention as one operator where the kernel serves; ``graph`` is not changed.

    ``sizes`` are those of symbols that the graph is planned for.
    """
    known: dict[str, Operator] = {}

    def replaced(op: Operator, uses: Uses) -> tuple[list[Tensor], Build] | None:
        match = attention_of(op, uses)
        if match is None or not has_cpu_kernel(match, sizes):
            return None
        return match.inputs, lambda inputs: _attention(inputs, match, known)

    return replace_operators(graph, replaced)


def _attention(inputs: Sequence[Tensor], match: Attention, known: dict[str, Operator]) -> Tensor:
    """Build the operator on queries, keys, values and a bias or none."""
    q, k, v, *rest = inputs
    keys = k if match.k_axes is None else ops.permute_dims(k, list(match.k_axes))
    *outer, queries, size = extents_of(q)
    groups = groups_of(match)
    assert groups is not None  # has_cpu_kernel
    stack = [*outer[:-1], *groups]
    views = [_queries(q), view_of(keys), view_of(v), *map(view_of, rest)]
    operands = [_operand(view, stack, outer[-1]) for view in views]
    sizes = [queries, extents_of(keys)[-2], size, extents_of(v)[-1]]
    shape, sources = [*outer, queries, sizes[-1]], [view.source for view in views]
    types = [(str(x.device), extents_of(x)) for x in sources]
    key = str([types, operands, stack, sizes, match.scale])
    if key not in known:
        made = AttentionKernelOp(*sources, operands=operands, stack=stack, sizes=sizes, scale=match.scale, shape=shape)
        known[key] = made
        return made.outputs[0]
    return copy_operator(known[key], sources)[0]


def _queries(q: Tensor) -> View:
    """View queries; as they are where the kernel cannot read them through what is before them."""
    view = view_of(q)
    return view if any(_is_one(stride) for stride in view.strides[-2:]) else contiguous(q)


def _operand(view: View, stack: Sequence[Extent], all_heads: Extent) -> list[Any]:
    """Describe the access to a view, whose leading dims are broadcast to a stack of groups of heads.

    A symbolic dim has as many elements as that of the stack.
    """
    *outer, rows, columns = view.shape
    *steps, row, column = view.strides
    missing = len(stack) - 1 - len(outer)
    outer, steps = [1] * missing + outer, [0] * missing + steps
    of_stack = [0 if _is_one(size) else step for size, step in zip(outer, steps, strict=True)]
    *first, heads = of_stack
    has_each = same_extent(outer[-1], all_heads)  # or one for each group, or one for all
    of_group, within = (heads * stack[-1], heads) if has_each else (heads, 0)
    return [[*first, of_group, within], 0 if _is_one(rows) else row, 0 if _is_one(columns) else column, view.offset]


def _is_one(size: Extent) -> bool:
    return isinstance(size, int) and size == 1
