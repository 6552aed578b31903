"""Variables, tables over them, and their elimination.

Eliminating a variable adds up the tables that it occurs in and takes the minimum over it, which leaves a table over its
neighbours (Bertele and Brioschi, Nonserial Dynamic Programming, 1972; Dechter's bucket elimination, AI 113, 1999). The
native library does that; tables are numbered there by content, and the elimination of equal tables in the same way is
looked up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hidet_dist.native.search.elimination import NativeNetwork, Table, TableStore, TooWide
from hidet_dist.native.search.frontier import FactorBytes, LabelLimits, NativeFrontier
from hidet_dist.search import tuning
from hidet_dist.search.elimination.layout import TensorTable, VariableLayout
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.limits import Limits
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.equal_parts import EqualParts, Integers

if TYPE_CHECKING:
    from hidet_dist.search.elimination.eliminate import Solved

__all__ = ["Network", "Table", "Tables", "TooWide"]


@dataclass
class KnownTables:
    """The tables of a problem's entities and tensors so far, by all that they depend on beside the problem.

    Attributes
    ----------
    equal: the equal parts of the problem.
    relaxation: how its tensors are relaxed.
    entities: the number of an entity's table.
    tensors: the tables of a tensor; None if it is to be relaxed.
    relaxed: the tables of a relaxed one.
    """

    equal: EqualParts
    relaxation: TensorRelaxation
    entities: dict[Hashable, int] = field(default_factory=dict)
    tensors: dict[Hashable, tuple[TensorTable, ...] | None] = field(default_factory=dict)
    relaxed: dict[Hashable, tuple[TensorTable, ...]] = field(default_factory=dict)


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
    peaks: the entities and the table, None if too large, of joint peaks, by program points, tensors and choices. They
        do not name the problem: all networks in one object are those of one problem.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self.tables = TableStore(self.limits.nbytes)
        self.quantum = 0.0
        self.widest = 0.0
        self.last: Solved | None = None
        self.peaks: dict[Hashable, tuple[tuple[int, ...], int | None]] = {}
        self._known: KnownTables | None = None
        self._left_numbers: dict[tuple[int, ...], int] = {}
        self._left: tuple[Sequence[Sequence[int]], Integers] | None = None
        self._numbers: dict[Hashable, int] = {}

    def left(self, kept: Sequence[Sequence[int]]) -> Integers:
        """Number the choices ``kept`` of each entity: equal ones, in all networks, have the same number.

        The last list is only read once, and must not be changed.
        """
        if self._left is None or self._left[0] is not kept:
            numbers = self._left_numbers
            each = [numbers.setdefault(tuple(choices), len(numbers)) for choices in kept]
            self._left = kept, np.array(each, dtype=np.int64)
        return self._left[1]

    def known_of(self, problem: Problem, relaxation: TensorRelaxation) -> KnownTables:
        """Return the tables of a problem's entities and tensors so far."""
        known = self._known
        if known is None or known.equal is not problem.equal_parts or known.relaxation is not relaxation:
            known = self._known = KnownTables(problem.equal_parts, relaxation)
        return known

    def rounded(self, table: Table) -> Table:
        """Round down to multiples of the quantum: a lower bound stays a lower bound."""
        return np.floor(table / self.quantum) * self.quantum if self.quantum else table

    def make_room(self) -> None:
        """Drop the tables of earlier eliminations if they take much of the memory limit."""
        if self.tables.nbytes > tuning.TABLES_KEPT * self.limits.nbytes:
            self.tables = TableStore(self.limits.nbytes)
            self.last = None
            self.peaks.clear()
            self._known = None
            self._numbers.clear()

    def reserve(self, entries: int) -> None:
        """Check that a table of so many entries fits the memory limit, before it is made. Raises TooWide."""
        _reserve(self.tables, self.limits, entries)

    def find(self, key: Hashable) -> int | None:
        """Return the number of the table with this key."""
        return self._numbers.get(key)

    def add(self, key: Hashable, table: Table) -> int:
        """Number a table."""
        number = self._numbers[key] = self.tables.add(table)
        return number


def _reserve(store: TableStore, limits: Limits, entries: int) -> None:
    if store.nbytes + 8 * entries > limits.nbytes:
        raise TooWide


class Network:
    """Variables, the tables over them, and their elimination.

    It does not refer to the :class:`Tables` that it was made of, which keep the last network: what refers to itself is
    not freed during a search, where the garbage collector is paused.

    Attributes
    ----------
    store, limits: where the tables are kept, and the limits of its work.
    widest: the additions of the largest step of its elimination.
    sizes: the number of values of each variable.
    factors: the tables by number, in order; those of the entities come first.
    """

    def __init__(self, tables: Tables, layout: VariableLayout, joint: Sequence[tuple[int, Sequence[int]]] = ()):
        """Take the factors of a layout, and further ones: the numbers of their tables, and the variables."""
        self.store, self.limits, self.widest = tables.tables, tables.limits, 0.0
        self.sizes = layout.sizes.tolist()
        self.factors: list[int] = [*layout.factors.tolist(), *(table for table, _ in joint)]
        self._layout = layout
        own = np.cumsum([len(layout.variables), *(len(variables) for _, variables in joint)])
        ends = np.concatenate((layout.ends, own[1:]))
        every = np.concatenate((layout.variables, *(np.array(variables, dtype=np.int64) for _, variables in joint)))
        self._native = NativeNetwork(tables.tables, layout.sizes, self.factors, ends, every, tables.limits.check)
        self._marginals: list[Table] = []

    def of_tensor(self, position: int) -> Sequence[int]:
        """Return the numbers, among the factors, of the tables of the tensor at this position of the problem's."""
        return self._layout.of_tensor(position)

    def paid(self, position: int, values: Sequence[int]) -> float:
        """Sum up the tables of the tensor at this position of the problem's, for values of all variables."""
        scopes = ((factor, self._layout.scope(factor)) for factor in self.of_tensor(position))
        return sum(float(self.store[self.factors[f]][tuple(values[v] for v in scope)]) for f, scope in scopes)

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
        _reserve(self.store, self.limits, math.prod(shape))
        return self._native.least_over(kept, shape) + self.constant

    def marginals(self, count: int) -> list[Table]:
        """Find the least sum for each value of the first ``count`` variables, after :meth:`minimum`. Raises TooWide."""
        if math.isinf(self.constant):
            return [np.full(size, math.inf) for size in self.sizes[:count]]
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

    def least_work(self) -> tuple[float, float]:
        """Compute the additions of an elimination, and of its largest step, in the better of two orders, however many.

        Steps of equally many additions count once: those of equal layers are equal, and elimination looks up all but
        the first.
        """
        return min(self._native.order(math.inf, (), by_table)[1:] for by_table in (False, True))

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
        self.widest = most
        self._native.eliminate(order)
