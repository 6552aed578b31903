"""The best plan within the memory budget: elimination where it suffices, the integer program for what it leaves.

Without the budget the problem is solved exactly by elimination. With it, a price on each byte gives a lower bound for
any price (Lagrangian relaxation; Everett, Operations Research 11(3), 1963), and a plan. The best price is found by
intersecting the two lines of a plan that fits and one that does not, until no plan lies below. Where a gap is left,
choices that no plan better than the known one can contain are dropped, and the integer program decides among the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hidet_dist.errors import SolverError
from hidet_dist.search.eliminate import Tables, TooWide, eliminate, marginals
from hidet_dist.search.ilp import Edge, Problem, Solution, evaluate, solve
from hidet_dist.search.presolve import undominated

_PRICES = 40  # prices tried at most; a handful is usual
_RAISES = 12
_WINDOW = 80  # operators around a cut that are planned anew

OnIncumbent = Callable[[Sequence[int], float, float, float], None]


@dataclass(frozen=True)
class _Probe:
    """A plan, its seconds without the price of memory, and the bytes that a device holds."""

    choices: tuple[int, ...]
    seconds: float
    nbytes: int


@dataclass
class _Search:
    """The best plan known, and the greatest lower bound."""

    problem: Problem
    kept: list[list[int]]
    gap: float
    best: tuple[int, ...] = ()
    seconds: float = math.inf
    bound: float = 0.0
    on_incumbent: OnIncumbent | None = None
    begin: float = field(default_factory=time.perf_counter)

    def memory(self, choices: Sequence[int]) -> int:
        return sum(m[k] for m, k in zip(self.problem.memory, choices, strict=True))

    def probe(self, tables: Tables, price: float) -> _Probe:
        """The best plan at a price a byte; records what follows from it."""
        found = eliminate(self.problem, self.kept, tables, price, self.gap / 4)
        self.bound = max(self.bound, found.bound - price * self.problem.budget)
        return self.record(found.choices)

    def record(self, choices: tuple[int, ...]) -> _Probe:
        """What a plan costs; it is the best from now on if it fits and no better one is known."""
        seconds, nbytes = evaluate(self.problem, choices), self.memory(choices)
        if nbytes <= self.problem.budget and seconds < self.seconds:
            self.best, self.seconds = choices, seconds
            self.tell()
        return _Probe(choices, seconds, nbytes)

    def tell(self) -> None:
        """Say which plan is the best known, and the bound."""
        if self.on_incumbent is not None and self.best:
            self.on_incumbent(self.best, self.seconds, self.bound, time.perf_counter() - self.begin)

    def done(self) -> bool:
        return math.isfinite(self.seconds) and self.seconds - self.bound <= self.gap * self.seconds + 1e-15


def optimize(
    problem: Problem,
    solver_name: str = "highs",
    time_limit_seconds: float | None = None,
    gap: float = 1e-4,
    on_incumbent: OnIncumbent | None = None,
) -> Solution:
    """Solve the problem to a relative gap.

    ``on_incumbent`` is called with the choices of each plan that is better than those before, its seconds, the lower
    bound, and the seconds gone by.

    Raises
    ------
    SolverError
        When no plan fits the budget, or the solver ends without one.
    """
    begin = time.perf_counter()
    if sum(map(min, problem.memory)) > problem.budget:
        raise SolverError(f"No plan fits the memory budget of {problem.budget} bytes.")
    state = _Search(problem, undominated(problem), gap, on_incumbent=on_incumbent)
    tables = Tables()
    try:
        price = _best_price(state, tables)
        if not state.done():
            bounds = marginals(problem, state.kept, tables, price)
            if bounds is not None and state.best:
                # A choice with a bound above this is in no plan that would still have to be found.
                limit = state.seconds * (1 - gap) + price * problem.budget
                for entity, line in enumerate(bounds):
                    left = [k for k, least in zip(state.kept[entity], line, strict=True) if least < limit]
                    state.kept[entity] = left or [state.best[entity]]
    except TooWide:
        pass
    if not state.done():
        _integer_program(state, solver_name, time_limit_seconds, begin)
    state.tell()
    return Solution(state.best, state.seconds, max(0.0, 1 - state.bound / state.seconds) if state.seconds else 0.0)


def _best_price(state: _Search, tables: Tables) -> float:
    """The price of a byte with the greatest lower bound; mixes the plans found on the way."""
    problem = state.problem
    # Among plans of the same time the one that holds less: a price so low that it decides nothing else.
    trifle = state.gap / 1000 * sum(map(min, problem.cost)) / max(1, sum(map(max, problem.memory)))
    low = state.probe(tables, trifle)
    if low.nbytes <= problem.budget:
        if not state.done():
            state.probe(tables, 0.0)
        return 0.0
    # Where the budget asks for a few per cent of the time, as it mostly does, this is near the best price.
    price = low.seconds / (low.nbytes - problem.budget) / 20 or 1.0
    for _ in range(_RAISES):
        high = state.probe(tables, price)
        if high.nbytes <= problem.budget:
            break
        price *= 8
    else:
        return price
    for _ in range(_PRICES):
        if state.done() or low.nbytes == high.nbytes:
            return price
        price = (high.seconds - low.seconds) / (low.nbytes - high.nbytes)
        # No mixture of the two can be better than the line through them at the budget.
        if high.seconds + price * (high.nbytes - problem.budget) <= state.bound * (1 + state.gap):
            _mix(state, tables, price, low, high)
            if state.done():
                return price
        found = state.probe(tables, price)
        if found.seconds + price * found.nbytes >= (low.seconds + price * low.nbytes) * (1 - 1e-12):
            break  # no plan lies below the line through the two
        if found.nbytes <= problem.budget:
            high = found
        else:
            low = found
    if not state.done():
        _mix(state, tables, price, low, high)
    return price


def _mix(state: _Search, tables: Tables, price: float, low: _Probe, high: _Probe) -> None:
    """Plans that are as ``low``, which does not fit, on one side of a cut in execution order, and ``high`` beyond it.

    Equal layers all change their plan at the same price, though the budget may ask only some of them to.
    """
    problem = state.problem
    count = len(problem.cost)
    # A weight changes sides together with the first operator that reads it.
    place = list(range(count))
    consumers = {edge.consumer for edge in problem.edges}
    for edge in reversed(problem.edges):
        if edge.producer not in consumers:
            place[edge.producer] = edge.consumer

    for first, second in ((low, high), (high, low)):

        def cut(at: int, first: _Probe = first, second: _Probe = second) -> tuple[int, ...]:
            pairs = zip(place, first.choices, second.choices, strict=True)
            return tuple(a if where < at else b for where, a, b in pairs)

        # The cut with as much of ``low`` as fits.
        fits, over = (0, count) if first is low else (count, 0)
        while abs(over - fits) > 1:
            middle = (fits + over) // 2
            if state.memory(cut(middle)) <= problem.budget:
                fits = middle
            else:
                over = middle
        state.record(cut(fits))
        if state.done():
            return
        for shift in (0, _WINDOW // 4, _WINDOW):
            at = fits - shift if first is low else fits + shift
            fixed = cut(at)
            kept = [
                own if abs(where - at) <= _WINDOW else [k]
                for own, where, k in zip(state.kept, place, fixed, strict=True)
            ]
            found = state.record(eliminate(problem, kept, tables, price, state.gap / 4).choices)
            if found.nbytes <= problem.budget:
                break
        if state.done():
            return


def _integer_program(state: _Search, solver_name: str, time_limit: float | None, begin: float) -> None:
    problem, kept = state.problem, state.kept
    edges = [
        Edge(
            edge.tensor,
            edge.producer,
            edge.consumer,
            tuple(edge.produced[k] for k in kept[edge.producer]),
            tuple(edge.consumed[k] for k in kept[edge.consumer]),
            edge.convert,
        )
        for edge in problem.edges
    ]
    reduced = Problem(
        [[costs[k] for k in own] for costs, own in zip(problem.cost, kept, strict=True)],
        [[memory[k] for k in own] for memory, own in zip(problem.memory, kept, strict=True)],
        problem.budget,
        edges,
    )
    left = None if time_limit is None else max(0.1, time_limit - (time.perf_counter() - begin))
    try:
        solution = solve(reduced, solver_name, left, state.gap)
    except SolverError:
        if not state.best:
            raise
        return  # out of time: the plan known is the answer, with its gap
    found = tuple(own[k] for own, k in zip(kept, solution.choices, strict=True))
    # What was dropped from the program costs no less than the known plan within the gap.
    bound = min(solution.seconds * (1 - solution.gap), state.seconds * (1 - state.gap))
    state.bound = max(state.bound, bound)
    if solution.seconds < state.seconds:
        state.best, state.seconds = found, solution.seconds
    state.bound = min(state.bound, state.seconds)
