"""Reshapes that hidet has fused with one another: one reshape again, which needs neither a kernel nor memory."""

from __future__ import annotations

from collections.abc import Mapping

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.fusion.fused_operator import FusedTask

from hidet_dist.partitioning.once import reshape
from hidet_dist.rewriting import rewrite
from hidet_dist.spec.extents import extents_of


def renamings_in_place(graph: FlowGraph) -> FlowGraph:
    """Replace fused operators that only rename the memory of their input; return the graph itself if there is none."""
    return rewrite(graph, _renamed)


def _renamed(node: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
    task = node.task
    if not isinstance(task, FusedTask) or not all(one.task.share_map for one in task.fused_graph.nodes):
        return None
    (x,), (y,) = node.inputs, node.outputs
    return reshape(replaced.get(x, x), extents_of(y))
