"""The costs and the memory of plans."""

from __future__ import annotations

from hypothesis import given, settings
from tests.search.small_problems import all_picks, problems

from hidet_dist.search.problem import Problem, evaluate, held_bytes, readers


@settings(max_examples=40, deadline=None)
@given(problems())
def test_totals_are_those_of_the_problems_terms(problem: Problem) -> None:
    totals = problem.totals
    for picks in all_picks(problem):
        assert totals.seconds(picks) == evaluate(problem, picks)
        assert totals.nbytes(picks) == held_bytes(problem, readers(problem), picks)
