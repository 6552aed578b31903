"""What is eliminated: a problem with prices on memory, and the choices that its entities have left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.prices import Prices


class EliminationInstance(NamedTuple):
    """A problem to eliminate.

    Attributes
    ----------
    problem: the problem.
    kept: the choices of each entity that are left.
    tables: the tables of the eliminations so far, with their limits.
    prices: the prices of memory.
    """

    problem: Problem
    kept: Sequence[Sequence[int]]
    tables: Tables
    prices: Prices
