"""The rewrite of hidet's attention, for which there is no kernel on CPUs, to matrix products and a softmax.

hidet 0.6.1 has a handwritten kernel for GPUs alone. Elsewhere the operator is computed by its definition, which omits
the causal mask, and takes as many keys as there are queries.
"""

from __future__ import annotations

from collections.abc import Mapping

from hidet.graph import FlowGraph, Operator, Tensor, ops
from hidet.graph.ops.attention.attention import AttnOp
from hidet.graph.ops.attention.attention_mask import AttnMaskAddOp

from hidet_dist.operators.attention import causal_mask
from hidet_dist.rewriting import rewrite
from hidet_dist.spec.extents import extents_of


def define_attention(graph: FlowGraph) -> FlowGraph:
    """Replace each attention by operators whose definitions are true; return ``graph`` itself if there is none."""

    def defined(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        if not isinstance(op, AttnOp | AttnMaskAddOp):
            return None
        query, key, value, *masks = (replaced.get(x, x) for x in op.inputs)
        scores = ops.matmul(query, key)  # the keys are transposed already, and the scores are not scaled
        if op.attrs.get("is_causal"):
            masks = [causal_mask(extents_of(query)[-2], extents_of(key)[-1], query.dtype.name).bias]
        for mask in masks:
            scores = scores + mask
        return ops.matmul(ops.softmax(scores, -1), value)

    return rewrite(graph, defined)
