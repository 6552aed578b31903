"""Products by experts on GPUs, as matrix products: each row beside zeros for the experts that it did not choose."""

from __future__ import annotations

from collections.abc import Mapping

from hidet.graph import FlowGraph, Operator, Tensor, ops

from hidet_dist.operators import elementwise, reductions, to_dtype
from hidet_dist.operators.experts import ExpertProductOp
from hidet_dist.operators.shaping import permuted, reshaped
from hidet_dist.rewriting import rewrite
from hidet_dist.spec.extents import extents_of


def define_experts(graph: FlowGraph) -> FlowGraph:
    """Replace each product by experts by one product over all experts and inner dims.

    It takes as many operations as if every expert computed every row, on tensor cores, and a tensor of
    [rows, experts * inner] elements. Returns ``graph`` itself if there is nothing to replace.
    """

    def product(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        if not isinstance(op, ExpertProductOp):
            return None
        x, weight, chosen, labels, *scales = (replaced.get(one, one) for one in op.inputs)
        tokens, choices = extents_of(chosen)
        experts, inner, columns = extents_of(weight)
        if op.attrs["transposed"]:
            weight, inner, columns = permuted(weight, [0, 2, 1]), columns, inner
        label = elementwise.add(reshaped(chosen, [tokens, choices, 1]), 1)
        is_own = elementwise.eq(label, reshaped(labels, [1, 1, experts]))
        rows = x if len(x.shape) == 3 else ops.unsqueeze(x, 1)
        # Zeros by choice and not by multiplication: what is not a finite number must not reach the others.
        masked = elementwise.where(ops.unsqueeze(is_own, 3), ops.unsqueeze(rows, 2), 0)
        y = ops.matmul(
            reshaped(masked, [tokens * choices, experts * inner]), reshaped(weight, [experts * inner, columns])
        )
        y = reshaped(y, [tokens, choices, columns])
        if not scales:
            return y
        weighted = elementwise.mul(to_dtype(y, "float32"), ops.unsqueeze(to_dtype(scales[0], "float32"), 2))
        return to_dtype(reductions.sum(weighted, 1), x.dtype)

    return rewrite(graph, product)
