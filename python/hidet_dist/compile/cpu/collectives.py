"""Collectives that put shards together where they belong, and take them from where they lie.

A collective has the ranks' blocks one behind the other, so that shards along an inner dim cost a pass over memory
before or after it. In host memory the copies that a collective makes anyway can do the same: what stacks shards before
a collective, or joins them behind it, becomes part of it.
"""

from __future__ import annotations

import copy

from hidet.graph import FlowGraph, Operator, Tensor
from hidet.graph.ops.transform import ReshapeOp

from hidet_dist.partitioning.operators import CommunicationOp, JoinShardsOp, Placement, SplitOrder, StackShardsOp
from hidet_dist.spec.extents import extents_of


def place_shards(graph: FlowGraph) -> FlowGraph:
    """The same program with fewer passes over memory; the graph stays as it is."""
    uses: dict[Tensor, list[Operator]] = {}
    for node in graph.nodes:
        for x in node.inputs:
            uses.setdefault(x, []).append(node)
    outputs = set(graph.outputs)
    made: dict[Tensor, Tensor] = {}
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
                (made[y],) = node.reforward([made.get(x, x)], {"sent": sent, "received": received})
                continue
        if node.outputs[0] not in made and any(x in made for x in node.inputs):
            moved = copy.copy(node)
            moved.inputs = [made.get(x, x) for x in node.inputs]
            moved.outputs = moved.symbolic_run()
            made.update(zip(node.outputs, moved.outputs, strict=True))
    return FlowGraph([made.get(y, y) for y in graph.outputs], graph.inputs) if made else graph


def _stacked(x: Tensor) -> StackShardsOp | None:
    """The operator that stacks shards to ``x``, whose blocks are numbered as the ranks are; or None."""
    op = x.op
    if isinstance(op, ReshapeOp):  # gives symbolic dims other names
        x = op.inputs[0]
        if len(x.shape) != len(op.outputs[0].shape):
            return None
        op = x.op
    return op if isinstance(op, StackShardsOp) and _in_order(op.attrs["order"]) else None


def _in_order(order: SplitOrder) -> bool:
    return list(order.mesh_axes) == sorted(order.mesh_axes)
