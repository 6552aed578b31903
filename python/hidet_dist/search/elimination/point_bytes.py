"""The bytes that the factors of a network hold: those with a price, and those at chosen program points.

A *label* (:mod:`hidet_dist.search.elimination.frontier`) decides the factors behind a bucket of the elimination. A
program point is *open* there if some of its bytes are decided and others are not, and *decided* if all activations at
it are. Whatever else a plan decides adds the same bytes to all decided points of a label, those that are held during
the whole run. So the greatest of them stands for all, and few columns describe a label:

0     the bytes held during the whole run,
1     the most bytes at any decided point,
2...  the bytes at each open point.

A label that holds no more than another in each column, and costs no more, can replace it in any plan. Each factor
counts above its least entry; the sums of the least entries are known from the start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hidet_dist.native.search.frontier import FactorBytes
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import Network, Table, Tables
from hidet_dist.search.elimination.problem_network import network_of
from hidet_dist.search.elimination.tensor_tables import relaxed_bytes, tensor_bytes
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.prices import Prices

_HALF_BYTE = 0.5  # sums are of whole bytes


class PointBytes:
    """The bytes of the factors of a network that was made from the choices ``kept``.

    The conversions of tensors in ``relaxed`` hold each reader's portion of what they hold for it.
    """

    def __init__(
        self,
        problem: Problem,
        kept: Sequence[Sequence[int]],
        network: Network,
        relaxed: Mapping[int, bool],
        paid: Network,
    ):
        """Take the priced bytes from the network ``paid``, of the same factors without costs."""
        self._problem, self._kept, self._network, self._relaxed = problem, kept, network, relaxed
        self._limits, self._tables = paid.limits, paid.store
        self._paid = paid.factors
        self._always: list[int] = []
        self._most = 0.0
        self._at: dict[int, dict[int, int]] = {}  # by point: the table of each factor that holds some bytes there
        self._least: dict[int, float] = {}
        self._unpriced = Tables(self._limits)  # of bytes at points

    def at(self, points: Sequence[int]) -> FactorBytes:
        """Tabulate the bytes of each factor; no bytes at points, and no bytes of the whole run, without ``points``."""
        points = sorted(set(points))
        if points and not self._always:
            memory = zip(self._problem.memory, self._kept, strict=True)
            always = {e: np.array([line[k] for k in kept], dtype=float) for e, (line, kept) in enumerate(memory)}
            numbers, least = self._above_least(always)
            self._always = [numbers.get(factor, -1) for factor in range(len(self._paid))]
            self._most = self._problem.budget - least + _HALF_BYTE
        more = [m for m in points if m not in self._at]
        for point, at in self._activations(more).items():
            self._at[point], self._least[point] = self._above_least(at)
        held = [self._at[m] for m in points]
        least_at = [self._least[m] for m in points]
        floor = max((least for at, least in zip(held, least_at, strict=True) if not at), default=0.0)
        return FactorBytes(self._tables, self._paid, self._always, held, least_at, floor, self._most)

    def _above_least(self, tables: Mapping[int, Table]) -> tuple[dict[int, int], float]:
        """Subtract from each table its least finite entry.

        Returns the numbers of those that are not constant, and the sum of the least entries. Entries that are not
        finite, of combinations that no plan has, become 0.
        """
        result, total = {}, 0.0
        for factor, table in tables.items():
            finite = np.isfinite(table)
            least = float(table.min(where=finite, initial=np.inf))
            total += least
            above = np.where(finite, table - least, 0.0)
            if above.any():
                result[factor] = self._tables.add(above)
        return result, total

    def _activations(self, points: Sequence[int]) -> dict[int, dict[int, Table]]:
        """Tabulate the bytes of activations at each of some points, in order, by the number of the factor."""
        result: dict[int, dict[int, Table]] = {m: {} for m in points}
        if not points:
            return result
        problem, kept, network = self._problem, self._kept, self._network

        def covered(begin: int, end: int) -> Sequence[int]:
            return points[bisect_left(points, begin) : bisect_right(points, end)]

        for interval in problem.activations.intervals:
            held = covered(interval.begin, interval.end)
            if held:
                line = np.array([interval.nbytes[k] for k in kept[interval.entity]], dtype=float)
                for m in held:
                    result[m][interval.entity] = result[m].get(interval.entity, 0.0) + line
        free = problem.without_costs
        at = {m: Prices.at_point(m, 1.0, problem.activations.points) for m in points}
        for position, own in enumerate(free.equal_parts.tensors):
            tensor, group = own.tensor, own.group
            held = covered(own.begin, own.end)
            if own.memory is None or not held:
                continue
            if tensor in self._relaxed:
                portions = relaxed_bytes(kept, own, self._relaxed[tensor])
                for factor, edge, table in zip(network.of_tensor(position), group, portions, strict=True):
                    for m in covered(edge.begin, edge.end):
                        result[m][factor] = table
                continue
            for m in held:
                self._limits.check()
                made = tensor_bytes(kept, self._unpriced, at[m], own)
                for factor, given in zip(network.of_tensor(position), made, strict=True):
                    result[m][factor] = self._unpriced.tables[given.table]
        return result


def paid_network(instance: EliminationInstance, exact: Collection[int], readers_limit: int, paired: int) -> Network:
    """Make the network of the priced bytes alone, in seconds, with the factors of one with costs in its tables."""
    own = Tables(instance.tables.limits)
    own.quantum = instance.tables.quantum
    paid = replace(instance, problem=instance.problem.without_costs, tables=own)
    return network_of(paid, exact, readers_limit, paired)[0]
