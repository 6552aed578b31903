"""The gap that prices leave, decided by frontiers: all plans below a limit, or all combinations of known plans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from hidet_dist.search import tuning
from hidet_dist.search.budget.state import ProbedPlan, State, bound_choices, choices_below, count_open
from hidet_dist.search.elimination.eliminate import fix_required, marginals
from hidet_dist.search.elimination.frontier import Bounded, Frontier
from hidet_dist.search.elimination.network import Tables, TooWide
from hidet_dist.search.problem import peaks
from hidet_dist.search.problem.prices import Prices
from hidet_dist.search.steps import step


@step("frontiers", otherwise=False)
def search_below_limits(state: State, tables: Tables, prices: Prices) -> bool:
    """Decide between bound and best plan by all plans that cost less than a limit, raised until the gap is small.

    Without a plan that fits, the limit is raised until there is one. Returns whether the gap is small enough.
    """
    if not prices.total:
        return False
    if state.bounds is None or state.bounds[0] is not prices:
        bound_choices(state, tables, prices)
    if state.bounds is None or state.bounds[0] is not prices:
        return False
    bounds = state.bounds[1]
    gap = state.options.solver_gap
    for _ in range(tuning.FRONTIERS):
        limit = state.cutoff()
        kept = choices_below(state, bounds, limit + prices.total * state.problem.budget)
        if not state.best or count_open(kept) > tuning.FEW_FRONTIER_CHOICES:
            limit = min(limit, state.bound * (1 + gap))
            gap *= tuning.FRONTIER_RAISE
            kept = choices_below(state, bounds, limit + prices.total * state.problem.budget)
        least = try_plans_below(state, tables, prices, kept, limit)
        if least is None:
            break
        state.raise_bound(least)
        if state.done() or state.bound < limit * (1 - tuning.EQUAL):
            break
    return state.done()


@step("combination")
def combine_plans(state: State, prices: Prices, probes: Sequence[ProbedPlan]) -> None:
    """Find better plans among the combinations of the choices of some plans and the best one, which fits."""
    if not prices.total:
        return
    plans = [*(probe.choices for probe in probes), state.best]
    used = [{plan[entity] for plan in plans} for entity in range(len(state.problem.cost))]
    kept = [[k for k in choices if k in some] or choices for choices, some in zip(state.kept, used, strict=True)]
    # In tables of its own: the last elimination of all choices is kept for its marginals.
    try_plans_below(state, Tables(state.limits), prices, kept, state.cutoff())


def try_plans_below(
    state: State, tables: Tables, prices: Prices, kept: Sequence[Sequence[int]], limit: float
) -> float | None:
    """Record the plans among the choices ``kept`` that cost less than a limit.

    Returns a lower bound of all such plans within the budget, at most the limit; None if there are too many.
    """
    if count_open(kept) > tuning.FEW_CHOICES:
        # Bounds of choices that others dominate are loose: those of what is left are not.
        left = marginals(state.instance(kept, tables, prices))
        if left is not None:
            most = limit + prices.total * state.problem.budget
            kept = [
                [k for k, bound in zip(choices, line, strict=True) if bound < most] or [choices[int(line.argmin())]]
                for choices, line in zip(kept, left, strict=True)
            ]
    if count_open(kept) > tuning.FRONTIER_CHOICES:
        return None
    frontier = _fitting_frontier(state, tables, prices, kept, limit, ())
    if frontier is None:
        return None
    least = _least_seconds(frontier, limit)
    if frontier.relaxed and len(frontier) and least < state.cutoff() and not state.done():
        narrowed = [list(choices) for choices in kept]
        known = state.best or next(frontier.plans())
        for tensor in frontier.relaxed:
            fix_required(state.groups[tensor], known, narrowed, False)
        _fitting_frontier(state, tables, prices, narrowed, min(limit, state.seconds), frontier.relaxed)
        limit = min(limit, state.cutoff())
        if least < limit and not state.done():
            # The relaxed tensors may keep the bound below the limit.
            exact = _fitting_frontier(state, tables, prices, kept, limit, frontier.relaxed)
            least = least if exact is None else max(least, _least_seconds(exact, limit))
    return min(limit, least)


def _least_seconds(frontier: Frontier, limit: float) -> float:
    """Return the least seconds of a frontier's plans, at most the limit below which there are no others."""
    return min(limit, frontier.limit, float(frontier.seconds[0]) if len(frontier) else math.inf)


def _fitting_frontier(
    state: State,
    tables: Tables,
    prices: Prices,
    kept: Sequence[Sequence[int]],
    limit: float,
    exact: Collection[int],
) -> Frontier | None:
    """Record the plans of a frontier, with the bytes at more and more points until its best plan fits everywhere.

    Adds the points to ``state.frontier_points``. Returns the last frontier, None if there are too many plans.
    """
    frontier, points = None, state.frontier_points
    try:
        bounded = Bounded(state.instance(kept, tables, prices), exact)
    except TooWide:
        return None
    for number in range(tuning.POINT_ROUNDS):
        try:
            frontier = Frontier(bounded, limit, points)
        except TooWide:
            break  # with fewer points it is a bound still
        over = _record_frontier(state, frontier)
        limit = min(frontier.limit, state.cutoff())
        more = _hitting_points([one for one in over if one.isdisjoint(points)], 2 ** (number + 1))
        if state.done() or not more or limit <= state.bound:
            break
        if bounded.relaxed and number + 1 == tuning.RELAXED_ROUNDS:
            break
        points += more
    return frontier


def _record_frontier(state: State, frontier: Frontier) -> list[frozenset[int]]:
    """Record the plans of a frontier until one is the best so far; the others cost more, unless tensors are relaxed.

    Returns, of each plan that exceeds the budget, the points of local peaks at which it does.
    """
    over: list[frozenset[int]] = []
    for seconds, choices in zip(frontier.seconds[: tuning.FRONTIER_PLANS], frontier.plans(), strict=False):
        if seconds >= state.seconds:
            break
        probe = state.record(choices)
        if probe.choices == state.best:
            break
        exceeded = [point for point, nbytes in enumerate(probe.nbytes) if nbytes > state.problem.budget]
        if exceeded:
            over.append(frozenset(peaks(probe.nbytes, exceeded)))
    return over


def _hitting_points(sets: Sequence[frozenset[int]], each: int) -> list[int]:
    """Choose few points, at least ``each`` of a set: the point of most sets first (the greedy hitting set)."""
    chosen: set[int] = set()
    while True:
        left = [points - chosen for points in sets if len(points & chosen) < each]
        count = Counter(point for points in left for point in points)
        if not count:
            return sorted(chosen)
        chosen.add(min(count, key=lambda point: (-count[point], point)))
