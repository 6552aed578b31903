"""A power with the constant exponent 2 is a square: one multiplication, and known for what it is."""

from __future__ import annotations

import copy
import math

from hidet.graph import FlowGraph, Operator, Tensor, ops
from hidet.graph.ops.arithmetic import PowOp

from hidet_dist.symbolic.extents import extents_of, same_shape

_SQUARE = 2.0


def square_powers(graph: FlowGraph) -> FlowGraph:
    """The graph with ``x * x`` for each ``x ** 2`` of floats; ``graph`` itself when there is none."""
    graph.update_nodes()
    new: dict[Tensor, Tensor] = {}
    for op in graph.nodes:
        if _is_square(op):
            x = op.inputs[0]
            new[op.outputs[0]] = ops.square(new.get(x, x))
        elif any(x in new for x in op.inputs):
            moved = copy.copy(op)
            moved.inputs = [new.get(x, x) for x in op.inputs]
            moved.outputs = moved.symbolic_run()
            new.update(zip(op.outputs, moved.outputs, strict=True))
    if not new:
        return graph
    result = FlowGraph([new.get(y, y) for y in graph.outputs], graph.inputs)
    result.update_nodes()
    return result


def _is_square(op: Operator) -> bool:
    if not isinstance(op, PowOp):
        return False
    x, exponent = op.inputs
    same = x.dtype.is_float() and x.dtype == exponent.dtype and same_shape(extents_of(x), extents_of(op.outputs[0]))
    known = exponent.storage is not None and exponent.device.is_cpu() and math.prod(extents_of(exponent)) == 1
    return bool(same and known and float(exponent.torch()) == _SQUARE)
