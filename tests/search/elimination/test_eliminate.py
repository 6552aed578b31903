from __future__ import annotations

import gc
import math
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, problems

from hidet_dist.search import tuning
from hidet_dist.search.elimination.eliminate import Tables, eliminate, marginals, minimized, split_costs_by_plan
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.presolve import Presolve
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.problem import Edge, Problem, evaluate, held_bytes
from hidet_dist.search.problem.prices import Prices

lines = st.lists(st.integers(0, 5), min_size=6, max_size=6)


@settings(max_examples=80, deadline=None)
@given(problems(), lines)
def test_bounds_hold_for_any_prices(problem: Problem, line: list[int]) -> None:
    own = Prices(line[: problem.activations.points])
    every = [list(range(len(costs))) for costs in problem.cost]
    totals = {
        picks: evaluate(problem, picks) + own.of(held_bytes(problem, problem.groups, picks))
        for picks in all_picks(problem)
    }
    best = min(totals.values(), default=math.inf)
    reduction = Presolve(problem).reduce(every, own)
    for kept in (every, reduction.kept):
        bound = eliminate(EliminationInstance(problem, kept, Tables(), own)).bound
        if max(map(len, problem.groups.values()), default=0) <= tuning.READERS_LIMITS[0]:
            assert bound == pytest.approx(best)
        assert bound <= best + 1e-9
    left = marginals(EliminationInstance(problem, reduction.kept, Tables(), own))
    assert left is not None
    for entity, bounds in enumerate(reduction.extend(problem, left)):
        for k, bound in enumerate(bounds):
            assert bound <= min((cost for picks, cost in totals.items() if picks[entity] == k), default=math.inf) + 1e-9


@settings(max_examples=60, deadline=None)
@given(problems(), lines, st.sampled_from([0, 2, 9]), st.data())
def test_shares_by_any_plan_give_a_bound(problem: Problem, line: list[int], paired: int, data: st.DataObject) -> None:
    relaxation = TensorRelaxation(paired=paired)
    own = Prices(line[: problem.activations.points])
    every = [list(range(len(costs))) for costs in problem.cost]
    best = min(evaluate(problem, p) + own.of(held_bytes(problem, problem.groups, p)) for p in all_picks(problem))
    for _ in range(2):
        plan = data.draw(st.sampled_from(all_picks(problem)))
        split_costs_by_plan(problem, relaxation, [*problem.groups], plan)
        assert all((shares.sum(axis=0) <= 1 + 1e-12).all() for shares in relaxation.portions.values())
        for limit in (0, 1, 2):
            instance = EliminationInstance(problem, every, Tables(), own, relaxation)
            assert minimized(instance, (), limit).bound <= best + 1e-6


@settings(max_examples=40, deadline=None)
@given(problems(), lines)
def test_conversions_shared_from_each_spec_bound_plans_no_worse(problem: Problem, line: list[int]) -> None:
    own = Prices(line[: problem.activations.points])
    every = [list(range(len(costs))) for costs in problem.cost]
    bounds = []
    for paired in (0, 9):
        instance = EliminationInstance(problem, every, Tables(), own, TensorRelaxation(paired=paired))
        bounds.append(minimized(instance, (), 1).bound)
    assert bounds[0] <= bounds[1] + 1e-6


@pytest.mark.parametrize(("work", "bound"), [(0, 1.0), (10**6, 7.0)])
def test_readers_share_the_conversion_from_the_spec_that_is_made_where_that_is_little_work(
    monkeypatch: pytest.MonkeyPatch, work: int, bound: float
) -> None:
    """A conversion takes 6 s from the one spec, which takes 1 s to make, and none from the other, which takes 101 s."""
    monkeypatch.setattr(tuning, "PAIRED_WORK", work)
    monkeypatch.setattr(tuning, "PAIRED_FACTOR", 1.0)
    convert = ((0.0, 6.0, 6.0), (6.0, 0.0, 0.0), (6.0, 0.0, 0.0))
    edges = [Edge(0, 0, n, (0, 1), (1, 2), convert, n, n) for n in range(1, 6)]
    problem = Problem([[1.0, 101.0]] + [[0.0, 50.0]] * 5, [[0, 0]] * 6, 0, edges)
    found = minimized(EliminationInstance(problem, [[0, 1]] * 6, Tables(), Prices([0.0])), (), tuning.READERS_LIMITS[0])
    assert found.relaxed == {0: bound > 1.0}
    assert found.bound == pytest.approx(bound)


def test_tables_are_freed_while_the_collector_is_paused() -> None:
    """The last network that tables keep does not keep them: a search makes tables for each of its windows."""
    problem = Problem([[0.0, 1.0], [2.0, 0.0]], [[0, 0]] * 2, 100, [])
    gc.disable()
    try:
        tables = Tables()
        solved = minimized(EliminationInstance(problem, [[0, 1]] * 2, tables, Prices([0.0])), (), 3)
        assert tables.last is solved and tables.widest > 0
        alive = weakref.ref(tables)
        del tables
        assert alive() is None
        assert solved.network.marginals(2)[0].tolist() == [0.0, 1.0]
    finally:
        gc.enable()


def test_readers_that_require_a_spec_share_its_cost_among_themselves() -> None:
    """Of eight readers, four require a conversion of 8 s, or take 3 s more each. The others have no use for it."""
    convert = ((0.0, 8.0), (0.0, 0.0))
    needs = [Edge(0, 0, n, (0,), (1, 0), convert, n, n) for n in range(1, 5)]
    others = [Edge(0, 0, n, (0,), (0,), convert, n, n) for n in range(5, 9)]
    cost = [[0.0]] + [[0.0, 3.0]] * 4 + [[0.0]] * 4
    problem = Problem(cost, [[0] * len(own) for own in cost], 0, [*needs, *others])
    every = [list(range(len(own))) for own in cost]
    equally = minimized(EliminationInstance(problem, every, Tables(), Prices([0.0])), (), tuning.READERS_LIMITS[0])
    assert equally.relaxed == {0: True}
    assert equally.bound == pytest.approx(4.0)
    assert eliminate(EliminationInstance(problem, every, Tables(), Prices([0.0])), coarse=True).bound == pytest.approx(
        8.0
    )
