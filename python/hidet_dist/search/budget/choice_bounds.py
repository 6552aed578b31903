"""Bounds of single choices, at prices of their own: where the best prices mix plans that peak at different points.

The best prices give a bound of all plans. A mixture that attains it may hold too much at one point in some of its
plans, and at another point in others, and fit on average. Every plan takes one choice of each entity, though, and plans
with the same choice are more alike. So each choice is bounded at several prices, above all where a single point has
the price of all, and keeps its greatest bound. The least bound of an entity's choices is a bound of all plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hidet_dist.search import tuning
from hidet_dist.search.budget.relaxation import Mixture
from hidet_dist.search.budget.state import State, bound_choices
from hidet_dist.search.elimination.network import Table, Tables
from hidet_dist.search.problem.prices import Prices
from hidet_dist.search.steps import step


@step("choice-bounds")
def raise_choice_bounds(state: State, tables: Tables, mixture: Mixture) -> None:
    """Raise the bound by those of single choices, and drop the choices that are in no better plan."""
    points = _points(state, mixture.prices)
    if len(points) < 2 or state.done() or not state.best:
        return
    bounds = _ChoiceBounds(state)
    if not bounds.add(tables, state.prices(mixture.prices)):
        return
    total, count = sum(mixture.prices), len(mixture.prices)
    for factor in tuning.POINT_PRICES:
        helpful = []
        for point in points:
            before = bounds.least()
            alone = state.prices([total * factor if m == point else 0.0 for m in range(count)])
            if not bounds.add(tables, alone):
                return
            if state.done():
                return
            if bounds.least() > before * (1 + tuning.EQUAL):
                helpful.append(point)
        points = helpful


def _points(state: State, second_per_byte: Sequence[float]) -> list[int]:
    """Select the points of the greatest prices, one of each price."""
    first: dict[float, int] = {}
    later = {m for points in state.joint for m in points[1:]}
    for point, price in enumerate(second_per_byte):
        if price and point not in later:
            first.setdefault(price, point)
    return [first[price] for price in sorted(first, reverse=True)[: tuning.PRICED_POINTS]]


class _ChoiceBounds:
    """The greatest bound so far, in seconds, of the plans with each choice of each entity."""

    def __init__(self, state: State):
        self._state = state
        self._bounds = [np.full(len(costs), -np.inf) for costs in state.problem.cost]

    def add(self, tables: Tables, prices: Prices) -> bool:
        """Add the bounds at some prices; tell whether they could be computed in time."""
        state = self._state
        more = bound_choices(state, tables, prices)
        if more is None:
            return False
        shift = prices.total * state.problem.budget
        self._bounds = [np.maximum(own, line - shift) for own, line in zip(self._bounds, more, strict=True)]
        self._use()
        return True

    def least(self) -> float:
        """Return the bound of all plans with choices that are kept: the best of those that entities give."""
        return max(self._of_entity(entity) for entity in range(len(self._bounds)))

    def _of_entity(self, entity: int) -> float:
        line: Table = self._bounds[entity]
        return float(line[self._state.kept[entity]].min())

    def _use(self) -> None:
        """Raise the bound of all plans, and drop the choices whose bounds reach the cutoff."""
        state = self._state
        state.raise_bound(self.least())
        cutoff = state.cutoff()
        for entity, (choices, line) in enumerate(zip(state.kept, self._bounds, strict=True)):
            left = [k for k in choices if line[k] < cutoff]
            if len(left) < len(choices):
                state.kept[entity] = left or [state.best[entity]]
                state.narrowed = True
