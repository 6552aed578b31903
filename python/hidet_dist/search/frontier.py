"""Pareto frontiers of seconds and priced bytes: what prices on memory alone leave undecided.

At the best prices a gap remains between the plan and the bound: a layer's weights are split or whole, and the budget
rarely comes out even. The plans in that gap are few. So the elimination is repeated with all partial plans that can
still become a plan of less than a given cost, in place of the least one alone: *labels* with their cost and their
priced bytes (the label-setting method for shortest paths with a resource constraint; Desrochers and Soumis, INFOR
26(3), 1988). The elimination before it gives the least cost of completing a label, which excludes almost all.

The budget of all program points is relaxed to one inequality: the priced bytes are at most what the budget costs at
these prices. So a bound is proven for every plan that fits; whether a plan fits remains to be checked. With
``points``, labels have the bytes at these points besides (:mod:`hidet_dist.search.point_bytes`): plans fit there, too,
and all plans that do are considered, but there are more labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from hidet_dist.runtime.native.labels import undominated
from hidet_dist.search import tuning
from hidet_dist.search.eliminate import minimized
from hidet_dist.search.network import Bucket, Factor, Network, Table, Tables, TooWide, sum_of
from hidet_dist.search.point_bytes import PointBytes
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem_network import network_of

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Labels:
    """The partial plans behind a bucket, in the order of the values of its neighbours.

    Attributes
    ----------
    starts: the number of the first label of each combination of the neighbours' values, and the number of all labels.
    excess: the priced cost of each label in seconds, above the least of its combination.
    paid: the priced bytes of each label, in seconds.
    bound: the least priced cost of plans that extend each label.
    held: the bytes of each label at program points, in the columns of :class:`PointBytes`.
    entry: the position of each label in the table over the neighbours and the bucket's variable.
    behind: for each bucket behind this one, the number of the label that a label extends.
    """

    starts: _Numbers
    excess: Table
    paid: Table
    bound: Table
    held: Table
    entry: _Numbers
    behind: list[_Numbers]

    def below(self, limit: float) -> npt.NDArray[np.bool_] | None:
        """Tell of each label whether a plan below a limit can extend it; None if that is true of all."""
        below = self.bound < limit
        return None if below.all() else below


class Frontier:
    """The plans that may cost less than a limit, by increasing cost.

    Attributes
    ----------
    limit: the seconds below which all plans were considered: less than asked for if there are too many partial plans.
    seconds: for each plan a lower bound of its cost, without the price of memory; exact unless tensors were relaxed.
    relaxed: the tensors of many readers that had to be relaxed.
    """

    def __init__(
        self,
        problem: Problem,
        kept: Sequence[Sequence[int]],
        tables: Tables,
        prices: Prices,
        limit: float,
        exact: Sequence[int] = (),
        points: Sequence[int] = (),
    ):
        """Find all Pareto-optimal plans of less than ``limit`` seconds, among the choices ``kept``.

        Tensors in ``exact`` are never relaxed. The budget holds for the priced bytes, and at ``points``. Where there
        are too many partial plans, the limit is lowered to the bounds of those beyond.

        Raises
        ------
        TooWide
            When the graph is too densely connected, or there are too many partial plans below any limit.
        OutOfTimeError
            When the time limit is reached.
        """
        self._kept, self._tables, self._exact = kept, tables, exact
        self._entries = 0  # numbers of all labels so far
        self._budget = prices.total * problem.budget
        self._network = self._bounded(problem, prices)
        self._limit, self._lowered = limit + self._budget, False
        position = {bucket.variable: i for i, bucket in enumerate(self._network.buckets)}
        self._behind: list[list[int]] = [[] for _ in self._network.buckets]
        self._roots: list[int] = []
        for i, bucket in enumerate(self._network.buckets):
            if bucket.neighbours:
                self._behind[min(position[u] for u in bucket.neighbours)].append(i)
            else:
                self._roots.append(i)
        self._bytes = PointBytes(problem, kept, self._network, self.relaxed, points, tables.limits)
        paid = self._paid(problem, prices)
        waiting: dict[Factor, list[int]] = {}  # equal factors are in the same bucket
        for number, factor in enumerate(self._network.given):
            waiting.setdefault(factor, []).append(number)
        self._labels: list[_Labels] = []
        for i, bucket in enumerate(self._network.buckets):
            factors = list(bucket.factors)
            for n in self._behind[i]:
                factors.remove((self._network.buckets[n].message, self._network.buckets[n].neighbours))
            self._labels.append(self._of_bucket(i, [waiting[factor].pop() for factor in factors], paid))
        self.seconds, self._last = self._complete()
        self.limit = min(limit, self._limit - self._budget) if self._lowered else limit

    def __len__(self) -> int:
        return len(self.seconds)

    def plans(self) -> Iterator[tuple[int, ...]]:
        """Yield the choices of each plan, in the order of ``seconds``."""
        for number in range(len(self)):
            waiting = [(root, int(self._last[root][number])) for root in self._roots]
            choices = [0] * len(self._network.sizes)
            while waiting:
                bucket, label = waiting.pop()
                labels, variable = self._labels[bucket], self._network.buckets[bucket].variable
                choices[variable] = int(labels.entry[label]) % self._network.sizes[variable]
                waiting += [(n, int(of[label])) for n, of in zip(self._behind[bucket], labels.behind, strict=True)]
            yield tuple(kept[k] for kept, k in zip(self._kept, choices, strict=False))

    def _bounded(self, problem: Problem, prices: Prices) -> Network:
        """Eliminate all variables for the least priced costs, inside and outside each bucket."""
        # With other limits, other tensors than those in ``exact`` would be relaxed.
        for readers_limit in tuning.READERS_LIMITS[:1] if self._exact else tuning.READERS_LIMITS:
            try:
                solved = minimized(problem, self._kept, self._tables, prices, self._exact, readers_limit)
                solved.network.marginals(len(self._kept))
            except TooWide:
                continue
            self._readers_limit, self.relaxed = readers_limit, solved.relaxed
            return solved.network
        raise TooWide

    def _paid(self, problem: Problem, prices: Prices) -> dict[int, Table]:
        """Map each given table, by number, to that of its priced bytes alone, in seconds."""
        tables = Tables(self._tables.limits)
        tables.quantum = self._tables.quantum
        network, _ = network_of(problem.without_costs, self._kept, tables, prices, self._exact, self._readers_limit)
        return {number: tables.tables[table] for number, (table, _) in enumerate(network.given)}

    def _of_bucket(self, number: int, own: list[int], paid: dict[int, Table]) -> _Labels:
        """Extend the labels of the buckets behind a bucket by its ``own`` given tables, and drop dominated ones."""
        network, tables = self._network, self._tables
        tables.limits.check()
        bucket, behind = network.buckets[number], self._behind[number]
        scope = (*bucket.neighbours, bucket.variable)
        shape = tuple(network.sizes[u] for u in scope)
        tables.reserve(3 * math.prod(shape))
        inside = np.broadcast_to(sum_of(network.parts(bucket.factors, scope)), shape)
        above, offset = network.outside[bucket.variable]
        least = (inside + tables.tables[above][..., None] + offset).ravel()
        entry = np.flatnonzero(least < self._limit)
        labels_paid = self._sum_at(own, paid, scope, shape, entry)
        excess = np.zeros(len(entry))
        extended: list[_Numbers] = []
        for n in behind:
            at = self._behind_entry(network.buckets[n], scope, shape, entry)
            which, label = self._joined(self._labels[n], at)
            more = excess[which] + self._labels[n].excess[label]
            left = np.flatnonzero(least[entry[which]] + more < self._limit)
            which, label = which[left], label[left]
            excess, entry = more[left], entry[which]
            labels_paid = labels_paid[which] + self._labels[n].paid[label]
            extended = [*(of[which] for of in extended), label]
        cost = inside.ravel()[entry] + excess
        bound = least[entry] + excess
        combination = entry // shape[-1]
        excess = cost - (tables.tables[bucket.message].ravel()[combination] + bucket.offset)
        self._bytes.add_node(own, behind)
        # The labels, sorted copies of them, and those of all buckets so far.
        line = 4 + len(behind) + self._bytes.width(number)
        tables.reserve(self._entries + 3 * len(entry) * line)
        held = self._bytes.joined(
            number,
            [(n, self._labels[n].held[of]) for n, of in zip(behind, extended, strict=True)],
            lambda given: self._sum_at(own, given, scope, shape, entry),
            own,
        )
        left = self._left(number, combination, labels_paid, cost - labels_paid, bound, held)
        self._entries += len(left) * line
        starts = np.searchsorted(combination[left], np.arange(math.prod(shape[:-1]) + 1))
        behind_left = [of[left] for of in extended]
        return _Labels(starts, excess[left], labels_paid[left], bound[left], held[left], entry[left], behind_left)

    def _left(
        self, node: int, combination: _Numbers, paid: Table, seconds: Table, bound: Table, held: Table
    ) -> _Numbers:
        """Select the labels that can fit and that no other one of the same combination dominates.

        Lowers the limit if there are too many.
        """
        fit = self._bytes.fitting(node, held)
        while True:
            if not self._bytes.points:
                left: _Numbers | None = _undominated(combination[fit], paid[fit], seconds[fit])
            else:
                # Bounds of cost include the price of memory, so a dominating label must not have more priced bytes.
                columns = np.column_stack([seconds[fit], paid[fit], held[fit]])
                left = undominated(combination[fit], columns, tuning.COMPARISONS)
            if left is not None:
                fit = fit[left]
                if len(fit) <= tuning.STEP_LABELS:
                    return fit
            most = len(fit) // 2 if left is None else tuning.STEP_LABELS
            self._limit, self._lowered = float(np.partition(bound[fit], most)[most]), True
            fit = fit[bound[fit] < self._limit]
            if left is not None:
                return fit

    def _joined(self, labels: _Labels, at: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Pair each position ``at`` with all labels there: the number of the position, and that of the label.

        Lowers the limit if there are too many pairs.
        """
        for _ in range(tuning.LIMIT_HALVINGS):
            below = labels.below(self._limit)
            starts = labels.starts if below is None else np.concatenate([[0], np.cumsum(below)])[labels.starts]
            first = starts[at]
            counts = starts[at + 1] - first
            count = int(counts.sum())
            if count <= tuning.MOST_LABELS:
                which = np.repeat(np.arange(len(at)), counts)
                label = np.arange(count) - np.repeat(np.cumsum(counts) - counts - first, counts)
                return which, label if below is None else np.flatnonzero(below)[label]
            self._limit, self._lowered = (self._network.constant + self._limit) / 2, True
        raise TooWide

    def _sum_at(
        self,
        numbers: Sequence[int],
        given: Mapping[int, Table],
        scope: tuple[int, ...],
        shape: tuple[int, ...],
        at: _Numbers,
    ) -> Table:
        """Sum the tables of some given factors over ``scope``, at the positions ``at``; a missing table is 0."""
        network = self._network
        parts = [network.in_scope(given[n], network.given[n][1], scope) for n in numbers if n in given]
        return np.broadcast_to(sum_of(parts), shape).ravel()[at]

    def _behind_entry(
        self, behind: Bucket, scope: tuple[int, ...], shape: tuple[int, ...], entry: _Numbers
    ) -> _Numbers:
        """Compute the position, in the table of the message from ``behind``, of positions in a table over ``scope``."""
        stride = dict(zip(scope, [math.prod(shape[i + 1 :]) for i in range(len(shape))], strict=True))
        at = np.zeros(len(entry), dtype=np.int64)
        for u in behind.neighbours:
            at = at * self._network.sizes[u] + entry // stride[u] % self._network.sizes[u]
        return at

    def _complete(self) -> tuple[Table, dict[int, _Numbers]]:
        """Combine the labels of all roots: the plans' seconds in increasing order, and the label of each root."""
        excess, paid, node = np.zeros(1), np.zeros(1), len(self._labels)
        self._bytes.add_node((), ())
        held = self._bytes.joined(node, (), partial(_zeros, 1))
        last: dict[int, _Numbers] = {}
        for root in self._roots:
            self._tables.limits.check()
            labels = self._labels[root]
            which, label = self._joined(labels, np.zeros(len(excess), dtype=np.int64))
            more, most = excess[which] + labels.excess[label], paid[which] + labels.paid[label]
            left = np.flatnonzero(self._network.constant + more < self._limit)
            which, label, excess, paid = which[left], label[left], more[left], most[left]
            self._bytes.add_node((), (node, root))
            parts = (node, held[which]), (root, labels.held[label])
            node += 1
            held = self._bytes.joined(node, parts, partial(_zeros, len(excess)))
            bound = self._network.constant + excess
            left = self._left(node, np.zeros(len(excess), dtype=np.int64), paid, excess - paid, bound, held)
            excess, paid, held = excess[left], paid[left], held[left]
            last = {one: of[which[left]] for one, of in last.items()}
            last[root] = label[left]
        seconds = self._network.constant + excess - paid
        fits = paid <= self._budget * (1 + tuning.ROUNDING)
        plans = np.flatnonzero(fits & (seconds < self._limit - self._budget))
        plans = plans[np.argsort(seconds[plans], kind="stable")]
        return seconds[plans], {one: of[plans] for one, of in last.items()}


def _zeros(count: int, _tables: Mapping[int, Table]) -> Table:
    return np.zeros(count)


def _undominated(combination: _Numbers, paid: Table, seconds: Table) -> _Numbers:
    """Select the labels that no other one of the same combination beats in both, in the order of combinations."""
    order = np.lexsort((seconds, paid, combination))
    rank = np.unique(seconds, return_inverse=True)[1].reshape(-1)[order]
    # Ranks of later combinations are all below those of earlier ones, so that one pass serves all combinations.
    shifted = rank - combination[order] * (len(order) + 1)
    best = np.minimum.accumulate(shifted)
    better = np.ones(len(order), dtype=bool)
    better[1:] = shifted[1:] < best[:-1]
    return order[better]
