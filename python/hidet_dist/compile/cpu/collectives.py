"""Collectives fused with the packing of shards before them and the unpacking after them.

A collective sends and receives the ranks' blocks one after the other, so shards along an inner dim cost another pass
over memory before or after it. In host memory the collective copies blocks anyway, and can copy to and from strided
places. So the operators that stack shards before a collective, or join them after it, become part of it.
"""

from __future__ import annotations

import copy

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.transform import ReshapeOp

from hidet_dist.partitioning.operators import CommunicationOp, JoinShardsOp, Placement, SplitOrder, StackShardsOp
from hidet_dist.spec.extents import extents_of


def place_shards(graph: FlowGraph) -> FlowGraph:
    """Return an equivalent graph with fewer passes over memory; the given graph is not changed."""
    uses: dict[Tensor, list[Operator]] = {}
    for node in graph.nodes:
        for x in node.inputs:
            uses.setdefault(x, []).append(node)
    outputs = set(graph.outputs)
    replaced: dict[Tensor, Tensor] = {}
    for node in graph.nodes:
        if isinstance(node, CommunicationOp):
            (x,), (y,) = node.inputs, node.outputs
            sent: Placement | None = None
            received: Placement | None = None
            stack = _stacked(x) if node.collective.sends_blocks else None
            if stack is not None:
                dim = stack.attrs["dim"]
                x, sent = stack.inputs[0], (dim, extents_of(x)[dim + 1])
            readers = uses.get(y, [])
            join = readers[0] if len(readers) == 1 and y not in outputs else None
            if isinstance(join, JoinShardsOp) and _in_order(join.attrs["order"]):
                y, received = join.outputs[0], (join.attrs["dim"], join.attrs["extent"])
            if sent is not None or received is not None:
                (replaced[y],) = node.reforward([replaced.get(x, x)], {"sent": sent, "received": received})
                continue
        if node.outputs[0] not in replaced and any(x in replaced for x in node.inputs):
            moved = copy.copy(node)
            moved.inputs = [replaced.get(x, x) for x in node.inputs]
            moved.outputs = moved.symbolic_run()
            replaced.update(zip(node.outputs, moved.outputs, strict=True))
    return FlowGraph([replaced.get(y, y) for y in graph.outputs], graph.inputs) if replaced else graph


def _stacked(x: Tensor) -> StackShardsOp | None:
    """Find the operator that stacks shards to ``x``, in the order of the ranks; None if there is none."""
    op = x.op
    if isinstance(op, ReshapeOp):  # gives symbolic dims other names
        x = op.inputs[0]
        if len(x.shape) != len(op.outputs[0].shape):
            return None
        op = x.op
    return op if isinstance(op, StackShardsOp) and _in_order(op.attrs["order"]) else None


def _in_order(order: SplitOrder) -> bool:
    return list(order.mesh_axes) == sorted(order.mesh_axes)
