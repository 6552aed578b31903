"""The room that a plan leaves in the budget, used: parts of the plan are planned again, all else as it is.

Equal layers that are joined from two plans (:mod:`hidet_dist.search.budget.joining`) change their plan one whole layer
at a time, and the points that have a price need not reach the budget at once. What is left is less than a layer's
bytes. The frontier of a window of operators has the budget as a constraint, so that it uses that room as well as the
window can; prices alone do not see it. All windows together have far fewer choices than the graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from hidet_dist.search import tuning
from hidet_dist.search.budget.combination import try_plans_below
from hidet_dist.search.budget.joining import positions
from hidet_dist.search.budget.state import State
from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.descent import descend
from hidet_dist.search.problem.prices import Prices
from hidet_dist.search.steps import step


@step("filling")
def fill_room(state: State, second_per_byte: Sequence[float], cuts: Sequence[int]) -> None:
    """Plan windows of operators again, around the ``cuts`` in execution order and the points that have a price.

    Ends with a pass that hardly reduces the gap.
    """
    position = positions(state.problem)
    centres = _centres(cuts, _priced(state.problem, second_per_byte, position))
    if not state.best or not centres:
        return
    prices = state.prices(second_per_byte)
    points, state.frontier_points = state.frontier_points, []
    try:
        _plan_windows(state, prices, position, centres)
    finally:
        state.frontier_points = points  # frontiers of all operators would have too many labels with those of windows


def _plan_windows(state: State, prices: Prices, position: Sequence[int], centres: Sequence[int]) -> None:
    while not state.done():
        gap = state.seconds - state.bound
        for centre in centres:
            _plan_window(state, prices, position, centre)
            if state.done():
                return
        state.record(descend(state.problem, state.groups, state.best, state.limits))
        if state.seconds - state.bound > tuning.FILLING_PROGRESS * gap:
            return


def _plan_window(state: State, prices: Prices, position: Sequence[int], centre: int) -> None:
    """Find the best plan that fits among those that differ from the best one in the operators around one.

    A window has too many partial plans to list all. Where none of those listed is better, a narrower one follows, of
    which more of them are.
    """
    before = state.seconds
    for width in tuning.FILLED_WIDTHS:
        state.limits.check()
        kept = [
            choices if abs(own - centre) <= width else [k]
            for choices, own, k in zip(state.kept, position, state.best, strict=True)
        ]
        # In tables of its own: the last elimination of all choices is kept for its marginals.
        try_plans_below(state, Tables(state.limits), prices, kept, state.seconds)
        if state.seconds < before:
            return


def _priced(problem: Problem, second_per_byte: Sequence[float], position: Sequence[int]) -> list[int]:
    """List the positions of the operators at points that have a price, the dearest point first."""
    reads = sorted((edge.begin, position[edge.consumer]) for edge in problem.edges)
    points = sorted((m for m, price in enumerate(second_per_byte) if price), key=lambda m: (-second_per_byte[m], m))
    return [reads[min(bisect_left(reads, (m, 0)), len(reads) - 1)][1] for m in points] if reads else []


def _centres(cuts: Sequence[int], priced: Sequence[int]) -> list[int]:
    """Choose the centres of windows, the first few of them, so that each position is well within one.

    Where each layer has points with a price, they bind alike: the room at the dearest ones counts most.
    """
    centres: list[int] = []
    for position in (*cuts, *priced):
        if all(abs(position - other) > tuning.FILLED_WIDTHS[0] // 2 for other in centres):
            centres.append(position)
    return centres[: tuning.FILLED_WINDOWS]
