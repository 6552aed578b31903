"""Tensors without elements in graphs that are lowered from PyTorch.

They cannot be sharded or stored, so graphs with them are refused. Mostly a count in a configuration is 0, such as the
number of experts of a token: the model could be computed, but would be without this part.
"""

from __future__ import annotations

from hidet.graph import FlowGraph, Tensor
from hidet.graph.ops.transform import ConcatOp

from hidet_dist.spec.extents import extents_of


def empty_tensors(graph: FlowGraph) -> list[Tensor]:
    """List the tensors without elements that operators of a graph compute, in order.

    Those that are only parts of concatenations with others are not among them: normal graphs have none of these.
    """
    needed = set(graph.outputs)
    for op in reversed(graph.nodes):
        if not needed.isdisjoint(op.outputs):
            needed.update(x for x in op.inputs if not (isinstance(op, ConcatOp) and 0 in extents_of(x)))
    return [y for op in graph.nodes for y in op.outputs if y in needed and 0 in extents_of(y)]
