"""A plan joined of two at a cut in execution order, and planned again around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hidet_dist.search import tuning
from hidet_dist.search.budget.relaxation import Mixture
from hidet_dist.search.budget.state import ProbedPlan, State
from hidet_dist.search.elimination.eliminate import eliminate
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.prices import Prices
from hidet_dist.search.problem.window import Windows
from hidet_dist.search.steps import step


@step("joining", otherwise=())
def join_at_cut(state: State, mixture: Mixture) -> tuple[int, ...]:
    """Join a plan that exceeds the budget and one that fits, at a cut in execution order.

    Equal layers all change their plan at the same prices, though the budget may require it of only some of them.
    Returns the position of the cut of the best plan, if one was found.
    """
    problem, budget = state.problem, state.problem.budget
    windows = Windows(problem)
    parts = [probe for _, probe in mixture.parts]
    lows = [probe for probe in parts if probe.peak > budget]
    highs = [probe for probe in parts if probe.peak <= budget]
    highs = highs or [probe for probe in state.known_plans if probe.choices == state.best]
    if not lows or not highs:
        return ()
    cuts: tuple[int, ...] = ()
    low, high = lows[0], highs[0]
    count = len(problem.cost)
    position = positions(problem)

    for first, second in ((low, high), (high, low)):
        before = state.seconds

        def cut(at: int, first: ProbedPlan = first, second: ProbedPlan = second) -> tuple[int, ...]:
            pairs = zip(position, first.choices, second.choices, strict=True)
            return tuple(a if entity_position < at else b for entity_position, a, b in pairs)

        # The cut with as much of ``low`` as fits.
        fits = _last_fitting(state, cut, *((0, count) if first is low else (count, 0)))
        if state.seconds < before:
            cuts = (fits,)
        if state.done():
            break
        for shift in (0, tuning.WINDOW // 4, tuning.WINDOW):
            at = fits - shift if first is low else fits + shift
            if _replan(state, windows, mixture.prices, position, cut(at), at).peak <= budget:
                break
        if state.seconds < before:
            cuts = (fits,)
        if state.done():
            break
    return cuts


def _last_fitting(state: State, cut: Callable[[int], tuple[int, ...]], fits: int, over: int) -> int:
    """Find the last cut that fits the budget on the way from one that fits to one that does not, by bisection."""
    while abs(over - fits) > 1:
        state.limits.check()
        middle = (fits + over) // 2
        if state.record(cut(middle)).peak <= state.problem.budget:
            fits = middle
        else:
            over = middle
    return fits


def positions(problem: Problem) -> list[int]:
    """Map each entity to its position in execution order; a weight has that of its first reader."""
    position = list(range(len(problem.cost)))
    consumers = {edge.consumer for edge in problem.edges}
    for edge in reversed(problem.edges):
        if edge.producer not in consumers:
            position[edge.producer] = edge.consumer
    return position


def _replan(
    state: State,
    windows: Windows,
    second_per_byte: Sequence[float],
    position: Sequence[int],
    fixed: Sequence[int],
    at: int,
) -> ProbedPlan:
    """Replan a window of operators around one for these prices; all others keep the choices ``fixed``."""
    state.limits.check()
    near = [
        entity
        for entity, (own, choices) in enumerate(zip(position, state.kept, strict=True))
        if abs(own - at) <= tuning.WINDOW and len(choices) > 1
    ]
    window = windows.of(near, fixed)
    prices = Prices(window.prices(second_per_byte))
    tables = Tables(state.limits)
    kept = window.kept(state.kept)
    own = TensorRelaxation(paired=state.relaxation.paired)
    instance = EliminationInstance(window.problem, kept, tables, prices, own)
    solved = eliminate(instance, state.options.solver_gap / 4, True)
    return state.record(window.planned(solved.choices))
