"""Merging of equal kernels: of those that compute the same from the same tensors, one is kept.

All layers of a model may compute the same from an input of the graph, such as the numbers of the rows of a state that a
step writes. Kernels are compared once operators are fused: a repeated operator that is part of other kernels costs
nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.opaque import OpaqueOperator

from hidet_dist.rewriting import rewrite


def merge_duplicates(graph: FlowGraph) -> FlowGraph:
    """Have one operator stand for all that are equal and read the same; return the graph itself if there are none.

    The graph's operators are fused. Operators that communicate, share memory or make an output of the graph stay.
    """
    outputs = set(graph.outputs)
    known: dict[Hashable, list[Operator]] = {}

    def make(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        if len(op.outputs) != 1 or isinstance(op, OpaqueOperator) or op.share_map or op.outputs[0] in outputs:
            return None
        shape = tuple(map(str, op.outputs[0].shape))
        key = (op.name, tuple(replaced.get(x, x) for x in op.inputs), op.outputs[0].dtype.name, shape)
        earlier = known.setdefault(key, [])
        for other in earlier:
            if op.task is other.task or str(op.task) == str(other.task):
                return replaced.get(other.outputs[0], other.outputs[0])
        earlier.append(op)
        return None

    return rewrite(graph, make)
