"""The rewrite of powers with the constant exponent 2 to squares, which are one multiplication."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hidet.graph import FlowGraph, Operator, Tensor, ops
from hidet.graph.ops.arithmetic import PowOp

from hidet_dist.rewriting import rewrite
from hidet_dist.spec.extents import extents_of, same_shape

_SQUARE = 2.0


def square_powers(graph: FlowGraph) -> FlowGraph:
    """Replace each ``x ** 2`` of floats by a square; return ``graph`` itself if there is none."""

    def square(op: Operator, replaced: Mapping[Tensor, Tensor]) -> Tensor | None:
        x = op.inputs[0] if _is_square(op) else None
        return None if x is None else ops.square(replaced.get(x, x))

    return rewrite(graph, square)


def _is_square(op: Operator) -> bool:
    if not isinstance(op, PowOp):
        return False
    x, exponent = op.inputs
    same = x.dtype.is_float() and x.dtype == exponent.dtype and same_shape(extents_of(x), extents_of(op.outputs[0]))
    known = exponent.storage is not None and exponent.device.is_cpu() and math.prod(extents_of(exponent)) == 1
    return bool(same and known and float(exponent.torch()) == _SQUARE)
