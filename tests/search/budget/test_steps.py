"""The steps of the search: recorded with what they change, and left out one by one."""

from __future__ import annotations

from collections.abc import Callable

import hidet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, peak, problems

from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster
from hidet_dist.search import SearchOptions, search
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Problem, evaluate
from hidet_dist.search.steps import STEPS

OPTIONAL = [name for name, step in STEPS.items() if not step.needed]


@settings(max_examples=30, deadline=None)
@given(problems(), st.sets(st.sampled_from(OPTIONAL), min_size=1))
def test_without_some_steps_plans_fit_and_bounds_hold(problem: Problem, without: set[str]) -> None:
    found = optimize(problem, SolveOptions(solver_gap=1e-6, without=frozenset(without)))
    best = min(evaluate(problem, picks) for picks in all_picks(problem) if peak(problem, picks) <= problem.budget)
    assert peak(problem, found.choices) <= problem.budget
    assert found.seconds * (1 - found.gap) <= best * (1 + 1e-9) <= found.seconds * (1 + 2e-9)
    assert not without.intersection(step.name for step in found.steps)


def test_a_report_has_the_steps_with_the_gap_before_and_after(
    mlp: hidet.FlowGraph, toy: Callable[..., Cluster]
) -> None:
    free = search(mlp, toy()).plan.stages[0].report
    assert free is not None
    tight = search(mlp, toy(), mem_budget=int(0.8 * max(free.live_bytes))).plan.stages[0].report
    assert tight is not None
    assert [step.name for step in free.steps] == ["elimination", "descent"]
    assert [step.name for step in tight.steps][:2] == ["elimination", "multipliers"]
    assert tight.steps[0].gap_before is None
    assert tight.steps[-1].gap_after is not None and tight.steps[-1].gap_after == pytest.approx(tight.gap, abs=1e-5)
    assert all(step.seconds is not None and step.seconds >= 0 for step in tight.steps)
    assert all(step.seconds is None for step in tight.without_times().steps)


@pytest.mark.parametrize("name", ["multipliers", "frontier", 3])
def test_what_is_no_step_or_is_needed_cannot_be_left_out(name: object) -> None:
    with pytest.raises(ConfigError, match="without must be one of"):
        SearchOptions(without=[name])  # type: ignore[list-item]
