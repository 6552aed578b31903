"""hidet 0.6.1 takes a permutation of symbolic dims for a reshape where it fuses it with a product on tensor cores.

It then writes the product's result unpermuted: heads that are split off tokens, whose number is symbolic, come out
mixed up. ``RearrangeTask`` has the mapping of tiles of a permutation only for dims that are numbers, and otherwise that
of a reshape. Here tiles are not derived for such operators. hidet then writes the result element by element, by the
definitions of the operators, which are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hidet.graph import Operator
from hidet.graph.ops.fusion.apply_prologue_epilogue import TileDerivation
from hidet.graph.ops.transform import RearrangeTask
from hidet.ir.expr import is_constant
from hidet.ir.task import Task

from hidet_dist.compat.replacing import replaced

_forward = TileDerivation._forward


def permutes_symbolic_dims(task: Task) -> bool:
    """Whether a task changes the order of dims, of which some are symbolic; dims of 1 have no place in the order."""
    if not isinstance(task, RearrangeTask) or is_constant(*task.inputs[0].shape):
        return False
    shape = task.inputs[0].shape
    order = [dim for dims in task.plan for dim in dims if not (is_constant(shape[dim]) and int(shape[dim]) == 1)]
    return order != sorted(order)


def forward(self: TileDerivation, ops: Sequence[Operator]) -> None:
    """Derive tiles, from a product on. Raises ValueError for a permutation of symbolic dims."""
    for op in ops:
        if permutes_symbolic_dims(op.task):
            raise ValueError(f"{op.name} permutes symbolic dims.")
    _forward(self, ops)


@contextmanager
def symbolic_tiles() -> Iterator[None]:
    """Derive tiles only where they are right while the block runs."""
    with replaced(TileDerivation, {"_forward": forward}):
        yield
