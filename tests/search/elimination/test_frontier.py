from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, peak, problems

from hidet_dist.search import tuning
from hidet_dist.search.budget.combination import combine_plans, search_below_limits
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.budget.state import State
from hidet_dist.search.elimination.eliminate import Tables, TooWide
from hidet_dist.search.elimination.frontier import Bounded, Frontier
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Activations, Edge, LiveInterval, Problem, evaluate, held_bytes, readers
from hidet_dist.search.problem.prices import Prices


def knapsack(layers: int) -> Problem:
    """Layers without edges: 4 bytes and 1 s, or 1 byte and 2 s each; at most 6 bytes more than the least."""
    return Problem([[1.0, 2.0]] * layers, [[4, 1]] * layers, layers + 5, [])


PAIRED = st.sampled_from([None, 0, 2, 9])
"""Up to how many readers of a relaxed tensor share its conversions from each spec."""


def frontier(problem: Problem, line: list[int], limit: float, paired: int | None = None) -> tuple[Frontier, Prices]:
    own = Prices([float(price) for price in line[: problem.activations.points]])
    return all_plans(problem, own, limit, paired=paired), own


def all_plans(
    problem: Problem, prices: Prices, limit: float, points: Sequence[int] = (), paired: int | None = None
) -> Frontier:
    every = [list(range(len(c))) for c in problem.cost]
    instance = EliminationInstance(problem, every, Tables(), prices, TensorRelaxation(paired=paired))
    return Frontier(Bounded(instance), limit, points)


def assert_begins_with_best(
    plans: Frontier, problem: Problem, within: list[float], limit: int
) -> list[tuple[int, ...]]:
    """Compare with the seconds of all plans that may be there; list the plans, none if tensors were relaxed."""
    best = min((seconds for seconds in within if seconds < limit), default=math.inf)
    least = float(plans.seconds[0]) if len(plans) else math.inf
    if plans.relaxed:
        assert least <= best * (1 + 1e-9)
        return []
    assert least == pytest.approx(best)
    every = list(plans.plans())
    for seconds, picks in zip(plans.seconds, every, strict=True):
        assert evaluate(problem, picks) == pytest.approx(seconds)
        assert seconds < limit
    return every


@settings(max_examples=30, deadline=None)
@given(problems(), st.lists(st.integers(0, 5), min_size=6, max_size=6), st.integers(1, 60), st.booleans(), PAIRED)
def test_a_frontier_begins_with_the_best_plan_below_the_limit(
    problem: Problem, line: list[int], limit: int, relaxed: bool, paired: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if relaxed:
            patch.setattr(tuning, "READERS_LIMITS", (1,))
        plans, own = frontier(problem, line, float(limit), paired)
    groups = readers(problem)
    within = [
        evaluate(problem, picks)
        for picks in all_picks(problem)
        if own.of(held_bytes(problem, groups, picks)) <= own.total * problem.budget * (1 + 1e-9)
    ]
    for picks in assert_begins_with_best(plans, problem, within, limit):
        assert own.of(held_bytes(problem, groups, picks)) <= own.total * problem.budget * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    problems(),
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
    st.integers(1, 60),
    st.sets(st.integers(0, 5)),
    st.booleans(),
    PAIRED,
)
def test_a_frontier_with_points_begins_with_the_best_plan_that_fits_there(
    problem: Problem, line: list[int], limit: int, some: set[int], relaxed: bool, paired: int | None
) -> None:
    count = problem.activations.points
    own = Prices([float(price) for price in line[:count]])
    points = [m for m in some if m < count] or [0]
    with pytest.MonkeyPatch.context() as patch:
        if relaxed:
            patch.setattr(tuning, "READERS_LIMITS", (1,))
        plans = all_plans(problem, own, float(limit), points, paired)
    groups = readers(problem)

    def fits(picks: tuple[int, ...]) -> bool:
        nbytes = held_bytes(problem, groups, picks)
        priced = own.of(nbytes) <= own.total * problem.budget * (1 + 1e-9)
        return priced and all(nbytes[m] <= problem.budget for m in points)

    within = [evaluate(problem, picks) for picks in all_picks(problem) if fits(picks)]
    for picks in assert_begins_with_best(plans, problem, within, limit):
        assert fits(picks)


