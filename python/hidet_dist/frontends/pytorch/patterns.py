"""Copies of operators for other operands.

Models repeat their layers, and hidet takes milliseconds to define an operator. Copying one is much faster.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hidet.graph import Operator, Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Pattern:
    """The operators between some operands and the results computed from them, in execution order."""

    operators: tuple[Operator, ...]
    operands: tuple[Tensor, ...]
    results: Any

    @classmethod
    def of(cls, results: Any, operands: Sequence[Tensor], shared: Sequence[Tensor]) -> Pattern | None:
        """Collect the operators that compute ``results`` from ``operands``; copies share the ``shared`` tensors.

        Returns None if the results depend on other tensors, such as the inputs of an operand, or not on all operands.
        """
        ends, reached = {id(x) for x in (*operands, *shared)}, set()
        order: dict[int, Operator] = {}

        def visit(x: Tensor) -> bool:
            """Add the operators that compute a tensor to ``order``; return whether they depend on no other tensor."""
            if id(x) in ends:
                reached.add(id(x))
                return True
            if x.op is not None and id(x.op) in order:
                return True
            if x.op is None or not all(map(visit, x.op.inputs)):
                return False
            order[id(x.op)] = x.op
            return True

        leaves = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]
        if not all(map(visit, leaves)) or not reached.issuperset(map(id, operands)):
            return None
        return cls(tuple(order.values()), tuple(operands), results)

    def copy(self, operands: Sequence[Tensor]) -> Any:
        """Copy the operators for other operands of the same dtypes and shapes; return the results."""
        replaced = {id(old): new for old, new in zip(self.operands, operands, strict=True)}
        for op in self.operators:
            copied = copy.copy(op)
            copied.inputs = [replaced.get(id(x), x) for x in op.inputs]
            copied.outputs = [
                Tensor(shape=y.shape, dtype=y.dtype.name, device=y.device, storage=None, trace=(copied, number))
                for number, y in enumerate(op.outputs)
            ]
            replaced.update((id(old), new) for old, new in zip(op.outputs, copied.outputs, strict=True))
        return pytree.tree_map_only(Tensor, lambda x: replaced.get(id(x), x), self.results)
