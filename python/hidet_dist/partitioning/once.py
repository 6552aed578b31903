"""Tasks that are cached by their tensors and attributes: building a definition is slow."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.ops.transform import ReshapeOp
from hidet.graph.ops.utils import TensorInput
from hidet.ir.task import Task

from hidet_dist.spec.extents import Extent


class MadeOnce(type(Task)):  # type: ignore[misc]
    """The metaclass of cached tasks: a call with equal arguments returns the same task."""

    def __init__(cls, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        cls._made: dict[str, Task] = {}

    def __call__(cls, *arguments: Any) -> Any:
        """Return the task for these tensors (by name, dtype and shape) and attributes."""
        key = "; ".join(
            f"{a.name} {a.type.dtype.name}{list(map(str, a.shape))}" if isinstance(a, TensorInput) else str(a)
            for a in arguments
        )
        if key not in cls._made:
            cls._made[key] = super().__call__(*arguments)
        return cls._made[key]


_reshapes: dict[str, Operator] = {}


def reshape(x: Tensor, shape: Sequence[Extent]) -> Tensor:
    """``hidet.ops.reshape`` with a cached task."""
    key = f"{x.dtype.name}{list(map(str, x.shape))} {list(map(str, shape))}"
    if key not in _reshapes:
        op = ReshapeOp(x, list(shape))
        _reshapes[key] = copy.copy(op)
        _reshapes[key].inputs, _reshapes[key].outputs = [], []
        return op.outputs[0]
    op = copy.copy(_reshapes[key])
    op.inputs = [x]
    op.outputs = op.symbolic_run()
    return op.outputs[0]
