"""The removal of empty tensors from concatenations, such as the empty cache of a language model's first call."""

from __future__ import annotations

from collections.abc import Mapping

from hidet.graph import FlowGraph, Operator, Tensor, ops
from hidet.graph.ops.transform import ConcatOp

from hidet_dist.rewriting import rewrite
from hidet_dist.spec.extents import extents_of


def drop_empty_parts(graph: FlowGraph) -> FlowGraph:
    """Leave the parts of size 0 out of each concatenation; return ``graph`` itself if there are none.

    What makes the parts then has no consumers, and disappears.
    """

    def joined(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        if not isinstance(op, ConcatOp):
            return None
        kept = [replaced.get(x, x) for x in op.inputs if 0 not in extents_of(x)]
        if not kept or len(kept) == len(op.inputs):
            return None
        return kept[0] if len(kept) == 1 else ops.concat(kept, op.attrs["axis"])

    return rewrite(graph, joined)
