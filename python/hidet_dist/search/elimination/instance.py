"""What is eliminated: a problem with prices on memory, and the choices that its entities have left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.prices import Prices


@dataclass(frozen=True)
class EliminationInstance:
    """A problem to eliminate.

    Attributes
    ----------
    problem: the problem.
    kept: the choices of each entity that are left.
    tables: the tables of the eliminations so far, with their limits.
    prices: the prices of memory.
    relaxation: what the eliminations of the same search learnt of relaxed tensors, which this one adds to.
    """

    problem: Problem
    kept: Sequence[Sequence[int]]
    tables: Tables
    prices: Prices
    relaxation: TensorRelaxation = field(default_factory=TensorRelaxation)
