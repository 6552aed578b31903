"""Reductions of integers, exact: hidet adds and compares them in float32, which holds no more than 24 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet.graph import Tensor
from hidet.graph.ops.reduce.reduce import ReduceBaseOp

KINDS = ("sum", "max", "min", "prod")


class IntegerReduceOp(ReduceBaseOp):
    """A sum, maximum, minimum or product of integers along dims, in their own dtype."""

    def __init__(self, x: Tensor, dims: Sequence[int], keepdims: bool, kind: str):
        super().__init__(x, list(dims), keepdims, kind, x.dtype.name)
        self.attrs["kind"] = kind


def reduce_integers(x: Tensor, dims: Sequence[int], keep_dim: bool, kind: Any) -> Tensor:
    """The ``sum``, ``max``, ``min`` or ``prod`` of an integer tensor along dims, exactly."""
    return IntegerReduceOp(x, dims, keep_dim, kind).outputs[0]
