from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, peak, problems, resident

from hidet_dist.search.budget.capacity import Capacity
from hidet_dist.search.budget.least_memory import least_memory
from hidet_dist.search.limits import Limits, OutOfTimeError
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Activations, ConvertedTensor, Edge, LiveInterval, Problem, evaluate

FORBIDDEN = 1e6


@settings(max_examples=80, deadline=None)
@given(problems(), st.integers(-4, 4), st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_plans_that_fit_keep_their_choices_and_their_costs(problem: Problem, more: int, held: tuple[int, int]) -> None:
    budget = problem.budget + more
    every = [list(range(len(costs))) for costs in problem.cost]
    for given_range in (None, (min(held), max(held))):
        low, high = given_range or (0, budget)
        fitting = Capacity(problem).fitting(every, budget, FORBIDDEN, given_range)
        for picks in all_picks(problem):
            if peak(problem, picks) > budget or not low <= resident(problem, picks) <= high:
                continue
            assert fitting is not None
            assert all(k in kept for k, kept in zip(picks, fitting.kept, strict=True))
            assert evaluate(fitting.problem, picks) == evaluate(problem, picks)
            assert fitting.resident[0] <= resident(problem, picks) <= fitting.resident[1]


def gathered_weights(budget: int) -> Problem:
    """Two layers that need their weight whole: 8 bytes, or 2 when it is split and gathered again."""
    edges, tensors = [], {}
    for layer in range(2):
        edges.append(Edge(layer, 2 + layer, layer, (0, 1), (0,), ((0.0,), (1.0,)), layer, layer))
        tensors[layer] = ConvertedTensor((0, 1), (8, 2), lambda: [[2, 2], [2, 2]])
    held = (LiveInterval(0, 0, 1, (1,)), LiveInterval(1, 1, 1, (1,)))
    return Problem(
        [[1.0], [1.0], [0.0, 0.0], [0.0, 0.0]], [[0], [0], [8, 2], [8, 2]], budget, edges, Activations(2, held, tensors)
    )


def test_a_budget_that_no_plan_fits_is_recognized_from_the_bytes_around_one_operator() -> None:
    # Both split: 4 bytes of weights, 10 of a conversion, and the results of both layers at the second one.
    every = [[0], [0], [0, 1], [0, 1]]
    assert Capacity(gathered_weights(15)).fitting(every, 15, FORBIDDEN) is None
    assert Capacity(gathered_weights(16)).fitting(every, 16, FORBIDDEN) is not None


def test_resident_bytes_restrict_what_is_gathered() -> None:
    every = [[0], [0], [0, 1], [0, 1]]
    problem = gathered_weights(18)
    whole = Capacity(problem).fitting(every, 18, FORBIDDEN, (16, 16))
    assert whole is not None and whole.kept[2:] == [[0], [0]]
    assert Capacity(problem).fitting(every, 18, FORBIDDEN, (11, 15)) is None


def test_a_time_limit_ends_the_removal() -> None:
    now = 0.0
    limits = Limits(1.0, clock=lambda: now)
    every = [[0], [0], [0, 1], [0, 1]]
    assert Capacity(gathered_weights(18)).fitting(every, 18, FORBIDDEN, limits=limits) is not None
    now = 2.0
    with pytest.raises(OutOfTimeError):
        Capacity(gathered_weights(18)).fitting(every, 18, FORBIDDEN, limits=limits)


def test_the_least_memory_is_found_by_targets() -> None:
    least = least_memory(gathered_weights(0), SolveOptions())
    assert least.nbytes == least.bound_bytes == 16
