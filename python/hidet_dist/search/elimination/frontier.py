"""Pareto frontiers of seconds and priced bytes: what prices on memory alone leave undecided.

At the best prices a gap remains between the plan and the bound: a layer's weights are split or whole, and the budget
rarely comes out even. The plans in that gap are few. So the elimination is repeated with all partial plans that can
still become a plan of less than a given cost, in place of the least one alone: *labels* with their cost and their
priced bytes (the label-setting method for shortest paths with a resource constraint; Desrochers and Soumis, INFOR
26(3), 1988). The elimination before it gives the least cost of completing a label, which excludes almost all. The
native library makes the labels (``hidet_dist/src/search/frontier``).

The budget of all program points is relaxed to one inequality: the priced bytes are at most what the budget costs at
these prices. So a bound is proven for every plan that fits; whether a plan fits remains to be checked. With ``points``,
labels have the bytes at these points besides (:mod:`hidet_dist.search.elimination.point_bytes`): plans fit there, too,
and all plans that do are considered, but there are more labels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from hidet_dist.native.search.frontier import LabelLimits
from hidet_dist.search import tuning
from hidet_dist.search.elimination.eliminate import minimized
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import TooWide
from hidet_dist.search.elimination.point_bytes import PointBytes, paid_network


class Bounded:
    """What the frontiers of the same choices, prices and exact tensors have in common.

    That is the least priced cost, inside and outside each bucket of the elimination, and the bytes of each factor.

    Attributes
    ----------
    relaxed: the tensors of many readers that had to be relaxed.
    """

    def __init__(self, instance: EliminationInstance, exact: Collection[int] = ()):
        """Eliminate all variables; tensors in ``exact`` are never relaxed.

        Raises
        ------
        TooWide
            When the graph is too densely connected.
        OutOfTimeError
            When the time limit is reached.
        """
        self.kept = instance.kept
        self.budget = instance.prices.total * instance.problem.budget
        # With other limits, other tensors than those in ``exact`` would be relaxed.
        for readers_limit in tuning.READERS_LIMITS[:1] if exact else tuning.READERS_LIMITS:
            try:
                solved = minimized(instance, exact, readers_limit)
                solved.network.marginals(len(instance.kept))
            except TooWide:
                continue
            self.network, self.relaxed = solved.network, solved.relaxed
            paid = paid_network(instance, exact, readers_limit, solved.paired)
            self.bytes = PointBytes(instance.problem, instance.kept, self.network, self.relaxed, paid)
            return
        raise TooWide


class Frontier:
    """The plans that may cost less than a limit, by increasing cost.

    Attributes
    ----------
    limit: the seconds below which all plans were considered: less than asked for if there are too many partial plans.
    seconds: for each plan a lower bound of its cost, without the price of memory; exact unless tensors were relaxed.
    relaxed: the tensors of many readers that had to be relaxed.
    """

    def __init__(self, bounded: Bounded, limit: float, points: Sequence[int] = ()):
        """Find all Pareto-optimal plans of less than ``limit`` seconds.

        The budget holds for the priced bytes, and at ``points``. Where there are too many partial plans, the limit is
        lowered to the bounds of those beyond.

        Raises
        ------
        TooWide
            When there are too many partial plans below any limit.
        OutOfTimeError
            When the time limit is reached.
        """
        self._bounded, self.relaxed = bounded, bounded.relaxed
        self._plans, self.seconds, self.limit = np.empty(0, np.int64), np.empty(0), limit
        if math.isinf(bounded.network.constant):
            return  # no assignment has a finite cost
        below = limit + bounded.budget
        limits = LabelLimits(below, tuning.MOST_LABELS, tuning.STEP_LABELS, tuning.COMPARISONS, tuning.LIMIT_HALVINGS)
        self._native = bounded.network.frontier(bounded.bytes.at(points), limits)
        if self._native.below < below:
            self.limit = min(limit, self._native.below - bounded.budget)
        paid, seconds = self._native.paid, self._native.sums - self._native.paid
        fits = paid <= bounded.budget * (1 + tuning.ROUNDING)
        plans = np.flatnonzero(fits & (seconds < self._native.below - bounded.budget))
        self._plans = plans[np.argsort(seconds[plans], kind="stable")]
        self.seconds = seconds[self._plans]

    def __len__(self) -> int:
        return len(self.seconds)

    def plans(self) -> Iterator[tuple[int, ...]]:
        """Yield the choices of each plan, in the order of ``seconds``."""
        for number in self._plans.tolist():
            values = self._native.values(number).tolist()
            yield tuple(kept[k] for kept, k in zip(self._bounded.kept, values, strict=False))
