"""The gap that prices leave, decided by frontiers: all plans below a limit, or all combinations of known plans."""

from __future__ import annotations

from collections.abc import Sequence

from hidet_dist.search import tuning
from hidet_dist.search.eliminate import fix_required, marginals
from hidet_dist.search.frontier import Frontier
from hidet_dist.search.network import Tables, TooWide
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import peaks
from hidet_dist.search.state import Probe, State, bound_choices, choices_below, count_open


def search_below_limits(state: State, tables: Tables, prices: Prices) -> bool:
    """Decide between bound and best plan by all plans that cost less than a limit, raised until the gap is small.

    Returns whether the gap is small enough.
    """
    if not state.best or not prices.total:
        return False
    if state.bounds is None or state.bounds[0] is not prices:
        bound_choices(state, tables, prices)
    if state.bounds is None or state.bounds[0] is not prices:
        return False
    bounds = state.bounds[1]
    gap = state.options.gap
    for _ in range(tuning.FRONTIERS):
        limit = min(state.cutoff(), state.bound * (1 + gap))
        gap *= 2
        kept = choices_below(state, bounds, limit + prices.total * state.problem.budget)
        least = _try_plans_below(state, tables, prices, kept, limit)
        if least is None:
            break
        state.raise_bound(least)
        if state.done() or state.bound < limit * (1 - tuning.EQUAL):
            break
    return state.done()


def combine_plans(state: State, tables: Tables, prices: Prices, probes: Sequence[Probe]) -> None:
    """Find better plans among the combinations of the choices of some plans and the best one."""
    if not state.best or not prices.total:
        return
    plans = [*(probe.choices for probe in probes), state.best]
    used = [{plan[entity] for plan in plans} for entity in range(len(state.problem.cost))]
    kept = [[k for k in choices if k in some] or choices for choices, some in zip(state.kept, used, strict=True)]
    _try_plans_below(state, tables, prices, kept, state.cutoff())


def _try_plans_below(
    state: State, tables: Tables, prices: Prices, kept: Sequence[Sequence[int]], limit: float
) -> float | None:
    """Record the plans among the choices ``kept`` that cost less than a limit.

    Returns a lower bound of all such plans within the budget, at most the limit; None if there are too many.
    """
    if count_open(kept) > tuning.FEW_CHOICES:
        # Bounds of choices that others dominate are loose: those of what is left are not.
        left = marginals(state.problem, kept, tables, prices)
        if left is not None:
            most = limit + prices.total * state.problem.budget
            kept = [
                [k for k, bound in zip(choices, line, strict=True) if bound < most] or [choices[int(line.argmin())]]
                for choices, line in zip(kept, left, strict=True)
            ]
    if count_open(kept) > tuning.FRONTIER_CHOICES:
        return None
    frontier, points = _fitting_frontier(state, tables, prices, kept, limit, rounds=1)
    if frontier is None:
        return None
    if frontier.relaxed and len(frontier) and not state.done():
        narrowed = [list(choices) for choices in kept]
        for tensor in frontier.relaxed:
            fix_required(state.groups[tensor], state.best, narrowed, False)
        most = min(state.seconds, limit * (1 + state.options.gap))
        _fitting_frontier(state, tables, prices, narrowed, most, frontier.relaxed, points)
    for exact in (), frontier.relaxed:
        # Bytes at points without a price, or the relaxed tensors, may keep the bound below the limit.
        if len(frontier) and not state.done() and (exact or points):
            fitting, points = _fitting_frontier(state, tables, prices, kept, limit, exact, points)
            frontier = frontier if fitting is None else fitting
    return min(limit, float(frontier.seconds[0])) if len(frontier) else limit


def _fitting_frontier(
    state: State,
    tables: Tables,
    prices: Prices,
    kept: Sequence[Sequence[int]],
    limit: float,
    exact: Sequence[int] = (),
    points: Sequence[int] = (),
    rounds: int = tuning.POINT_ROUNDS,
) -> tuple[Frontier | None, list[int]]:
    """Record the plans of a frontier, with the bytes at more and more points until its best plan fits everywhere.

    Returns the last frontier, None if there are too many plans, and the points.
    """
    at, frontier = dict.fromkeys(points), None
    for _ in range(rounds):
        try:
            frontier = Frontier(state.problem, kept, tables, prices, limit, exact, list(at))
        except TooWide:
            break  # with fewer points it is a bound still
        over = _record_frontier(state, frontier)
        if state.done() or not over.keys() - at.keys():
            break
        at |= state.peaks | over
    return frontier, list(at)


def _record_frontier(state: State, frontier: Frontier) -> dict[int, None]:
    """Record the plans of a frontier until one is the best so far; the others cost more, unless tensors are relaxed.

    Returns the points of local peaks that exceed the budget.
    """
    over: dict[int, None] = {}
    for seconds, choices in zip(frontier.seconds[: tuning.FRONTIER_PLANS], frontier.plans(), strict=False):
        if seconds >= state.seconds:
            break
        probe = state.record(choices)
        if probe.choices == state.best:
            break
        exceeded = [point for point, nbytes in enumerate(probe.nbytes) if nbytes > state.problem.budget]
        over |= dict.fromkeys(peaks(probe.nbytes, exceeded))
    return over