def test_only_plans_that_no_other_beats_in_cost_and_bytes_are_kept() -> None:
    # At 1/3 s a byte all 2**20 plans cost the same; 21 of them differ in cost, and one layer may be whole.
    problem = knapsack(20)
    assert not len(all_plans(problem, Prices([1 / 3]), 38.5))
    plans = all_plans(problem, Prices([1 / 3]), 100.0)
    assert list(plans.seconds) == pytest.approx([39.0, 40.0])
    assert [sum(picks) for picks in plans.plans()] == [19, 20]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 2, 8]),
    st.floats(0.6, 1.0),
    st.sampled_from([2**20, 60, 30]),
    st.sampled_from([0, 6]),
)
@pytest.mark.slow
def test_the_whole_pareto_front_below_the_limit_is_listed(
    seed: int, count: int, fraction: float, most: int, edges_: int
) -> None:
    # What is cheap takes many bytes: most of the hundreds of partial plans of a step are left.
    random = np.random.default_rng(seed)
    entities, choices, points = 7, 3, 8
    cost, memory, live = np.moveaxis(random.multinomial(1000, [1 / 3] * 3, (entities, choices)), -1, 0)
    begins = random.integers(0, points, entities)
    intervals = tuple(
        LiveInterval(e, int(begin), int(random.integers(begin, points)), tuple(live[e].tolist()))
        for e, begin in enumerate(begins)
    )
    budget = int(fraction * (memory.max(axis=1).sum() + live.max(axis=1).sum()))
    activations = Activations(points, intervals, {})
    specs = tuple(range(choices))
    edges = [
        Edge(e, e, e + 1, specs, specs, tuple(map(tuple, random.integers(0, 99, (choices, choices)).astype(float))))
        for e in range(edges_)
    ]
    problem = Problem(cost.astype(float).tolist(), memory.tolist(), budget, edges, activations)
    limit, prices = float(cost.max(axis=1).sum() + 99 * edges_ + 1), Prices([0.5, 0.25, 0.0, 0.25, *[0.0] * 4])
    if most < 2**20:  # the limit is halved where there are more partial plans, to where there still are some
        every = [evaluate(problem, picks) for picks in itertools.product(range(choices), repeat=entities)]
        limit, prices = float(np.quantile(every, 0.3)), Prices([0.0] * points)
    chosen = list(range(count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "MOST_LABELS", most)
        try:
            plans = all_plans(problem, prices, limit, chosen)
        except TooWide:
            return
    assert not plans.relaxed

    def line(picks: tuple[int, ...]) -> tuple[float, ...]:
        nbytes = held_bytes(problem, {}, picks)
        held = sum(line[k] for line, k in zip(memory, picks, strict=True))
        most = max(nbytes[m] for m in chosen) if chosen else 0
        return (evaluate(problem, picks), prices.of(nbytes), *((held, most) if chosen else ()))

    lines = np.array([line(picks) for picks in itertools.product(range(choices), repeat=entities)])
    lines = lines[lines[:, 1] <= prices.total * budget * (1 + 1e-9)]
    if chosen:
        lines = lines[lines[:, 3] <= budget]
    lines = np.unique(lines, axis=0)
    front = [own for own in lines if np.all(lines <= own, axis=1).sum() == 1 and own[0] < plans.limit]
    assert len(plans) == len(front)
    found = sorted(line(picks) for picks in plans.plans())
    assert np.allclose(found, sorted(map(tuple, front)))


@settings(max_examples=30, deadline=None)
@given(
    problems(),
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
    st.integers(1, 60),
    st.sets(st.integers(0, 5)),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_too_many_partial_plans_lower_the_limit(
    problem: Problem, line: list[int], limit: int, some: set[int], most: int, comparisons: int
) -> None:
    count = problem.activations.points
    own = Prices([float(price) for price in line[:count]])
    points = [m for m in some if m < count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "STEP_LABELS", most)
        patch.setattr(tuning, "MOST_LABELS", 4 * most)
        patch.setattr(tuning, "COMPARISONS", comparisons)
        try:
            plans = all_plans(problem, own, float(limit), points)
        except TooWide:
            return
    groups = readers(problem)
    if not plans.relaxed:
        assert [evaluate(problem, picks) for picks in plans.plans()] == pytest.approx(list(plans.seconds))
    assert plans.limit <= limit
    least = min(plans.limit, float(plans.seconds[0]) if len(plans) else math.inf)
    for picks in all_picks(problem):
        nbytes = held_bytes(problem, groups, picks)
        priced = own.of(nbytes) <= own.total * problem.budget * (1 + 1e-9)
        if priced and all(nbytes[m] <= problem.budget for m in points):
            assert evaluate(problem, picks) >= least * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(problems(), st.lists(st.integers(0, 5), min_size=6, max_size=6), st.booleans())
def test_frontiers_need_no_plan_that_fits_to_begin_with(problem: Problem, line: list[int], combine: bool) -> None:
    prices = Prices([float(price) for price in line[: problem.activations.points]])
    state = State(problem, SolveOptions(), [list(range(len(costs))) for costs in problem.cost])
    probe = state.probe(Tables(), prices)
    if combine and state.best:
        combine_plans(state, prices, [probe])
    decided = search_below_limits(state, Tables(), prices)
    every = all_picks(problem)
    fitting = [evaluate(problem, picks) for picks in every if peak(problem, picks) <= problem.budget]
    best = min(fitting, default=math.inf)
    assert state.bound <= best * (1 + 1e-9)
    if state.best:
        assert peak(problem, state.best) <= problem.budget
        assert evaluate(problem, state.best) == pytest.approx(state.seconds)
    if decided:
        assert state.seconds * (1 - SolveOptions().solver_gap) <= best * (1 + 1e-9)


def test_the_limit_stays_where_few_partial_plans_are_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # No plan costs less than 80/3 + 26/3 s with the price of memory; all of 39.0 s and more cost the same.
    prices = Prices([1 / 3])
    assert all_plans(knapsack(20), prices, 100.0).limit == 100.0
    monkeypatch.setattr(tuning, "STEP_LABELS", 3)
    assert all_plans(knapsack(20), prices, 100.0).limit <= 39.0


def test_too_many_partial_plans_below_any_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_LABELS", 0)
    with pytest.raises(TooWide):
        all_plans(knapsack(20), Prices([1 / 3]), 100.0)


@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_the_optimum_is_found_and_proven_without_an_integer_program(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "VERY_FEW_CHOICES", 0)
        solution = optimize(problem, SolveOptions(solver_gap=1e-6, prove=False))
    best = min(evaluate(problem, picks) for picks in all_picks(problem) if peak(problem, picks) <= problem.budget)
    assert solution.seconds == pytest.approx(evaluate(problem, solution.choices))
    assert peak(problem, solution.choices) <= problem.budget
    assert solution.seconds >= best * (1 - 1e-9)
    assert solution.seconds * (1 - solution.gap) <= best * (1 + 1e-9)


def test_equal_layers_of_which_only_some_fit_are_decided_by_a_frontier(monkeypatch: pytest.MonkeyPatch) -> None:
    # The budget lets 53 of 160 layers be whole: no price of memory decides about the last bytes.
    problem = replace(knapsack(160), budget=160 + 3 * 53 + 2)

    def refused(*arguments: object, **options: object) -> None:
        raise AssertionError("an integer program was solved")

    monkeypatch.setattr("hidet_dist.search.budget.programs.solve", refused)
    solution = optimize(problem, SolveOptions(solver_gap=5e-4))
    assert solution.seconds == 320 - 53
    assert solution.gap <= 5e-4


def test_a_problem_of_which_no_plan_has_a_finite_cost_has_no_plans() -> None:
    problem = Problem([[math.inf, math.inf], [1.0, 2.0]], [[1, 2]] * 2, 9, [])
    plans = all_plans(problem, Prices([0.0]), math.inf)
    assert (len(plans), list(plans.plans()), plans.limit) == (0, [], math.inf)
