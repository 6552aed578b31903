from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, problems

from hidet_dist.search.budget.unfit import fitting_choices
from hidet_dist.search.limits import Limits
from hidet_dist.search.problem import Problem, held_bytes


@settings(max_examples=80, deadline=None)
@given(problems(), st.data())
def test_choices_of_plans_that_fit_at_a_point_are_kept(problem: Problem, data: st.DataObject) -> None:
    kept = [
        sorted(data.draw(st.sets(st.integers(0, len(costs) - 1), min_size=1), label="kept")) for costs in problem.cost
    ]
    point = data.draw(st.integers(0, problem.activations.points - 1), label="point")
    fitting = fitting_choices(problem, kept, point, Limits())
    assert fitting is not None
    plans = [picks for picks in all_picks(problem) if all(k in own for k, own in zip(picks, kept, strict=True))]
    held = {picks: held_bytes(problem, problem.groups, picks)[point] for picks in plans}
    for picks in plans:
        if held[picks] <= problem.budget:
            assert all(k in own for k, own in zip(picks, fitting, strict=True))
    # Where no tensor is held for its readers, the bytes are a sum over the entities, and nothing else is kept.
    if not problem.activations.tensors:
        for entity, own in enumerate(kept):
            least = {k: min(held[picks] for picks in plans if picks[entity] == k) for k in own}
            assert fitting[entity] == [k for k in own if least[k] <= problem.budget]
