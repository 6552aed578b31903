"""The best plan within the memory budget: elimination where it suffices, the integer program for what it leaves.

Without the budget the problem is solved exactly by elimination. With it, a price on each byte gives a lower bound for
any price (Lagrangian relaxation; Everett, Operations Research 11(3), 1963), and a plan. The best price is found by
intersecting the two lines of a plan that fits and one that does not, until no plan lies below. Where a gap is left,
choices that no plan better than the known one can contain are dropped, and the integer program decides among the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hidet_dist.errors import SolverError
from hidet_dist.search.eliminate import Tables, TooWide, eliminate, marginals
from hidet_dist.search.ilp import Edge, Problem, Solution, evaluate, solve
from hidet_dist.search.presolve import undominated

_PRICES = 40  # prices tried at most; a handful is usual
_RAISES = 12


@dataclass
class _Search:
    """The best plan known, and the greatest lower bound."""

    problem: Problem
    kept: list[list[int]]
    gap: float
    best: tuple[int, ...] = ()
    seconds: float = math.inf
    bound: float = 0.0

    def memory(self, choices: Sequence[int]) -> int:
        return sum(m[k] for m, k in zip(self.problem.memory, choices, strict=True))

    def probe(self, tables: Tables, price: float) -> tuple[float, int]:
        """Seconds and bytes of the best plan at a price a byte; records what follows from it."""
        found = eliminate(self.problem, self.kept, tables, price, self.gap / 4)
        seconds, nbytes = evaluate(self.problem, found.choices), self.memory(found.choices)
        self.bound = max(self.bound, found.bound - price * self.problem.budget)
        if nbytes <= self.problem.budget and seconds < self.seconds:
            self.best, self.seconds = found.choices, seconds
        return seconds, nbytes

    def done(self) -> bool:
        return math.isfinite(self.seconds) and self.seconds - self.bound <= self.gap * self.seconds + 1e-15


def optimize(
    problem: Problem, solver_name: str = "highs", time_limit_seconds: float | None = None, gap: float = 1e-4
) -> Solution:
    """Solve the problem to a relative gap.

    Raises
    ------
    SolverError
        When no plan fits the budget, or the solver ends without one.
    """
    begin = time.perf_counter()
    if sum(map(min, problem.memory)) > problem.budget:
        raise SolverError(f"No plan fits the memory budget of {problem.budget} bytes.")
    state = _Search(problem, undominated(problem), gap)
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
    return Solution(state.best, state.seconds, max(0.0, 1 - state.bound / state.seconds) if state.seconds else 0.0)


def _best_price(state: _Search, tables: Tables) -> float:
    """The price of a byte with the greatest lower bound."""
    budget = state.problem.budget
    low = state.probe(tables, 0.0)
    if low[1] <= budget:
        return 0.0
    price = low[0] / (low[1] - budget) or 1.0
    for _ in range(_RAISES):
        high = state.probe(tables, price)
        if high[1] <= budget:
            break
        price *= 8
    else:
        return price
    for _ in range(_PRICES):
        if state.done() or low[1] == high[1]:
            break
        price = (high[0] - low[0]) / (low[1] - high[1])
        seconds, nbytes = state.probe(tables, price)
        if seconds + price * nbytes >= (low[0] + price * low[1]) * (1 - 1e-12):
            break  # no plan lies below the line through the two
        if nbytes <= budget:
            high = seconds, nbytes
        else:
            low = seconds, nbytes
    return price


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
