"""Replacement of attention in a program by the kernel of :mod:`hidet_dist.compile.cuda.attention`."""

from __future__ import annotations

from hidet.graph import FlowGraph, Operator, Tensor, ops
from hidet.graph.ops.special import barrier
from hidet.ir.expr import is_constant

from hidet_dist.compile.cuda.attention import AttentionOp
from hidet_dist.patterns.attention import Attention, attention_of
from hidet_dist.rewriting import Build, Repeated, Uses, replace_operators


def attention_in_one_kernel(graph: FlowGraph) -> FlowGraph:
    """Return an equivalent graph with each attention of known sizes as one operator; the given one is not changed."""
    repeated = Repeated()

    def replaced(op: Operator, uses: Uses) -> tuple[list[Tensor], Build] | None:
        match = attention_of(op, uses)
        if match is None or not is_constant(*(size for x in match.inputs for size in x.shape)):
            return None

        def build(inputs: list[Tensor]) -> Tensor:
            key = match.scale, match.q_in_memory, match.k_axes
            return repeated(key, inputs, lambda: [_attention(inputs, match)])[0]

        return match.inputs, build

    return replace_operators(graph, replaced)


def _attention(inputs: list[Tensor], match: Attention) -> Tensor:
    """Build the operator on queries, keys, values and a bias or none."""
    q, k, v, *rest = inputs
    keys = barrier(k if match.k_axes is None else ops.permute_dims(k, list(match.k_axes)))
    bias = ops.cast(rest[0], "float32") if rest else _nothing(q)
    queries = barrier(q) if match.q_in_memory else q
    return AttentionOp(queries, keys, barrier(v), bias, match.scale, match.q_in_memory).outputs[0]


def _nothing(q: Tensor) -> Tensor:
    """Make a bias of zero."""
    return ops.full([1] * len(q.shape), 0.0, "float32", q.device)
