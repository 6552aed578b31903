"""Variables, tables over them, and their elimination.

Eliminating a variable adds up the tables that it occurs in and takes the minimum over it, which leaves a table over its
neighbours (Bertele and Brioschi, Nonserial Dynamic Programming, 1972; Dechter's bucket elimination, AI 113, 1999). The
native library does that; tables are numbered there by content, and the elimination of equal tables in the same way is
looked up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hidet_dist.runtime.native.elimination import NativeNetwork, Table, TableStore, TooWide
from hidet_dist.runtime.native.frontier import FactorBytes, LabelLimits, NativeFrontier
from hidet_dist.search import tuning
from hidet_dist.search.limits import Limits

if TYPE_CHECKING:
    from hidet_dist.search.eliminate import Solved

__all__ = ["Factor", "Network", "Table", "Tables", "TensorTable", "TooWide"]


Factor = tuple[int, tuple[int, ...]]  # the number of a table, and the variable of each of its dims


class Tables:
    """Numbered tables; tables of the same key are one table, computed once.

    Costs are multiples of a quantum so small that their sums are exact in double precision. Sums of the same terms are
    then equal to the last bit, in any order of addition. Along a chain of equal layers, the table that sums up all
    layers behind, less its least entry, soon stays the same: further layers are looked up.

    Attributes
    ----------
    tables: the tables by number.
    quantum: what costs are multiples of, in seconds; 0 until it is known.
    widest: the additions of the largest step of an elimination so far.
    last: the last network that was eliminated without tensors treated exactly.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self.tables = TableStore(self.limits.nbytes)
        self.quantum = 0.0
        self.widest = 0.0
        self.last: Solved | None = None
        self._numbers: dict[Hashable, int] = {}

    def rounded(self, table: Table) -> Table:
        """Round down to multiples of the quantum: a lower bound stays a lower bound."""
        return np.floor(table / self.quantum) * self.quantum if self.quantum else table

    def make_room(self) -> None:
        """Drop the tables of earlier eliminations if they take much of the memory limit."""
        if self.tables.nbytes > tuning.TABLES_KEPT * self.limits.nbytes:
            self.tables = TableStore(self.limits.nbytes)
            self.last = None
            self._numbers.clear()

    def reserve(self, entries: int) -> None:
        """Check that a table of so many entries fits the memory limit, before it is made. Raises TooWide."""
        if self.tables.nbytes + 8 * entries > self.limits.nbytes:
            raise TooWide

    def find(self, key: Hashable) -> int | None:
        """Return the number of the table with this key."""
        return self._numbers.get(key)

    def add(self, key: Hashable, table: Table) -> int:
        """Number a table."""
        number = self._numbers[key] = self.tables.add(table)
        return number


@dataclass(frozen=True)
class TensorTable:
    """A table for a network, wherever its tensor is: the number of the table, and its dims.

    A dim has the number of the entity among the tensor's producer and readers. If the dim is not over that entity's
    choices but over its specs, it also has the number of specs, and of the table that ties them to the choices.
    """

    table: int
    dims: tuple[tuple[int, int, int | None], ...]


class Network:
    """Variables, the tables over them, and their elimination.

    Attributes
    ----------
    sizes: the number of values of each variable.
    of_tensor: for each tensor the numbers of its tables among ``given``.
    """

    def __init__(self, tables: Tables):
        self.tables = tables
        self.sizes: list[int] = []
        self.of_tensor: dict[int, list[int]] = {}
        self._given: list[int] = []  # the tables by number; the variables of table n end at _ends[n]
        self._ends: list[int] = []
        self._variables: list[int] = []
        self._marginals: list[Table] = []

    def variable(self, size: int) -> int:
        """Add a variable of ``size`` values, and return its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def give(self, table: int, variables: Sequence[int]) -> int:
        """Add a table over variables, before the elimination; return its number among ``given``."""
        self._given.append(table)
        self._variables.extend(variables)
        self._ends.append(len(self._variables))
        return len(self._given) - 1

    def give_at(self, given: TensorTable, ends: Sequence[int]) -> int:
        """Add a table over the choices or the specs of the entities ``ends``; return its number among ``given``."""
        variables = []
        for end, size, tie in given.dims:
            variable = ends[end]
            if tie is not None:
                variable = self.variable(size)
                self.give(tie, (ends[end], variable))
            variables.append(variable)
        return self.give(given.table, variables)

    @cached_property
    def given(self) -> list[Factor]:
        """The tables that were added before the elimination, in order; those of the entities come first."""
        ends = [0, *self._ends]
        return [
            (table, tuple(self._variables[begin:end]))
            for table, begin, end in zip(self._given, ends, self._ends, strict=False)
        ]

    @cached_property
    def _native(self) -> NativeNetwork:
        """The network in the native library, once all tables were given."""
        return NativeNetwork(
            self.tables.tables, self.sizes, self._given, self._ends, self._variables, self.tables.limits.check
        )

    @property
    def constant(self) -> float:
        """The sum of the offsets of all tables."""
        return self._native.constant

    def minimum(self) -> tuple[float, list[int]]:
        """Find the least sum, and values of all variables with that sum. Raises TooWide."""
        self._eliminate(())
        return self.constant, self._native.values()

    def least_over(self, kept: Sequence[int]) -> Table:
        """Tabulate the least sum for all values of the variables ``kept``, in their order. Raises TooWide."""
        self._eliminate(kept)
        shape = [self.sizes[v] for v in kept]
        self.tables.reserve(math.prod(shape))
        return self._native.least_over(kept, shape) + self.constant

    def marginals(self, count: int) -> list[Table]:
        """Find the least sum for each value of the first ``count`` variables, after :meth:`minimum`. Raises TooWide."""
        if len(self._marginals) != count:
            self._marginals = self._native.marginals(self.sizes[:count], tuning.MARGINAL_LIMIT)
        return self._marginals

    def frontier(self, factor_bytes: FactorBytes, limits: LabelLimits) -> NativeFrontier:
        """List the assignments below a sum and within bytes that no other one beats, after :meth:`marginals`.

        Raises TooWide.
        """
        return NativeFrontier(self._native, factor_bytes, limits)

    def most_work(self) -> float:
        """Compute the additions of the largest step of an elimination."""
        return self._native.order(tuning.WORK_LIMIT)[2]

    def _eliminate(self, kept: Sequence[int]) -> None:
        """Eliminate all variables but ``kept``. Raises TooWide if a step has too much work.

        One candidate for the order eliminates the variable of least work next. Where that leads to a wide step, another
        candidate eliminates the variable that leaves the smallest table. The candidate of less total work is chosen.
        """
        order, work, most = self._native.order(tuning.WORK_LIMIT, kept)
        if most > tuning.WIDE_WORK and work > tuning.ORDER_WORK * len(self.sizes):
            other = self._native.order(tuning.WORK_LIMIT, kept, by_table=True)
            if other[1] < work:
                order, work, most = other
        if most > tuning.WORK_LIMIT:
            raise TooWide
        self.tables.widest = max(self.tables.widest, most)
        self._native.eliminate(order)
