"""The search's own problems as pairwise problems, and what the pairwise solver makes of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from tests.search.small_problems import all_picks, peak, problems

from hidet_dist.errors import ProblemError, SolverError
from hidet_dist.search import tuning
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.elimination.eliminate import TooWide
from hidet_dist.search.ilp import StoppedError, TooLargeError
from hidet_dist.search.limits import Limits
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.pairwise import encode, load_problem, save_problem, solve, wide
from hidet_dist.search.problem import (
    Activations,
    ConvertedTensor,
    Edge,
    LiveInterval,
    Problem,
    evaluate,
    held_bytes,
    readers,
)

SHARED = Problem(
    # A producer of spec 0, and two readers that take spec 0 at 9 s or spec 1 for nothing.
    cost=[[0.0], [9.0, 0.0], [9.0, 0.0]],
    memory=[[1], [0, 0], [0, 0]],
    budget=9,
    edges=[
        Edge(0, 0, reader, (0,), (0, 1), ((0.0, 5.0), (5.0, 0.0)), begin, end)
        for reader, begin, end in ((1, 1, 2), (2, 5, 6))
    ],
    # The converted tensor holds 8 bytes from point 1 to point 6; what follows the second reader takes 4.
    activations=Activations(
        8, (LiveInterval(2, 7, 7, (4, 4)),), {0: ConvertedTensor((0, 1), (8, 8), lambda: [[0] * 2] * 2)}
    ),
)


def least(problem: Problem) -> float:
    fitting = (picks for picks in all_picks(problem) if peak(problem, picks) <= problem.budget)
    return min((evaluate(problem, picks) for picks in fitting), default=math.inf)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_every_plan_costs_and_holds_the_same_in_both_forms(problem: Problem) -> None:
    encoded, groups = encode(problem), readers(problem)
    for picks in itertools.islice(all_picks(problem), 100):
        assignment = encoded.assignment(picks)
        assert encoded.choices(assignment) == picks
        seconds = encoded.problem.cost_of(assignment) * encoded.unit_seconds
        assert seconds == pytest.approx(evaluate(problem, picks), rel=1e-12, abs=1e-12)
        assert encoded.problem.peak_of(assignment) == max(held_bytes(problem, groups, picks))


@settings(max_examples=40, deadline=None)
@given(problems())
def test_no_assignment_costs_or_holds_less_than_the_plan_that_it_stands_for(problem: Problem) -> None:
    encoded = encode(problem)
    try:
        found = solve(encoded.problem, rounds=3)
    except SolverError:  # nothing found in these rounds, which says nothing of what there is
        return
    picks = encoded.choices(found.assignment)
    assert peak(problem, picks) <= encoded.problem.peak_of(found.assignment) <= problem.budget
    assert evaluate(problem, picks) <= found.cost * encoded.unit_seconds * (1 + 1e-12)
    assert found.bound * encoded.unit_seconds <= least(problem) * (1 + 1e-9)


@pytest.mark.parametrize(("budget", "picks"), [(9, (0, 1, 1)), (8, (0, 0, 0))])
def test_what_readers_share_is_paid_and_held_once(budget: int, picks: tuple[int, ...]) -> None:
    """Between its readers the converted tensor is held; without room for it, both take the other spec."""
    found = wide.solve(replace(SHARED, budget=budget))
    assert found.choices == picks
    assert found.seconds == least(replace(SHARED, budget=budget))
    assert 0 <= found.gap < 1


def test_buffers_of_a_conversion_are_held_when_its_first_reader_runs() -> None:
    """At point 5 they do not fit beside another 4 bytes. At point 1 they would, but that reader takes spec 0."""
    busy = Activations(8, (LiveInterval(2, 5, 5, (4, 4)),), {0: ConvertedTensor((0, 1), (0, 0), lambda: [[8] * 2] * 2)})
    problem = replace(SHARED, cost=[[0.0], [0.0, 99.0], [9.0, 0.0]], activations=busy, budget=12)
    assert wide.solve(problem).choices == (0, 0, 0)
    assert wide.solve(replace(problem, budget=13)).choices == (0, 0, 1)


def test_a_problem_outlives_its_file(tmp_path) -> None:
    """Costs become integers, of a unit that the caller learns."""
    encoded = encode(SHARED)
    save_problem(encoded.problem, tmp_path / "own.json.gz", "shared")
    read = load_problem(tmp_path / "own.json.gz")
    assert read.byte_limit == SHARED.budget
    for picks in all_picks(SHARED):
        assignment = encoded.assignment(picks)
        assert read.cost_of(assignment) == round(evaluate(SHARED, picks) / encoded.unit_seconds)
        assert read.peak_of(assignment) == peak(SHARED, picks)


def test_a_cost_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ProblemError, match="finite"):
        encode(replace(SHARED, cost=[[math.inf], *SHARED.cost[1:]]))


def test_the_wide_solver_says_why_it_found_nothing() -> None:
    with pytest.raises(StoppedError, match="within 0 bytes"):
        wide.solve(replace(SHARED, budget=0))
    with pytest.raises(TooLargeError, match="may take 10"):
        wide.solve(SHARED, SolveOptions(limits=Limits(nbytes=10)))


@pytest.fixture
def too_wide(monkeypatch) -> None:
    """Every graph is too wide for elimination."""

    def refuse(*_: object) -> None:
        raise TooWide

    monkeypatch.setattr("hidet_dist.search.budget.state.eliminate", refuse)


OPTIMA = [(9, (0, 1, 1), 5.0), (8, (0, 0, 0), 18.0)]


@pytest.mark.parametrize(("budget", "picks", "seconds"), OPTIMA)
def test_a_graph_too_wide_for_elimination_has_the_pairwise_solvers_plan(
    too_wide, monkeypatch, budget: int, picks: tuple[int, ...], seconds: float
) -> None:
    """With no memory for the integer program either, nothing else finds one."""
    monkeypatch.setattr(tuning, "FEW_CHOICES", 0)
    monkeypatch.setattr("hidet_dist.search.ilp.program.program_bytes", lambda problem: 2**60)
    found = optimize(replace(SHARED, budget=budget), SolveOptions())
    assert (found.choices, found.seconds) == (picks, seconds)
    assert 0 <= found.gap < 1


@pytest.mark.parametrize(("budget", "picks", "seconds"), OPTIMA)
def test_few_choices_of_a_wide_graph_are_the_integer_programs(
    too_wide, budget: int, picks: tuple[int, ...], seconds: float
) -> None:
    """Among all of them: what is dominated but for activations may be the only plan that fits."""
    found = optimize(replace(SHARED, budget=budget), SolveOptions())
    assert (found.choices, found.seconds) == (picks, seconds)
    assert found.gap < 1.1e-3
