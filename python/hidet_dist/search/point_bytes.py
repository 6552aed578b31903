"""The bytes that partial plans hold at chosen program points.

A *label* (:mod:`hidet_dist.search.frontier`) decides the factors behind a bucket of the elimination. A program point is
*open* there if some of its bytes are decided and others are not, and *decided* if all activations at it are. Whatever
else a plan decides adds the same bytes to all decided points of a label, those that are held during the whole run. So
the greatest of them stands for all, and few columns describe a label:

0     the bytes held during the whole run,
1     the most bytes at any decided point,
2...  the bytes at each open point.

A label that holds no more than another in each column, and costs no more, can replace it in any plan. Each factor
counts above its least entry; the sums of the least entries are known from the start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hidet_dist.search.limits import Limits
from hidet_dist.search.network import Network, Table, Tables
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import Problem
from hidet_dist.search.tensor_tables import least_held, overlapping, tensor_bytes

_HALF_BYTE = 0.5  # sums are of whole bytes


class PointBytes:
    """The bytes of labels at the program points ``points``; no columns if there are none."""

    def __init__(
        self,
        problem: Problem,
        kept: Sequence[Sequence[int]],
        network: Network,
        relaxed: Sequence[int],
        points: Sequence[int],
        limits: Limits,
    ):
        """Tabulate the bytes of each factor of a network made from the choices ``kept``.

        The conversions of tensors in ``relaxed`` hold each reader's share of what they hold for it.
        """
        self.points = tuple(sorted(set(points)))
        always: dict[int, Table] = {}
        if self.points:
            memory = zip(problem.memory, kept, strict=True)
            always = {e: np.array([line[k] for k in choices], dtype=float) for e, (line, choices) in enumerate(memory)}
        self._always, least = _above_least(always)
        self._most = problem.budget - least + _HALF_BYTE
        self._at: dict[int, dict[int, Table]] = {}  # by point: the bytes of each factor that holds some there
        self._least: dict[int, float] = {}
        for point, at in _activations(problem, kept, network, relaxed, self.points, limits).items():
            self._at[point], self._least[point] = _above_least(at)
        self._floor = max((self._least[m] for m in self.points if not self._at[m]), default=0.0)
        self._decided: list[dict[int, int]] = []  # by node: the number of factors of each point that are decided
        self._open: list[list[int]] = []

    def add_node(self, factors: Sequence[int], behind: Sequence[int]) -> None:
        """Add a node, which decides ``factors`` and joins labels of the nodes ``behind`` it."""
        decided = dict.fromkeys(self.points, 0)
        for m in self.points:
            decided[m] = sum(g in self._at[m] for g in factors) + sum(self._decided[n][m] for n in behind)
        self._decided.append(decided)
        self._open.append([m for m in self.points if 0 < decided[m] < len(self._at[m])])

    def width(self, node: int) -> int:
        """Count the columns of a node's labels."""
        return 2 + len(self._open[node]) if self.points else 0

    def joined(
        self,
        node: int,
        labels: Sequence[tuple[int, Table]],
        own: Callable[[Mapping[int, Table]], Table],
        factors: Sequence[int] = (),
    ) -> Table:
        """Compute the columns of a node's labels, line by line.

        ``labels`` has the nodes behind with the columns of the labels that each line extends. ``own`` sums tables of
        the factors that the node decides, for each line.
        """
        if not self.points:
            return np.zeros((len(own({})), 0))
        always = own(self._always)
        for _, columns in labels:
            always = always + columns[:, 0]
        most = always + self._floor
        touched: dict[int, Table] = {}
        for behind, columns in labels:
            most = np.maximum(most, columns[:, 1] + (always - columns[:, 0]))
            for column, m in enumerate(self._open[behind], 2):
                touched[m] = touched.get(m, 0.0) + (columns[:, column] - columns[:, 0])
        for m in self.points:
            if any(g in self._at[m] for g in factors):
                touched[m] = touched.get(m, 0.0) + own(self._at[m])
        for m, nbytes in touched.items():
            if self._decided[node][m] == len(self._at[m]):
                most = np.maximum(most, always + nbytes + self._least[m])
        return np.column_stack([always, most, *(always + touched[m] for m in self._open[node])])

    def fitting(self, node: int, columns: Table) -> npt.NDArray[np.int64]:
        """Select the labels that can still fit the budget."""
        fit = np.ones(len(columns), dtype=bool)
        if self.points:
            fit &= columns[:, 1] <= self._most
            for column, m in enumerate(self._open[node], 2):
                fit &= columns[:, column] + self._least[m] <= self._most
        return np.flatnonzero(fit)


def _above_least(tables: Mapping[int, Table]) -> tuple[dict[int, Table], float]:
    """Subtract from each table its least finite entry; return those that are not constant, and the sum of the least.

    Entries that are not finite, of combinations that no plan has, become 0.
    """
    result, total = {}, 0.0
    for factor, table in tables.items():
        finite = table[np.isfinite(table)]
        least = float(finite.min())
        total += least
        if np.any(finite > least):
            result[factor] = np.where(np.isfinite(table), table - least, 0.0)
    return result, total


def _activations(
    problem: Problem,
    kept: Sequence[Sequence[int]],
    network: Network,
    relaxed: Sequence[int],
    points: Sequence[int],
    limits: Limits,
) -> dict[int, dict[int, Table]]:
    """Tabulate the bytes of activations at each point, by the number of the factor in ``network.given``."""
    result: dict[int, dict[int, Table]] = {m: {} for m in points}
    if not points:
        return result

    def covered(begin: int, end: int) -> Sequence[int]:
        return points[bisect_left(points, begin) : bisect_right(points, end)]

    for interval in problem.activations.intervals:
        held = covered(interval.begin, interval.end)
        if held:
            line = np.array([interval.nbytes[k] for k in kept[interval.entity]], dtype=float)
            for m in held:
                result[m][interval.entity] = result[m].get(interval.entity, 0.0) + line
    tables, free, count = Tables(limits), problem.without_costs, problem.activations.points
    at = {m: Prices.at_point(m, 1.0, count) for m in points}
    for tensor, group in free.groups.items():
        memory = problem.activations.tensors.get(tensor)
        if memory is None:
            continue
        if tensor in relaxed:
            sources = {group[0].produced[k] for k in kept[group[0].producer]}
            nbytes, readers = least_held(memory, sorted(sources)), overlapping(group)
            for factor, edge, beside in zip(network.of_tensor[tensor], group, readers, strict=True):
                held = covered(edge.begin, edge.end)
                if held:
                    line = np.array([float(nbytes[edge.consumed[k]] // beside) for k in kept[edge.consumer]])
                    for m in held:
                        result[m][factor] = line
            continue
        for m in covered(min(edge.begin for edge in group), max(edge.end for edge in group)):
            limits.check()
            made = tensor_bytes(free, kept, tables, at[m], tensor)
            for factor, given in zip(network.of_tensor[tensor], made, strict=True):
                result[m][factor] = tables.tables[given.table]
    return result
