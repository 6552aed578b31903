from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, peak, problems
from tests.search.test_exactness import stated

from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import tuning
from hidet_dist.search.budget import least_memory as search_of_least_memory
from hidet_dist.search.budget.capacity import Capacity
from hidet_dist.search.budget.crowding import Crowding
from hidet_dist.search.budget.least_memory import least_memory
from hidet_dist.search.ilp import StoppedError
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Activations, LiveInterval, Problem, evaluate
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes

FORBIDDEN = 1e6


def stopped(problem: Problem, options: SolveOptions) -> tuple[tuple[int, ...], int]:
    """Stand for the integer program that reaches its limits before it has a plan."""
    raise StoppedError("It found no plan.")


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(-4, 4))
def test_plans_that_fit_keep_their_choices_and_their_costs(problem: Problem, more: int) -> None:
    budget = problem.budget + more
    fits = [picks for picks in all_picks(problem) if peak(problem, picks) <= budget]
    left = Crowding(problem).fitting([list(range(len(costs))) for costs in problem.cost], budget, FORBIDDEN)
    if left is None:
        assert not fits
        return
    assert left.problem.budget == budget
    for picks in fits:
        assert all(k in kept for k, kept in zip(picks, left.kept, strict=True))
        assert evaluate(left.problem, picks) == evaluate(problem, picks)


def test_only_crowded_entities_are_looked_at() -> None:
    """Of two entities, one exceeds the budget of 20 bytes with its second choice; the other one always leaves room."""
    live = LiveInterval(0, 0, 0, (4, 21)), LiveInterval(1, 1, 1, (4, 9))
    problem = Problem([[0.0, 0.0], [0.0, 0.0]], [[0, 0], [1, 2]], 20, [], Activations(2, live, {}))
    every = [[0, 1], [0, 1]]
    left = Crowding(problem).fitting(every, 20, FORBIDDEN)
    alone = Capacity(problem).fitting(every, 20, FORBIDDEN)
    assert left is not None and alone is not None
    assert left.kept == alone.kept == [[0], [0, 1]]
    assert Crowding(problem).fitting(every, 4, FORBIDDEN) is None


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(-2, 2), st.sampled_from((0, tuning.PEAK_CHOICES)))
def test_prices_and_targets_alone_bound_the_least_memory(problem: Problem, more: int, few: int) -> None:
    least = min(peak(problem, picks) for picks in all_picks(problem))
    for enough in (0, least + more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "PEAK_CHOICES", few)  # choices up to which targets look for the very least
            patch.setattr(search_of_least_memory, "solve_peak", stopped)
            found = least_memory(problem, SolveOptions(), enough)
        assert found.bound_bytes <= least <= found.nbytes == peak(problem, found.choices)
        if enough >= least:
            assert found.bound_bytes <= enough


def test_the_bytes_that_a_refusal_names_are_found_to_be_enough() -> None:
    """A search for a plan within a budget may go another way than one for the least, but must not contradict it.

    For a LLaMA on eight devices, targets just below the least stay undecided: one of the least itself as well.
    """
    graph = normalize(shapes.llama(shapes.LlamaConfig(2, 512, 8, 2, 1024, 1000, 2, 64, "float32")))
    problem = stated(graph, builtin("dgx-h100", DeviceMesh((8,))))
    named = least_memory(problem, SolveOptions(), 1)
    assert named.nbytes * 0.99 <= named.bound_bytes
    assert least_memory(problem, SolveOptions(), named.nbytes).nbytes <= named.nbytes
    assert least_memory(problem, SolveOptions(), named.nbytes - 1).nbytes == named.nbytes
