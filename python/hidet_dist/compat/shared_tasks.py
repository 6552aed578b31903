"""hidet 0.6.1 builds an operator's task anew whenever a pass gives the operator other inputs.

A task is the definition of a computation: it depends on the dtypes and shapes of the inputs, and on the attributes. The
passes of hidet's optimization change neither for most operators, but each pass that changes an operator rebuilds all
operators after it. For a model of 32 layers that takes most of the time of optimizing it. While :func:`shared_tasks`
is active, an operator that gets inputs of the same types is copied, with its task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import hidet
from hidet.graph import Operator, Tensor

from hidet_dist.compat.replacing import replaced
from hidet_dist.rewriting import copy_operator
from hidet_dist.spec.extents import extents_of, same_extent

_reforward = Operator.reforward


def _same_type(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    a, b = extents_of(x), extents_of(y)
    return (
        x.dtype == y.dtype
        and x.device == y.device
        and x.layout == y.layout
        and len(a) == len(b)
        and all(i is j or same_extent(i, j) for i, j in zip(a, b, strict=True))
    )


def _runs(inputs: Sequence[Tensor]) -> bool:
    """Whether hidet computes an operator on these inputs at once: all of them are known."""
    return hidet.option.get_execution_mode() != "symbolic" and all(x.storage is not None for x in inputs)


def reforward(op: Operator, inputs: list[Tensor], update_attributes: Mapping[str, Any] | None = None) -> list[Tensor]:
    """Build an operator like ``op`` on other inputs; replaces ``Operator.reforward``."""
    if update_attributes or _runs(inputs) or not all(map(_same_type, inputs, op.inputs)):
        outputs: list[Tensor] = _reforward(op, inputs, update_attributes)
        return outputs
    return copy_operator(op, inputs)


@contextmanager
def shared_tasks() -> Iterator[None]:
    """Let copies of operators have the operators' tasks while the block runs."""
    with replaced(Operator, {"reforward": reforward}):
        yield
