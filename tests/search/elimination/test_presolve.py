from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import problems

from hidet_dist.search.budget.capacity import Capacity
from hidet_dist.search.elimination.presolve import Presolve
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.prices import Prices


@settings(max_examples=80, deadline=None)
@given(problems(), st.integers(-4, 4), st.lists(st.integers(0, 3).map(float), min_size=6, max_size=6))
def test_a_similar_problem_shares_what_is_known_and_keeps_its_result(
    problem: Problem, more: int, at: list[float]
) -> None:
    every = [list(range(len(costs))) for costs in problem.cost]
    prices = Prices(at[: problem.activations.points])
    known = Presolve(problem)
    known.reduce(every, prices)
    fitting = Capacity(problem).fitting(every, problem.budget + more, 1e3)
    for other, kept in (
        (replace(problem, budget=problem.budget + more), every),
        *([(fitting.problem, fitting.kept)] if fitting is not None else []),
    ):
        shared, alone = Presolve(other, known), Presolve(other)
        for own in (prices, None):
            assert shared.reduce(kept, own).kept == alone.reduce(kept, own).kept
