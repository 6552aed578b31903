"""Copies of operators for other operands.

Models repeat their layers, and hidet takes milliseconds to define an operator. Copying one is much faster.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class LayerPattern:
    """The operators of a layer, of which another call copies those that depend on other operands.

    Attributes
    ----------
    pattern: the operators.
    fixed: the numbers of the operands that another call must have, too, as the results depend on tensors from before
        the layer that come from these.
    """

    pattern: Pattern
    fixed: frozenset[int]

    @classmethod
    def of(
        cls, results: Any, operands: Sequence[Tensor], before: Upstream, constants: Iterable[Tensor]
    ) -> LayerPattern:
        """Collect the operators that compute ``results`` from ``operands``, without those ``before`` the layer."""
        ends, old = {id(x) for x in operands}, before.operators
        order: dict[int, Operator] = {}
        outer: list[Tensor] = []

        def visit(x: Tensor) -> None:
            if id(x) in ends or x.op is None or id(x.op) in order:
                return
            if id(x.op) in old:
                outer.append(x)
                return
            for y in x.op.inputs:
                visit(y)
            order[id(x.op)] = x.op

        for x in pytree.tree_leaves(results):
            if isinstance(x, Tensor):
                visit(x)
        fixed = _fixed(operands, outer, {id(x) for x in constants}) if outer else frozenset[int]()
        return cls(Pattern(tuple(order.values()), tuple(operands), results), fixed)

    def copy(self, operands: Sequence[Tensor]) -> Any:
        """Return the results for other operands of the same dtypes and shapes; None if some must be the same ones."""
        pairs = list(zip(self.pattern.operands, operands, strict=True))
        if any(pairs[number][0] is not pairs[number][1] for number in self.fixed):
            return None
        changed = {id(old) for old, new in pairs if old is not new}
        operators = []
        for op in self.pattern.operators:
            if any(id(x) in changed for x in op.inputs):
                operators.append(op)
                changed.update(map(id, op.outputs))
        return replace(self.pattern, operators=tuple(operators)).copy(operands)


class Upstream:
    """What tensors are computed from. More of them may be added.

    Attributes
    ----------
    operators: the operators between the ``ends`` and the tensors, by identity.
    reached: the ends that the tensors depend on, by identity.
    leaves: the other tensors that they depend on and no operator computes, by identity.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), ends: Set[int] = frozenset()):
        self.ends = ends
        self.operators: dict[int, Operator] = {}
        self.reached: set[int] = set()
        self.leaves: set[int] = set()
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors, and what they are computed from."""
        pending = list(tensors)
        while pending:
            x = pending.pop()
            if id(x) in self.ends:
                self.reached.add(id(x))
            elif x.op is None:
                self.leaves.add(id(x))
            elif id(x.op) not in self.operators:
                self.operators[id(x.op)] = x.op
                pending += x.op.inputs


def _fixed(operands: Sequence[Tensor], outer: Sequence[Tensor], constants: Set[int]) -> frozenset[int]:
    """Number the operands that another call must have, too, where results depend on ``outer`` tensors.

    An outer tensor was made before the layer, in one of two ways. An earlier layer has computed it from operands that
    it shares with this one: these are fixed. Or a lowering has looked behind an operand, at what that is computed from:
    so an operand is fixed that may be computed from the outer tensors. That is one that depends on other operands and
    ``constants`` alone, or any one if the outer tensors themselves depend on something else.
    """
    ends = {id(x) for x in operands}
    found = Upstream(outer, ends)
    is_known = found.leaves <= constants

    def is_fixed(x: Tensor) -> bool:
        if id(x) in found.reached or x.op is None:
            return id(x) in found.reached
        return not is_known or Upstream([x], ends - {id(x)}).leaves <= constants

    return frozenset(number for number, x in enumerate(operands) if is_fixed(x))
