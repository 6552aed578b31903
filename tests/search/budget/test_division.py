from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, peak, problems

from hidet_dist.search import tuning
from hidet_dist.search.budget import optimum
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Activations, LiveInterval, Problem, Solution, evaluate


def check(problem: Problem, solution: Solution) -> None:
    """Check that a solution fits, and that no plan is below its bound."""
    best = min(evaluate(problem, picks) for picks in all_picks(problem) if peak(problem, picks) <= problem.budget)
    assert peak(problem, solution.choices) <= problem.budget
    assert solution.seconds == evaluate(problem, solution.choices) >= best - 1e-9
    assert solution.seconds * (1 - solution.gap) <= best + 1e-9


@st.composite
def knapsacks(draw: st.DrawFn) -> Problem:
    """Entities whose cheaper choices hold more bytes, during the run or for some moments, within half of the most."""
    count = draw(st.integers(5, 6))
    cost, memory, holds = [], [], []
    for entity in range(count):
        cost.append(sorted(draw(st.lists(st.integers(1, 40).map(float), min_size=3, max_size=3))))
        nbytes = tuple(sorted(draw(st.lists(st.integers(0, 30), min_size=3, max_size=3)), reverse=True))
        is_resident = draw(st.booleans())
        memory.append(list(nbytes) if is_resident else [0, 0, 0])
        if not is_resident:
            holds.append(LiveInterval(entity, entity, draw(st.integers(entity, count - 1)), nbytes))
    problem = Problem(cost, memory, 0, [], Activations(count, tuple(holds), {}))
    least, most = (peak(problem, (k,) * count) for k in (2, 0))
    return Problem(cost, memory, (least + most) // 2, [], problem.activations)


@settings(max_examples=40, deadline=None)
@given(knapsacks(), st.booleans())
@pytest.mark.slow
def test_plans_divided_into_parts_include_the_best(problem: Problem, first: bool) -> None:
    best = min(evaluate(problem, picks) for picks in all_picks(problem) if peak(problem, picks) <= problem.budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "WIDE_WORK", -1)  # as if the graph were wide, with many choices
        patch.setattr(tuning, "VERY_FEW_CHOICES", 0)
        patch.setattr(tuning, "FEW_WIDE_CHOICES", 0)
        patch.setattr(tuning, "DIVIDED_GAP", 0.0 if first else 1.0)
        found = optimize(problem, SolveOptions(solver_gap=1e-6))
        rough = optimize(problem, SolveOptions(solver_gap=1e-6, prove=False))
    assert found.seconds == pytest.approx(best)
    for solution in (found, rough):
        check(problem, solution)


@pytest.fixture
def nothing_but_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what prices do not decide to the parts of the plans."""
    monkeypatch.setattr(tuning, "VERY_FEW_CHOICES", 0)
    monkeypatch.setattr(tuning, "WIDE_WORK", -1)  # as if the graph were wide
    monkeypatch.setattr(tuning, "FEW_WIDE_CHOICES", 0)
    for step in ("search_below_limits", "recombine_plans", "combine_plans"):
        monkeypatch.setattr(optimum, step, lambda *args: False)
    monkeypatch.setattr(optimum, "is_worth_a_program", lambda state: not state.best)


@pytest.mark.usefixtures("nothing_but_parts")
@settings(max_examples=30, deadline=None)
@given(st.one_of(knapsacks(), problems()))
@pytest.mark.slow
def test_parts_told_apart_by_resident_bytes_include_the_best(problem: Problem) -> None:
    """Parts may leave a gap where choices differ in costs alone, and end early; bounds hold."""
    check(problem, optimize(problem, SolveOptions(solver_gap=1e-6)))


def test_plans_with_room_for_either_kind_of_bytes_are_told_apart() -> None:
    """A weight takes 16 bytes, or 4 for 2 s; at eight moments, two tensors take 4 bytes each, or 1 for 0.3 s.

    Within 22 bytes, the smaller weight leaves room for all tensors. Beside the larger one there is none for both of a
    moment, though for either, so that takes 2.4 s. Prices mix the two, for a third of a second; parts alone do not tell
    them apart, the whole search does.
    """
    moments = 8
    holds = tuple(LiveInterval(1 + n, n // 2, n // 2, (4, 1)) for n in range(2 * moments))
    tensors = 2 * moments
    problem = Problem(
        [[0.0, 2.0], *[[0.0, 0.3]] * tensors],
        [[16, 4], *[[0, 0]] * tensors],
        22,
        [],
        Activations(moments, holds, {}),
    )
    solution = optimize(problem, SolveOptions(solver_gap=1e-3))
    assert solution.seconds == pytest.approx(2.0)
    assert solution.gap == pytest.approx(1e-3)
