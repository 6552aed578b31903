from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, peak, problems, resident

from hidet_dist.errors import InfeasibleError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import tuning
from hidet_dist.search.budget.least_memory import least_memory
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.budget.relaxation import probe_without_activations, relax_budget
from hidet_dist.search.budget.state import State
from hidet_dist.search.elimination.eliminate import Tables, eliminate, fix_required, marginals, minimized
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.presolve import Presolve
from hidet_dist.search.ilp import solve
from hidet_dist.search.one_graph import formulate_problem
from hidet_dist.search.options import SolveOptions
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
from hidet_dist.search.problem.prices import Prices
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import models

FREE = Prices([0.0])

points_of_a_peak = st.tuples(st.integers(0, 5), st.integers(0, 5))


def priced(problem: Problem, line: list[int], peak: tuple[int, int]) -> Prices:
    """Prices of program points, of which those from the first to the last of a joint peak share theirs."""
    points = problem.activations.points
    begin, end = sorted(min(point, points - 1) for point in peak)
    return Prices(line[:points], [tuple(range(begin, end + 1))] if begin < end else ())


def test_tables_of_a_joint_peak_are_those_of_the_entities_left_open() -> None:
    """The other entity holds nothing at the peak in either elimination, of which the second is in the same tables."""
    holds = LiveInterval(0, 0, 0, (0, 7)), LiveInterval(1, 1, 1, (5, 0))
    problem = Problem([[0.0, 1.0]] * 2, [[0, 0]] * 2, 0, [], Activations(2, holds, {}))
    prices, tables = Prices([1.0, 1.0], [(0, 1)]), Tables()
    assert eliminate(EliminationInstance(problem, [[0, 1], [1]], tables, prices)).bound == 1.0
    assert eliminate(EliminationInstance(problem, [[0], [0, 1]], tables, prices)).bound == 1.0


@settings(max_examples=80, deadline=None)
@given(problems(), st.lists(st.integers(0, 5), min_size=6, max_size=6), points_of_a_peak)
def test_elimination_finds_the_optimum_at_any_prices_of_memory(
    problem: Problem, line: list[int], joint: tuple[int, int]
) -> None:
    own = priced(problem, line, joint)

    def cost(picks: tuple[int, ...]) -> float:
        return evaluate(problem, picks) + own.of(held_bytes(problem, readers(problem), picks))

    best = min(map(cost, all_picks(problem)))
    found = eliminate(EliminationInstance(problem, [list(range(len(c))) for c in problem.cost], Tables(), own))
    assert found.seconds == cost(found.choices) == pytest.approx(best)
    assert found.bound == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(problems(activations=False), st.integers(0, 5))
def test_dominated_choices_are_in_no_plan_that_is_needed(problem: Problem, price: int) -> None:
    own = Prices([price] + [0.0] * (problem.activations.points - 1))
    every = [list(range(len(c))) for c in problem.cost]
    best = eliminate(EliminationInstance(problem, every, Tables(), own)).seconds
    undominated = Presolve(problem).reduce(every).kept
    assert eliminate(EliminationInstance(problem, undominated, Tables(), own)).seconds == pytest.approx(best)


@settings(max_examples=80, deadline=None)
@given(problems(), st.lists(st.integers(0, 5), min_size=6, max_size=6), points_of_a_peak)
def test_at_given_prices_choices_are_removed_that_no_best_plan_needs(
    problem: Problem, line: list[int], joint: tuple[int, int]
) -> None:
    own = priced(problem, line, joint)
    every = [list(range(len(c))) for c in problem.cost]
    reduction = Presolve(problem).reduce(every, own)
    best = eliminate(EliminationInstance(problem, every, Tables(), own))
    assert eliminate(EliminationInstance(problem, reduction.kept, Tables(), own)).bound == pytest.approx(best.bound)
    left = marginals(EliminationInstance(problem, reduction.kept, Tables(), own))
    assert left is not None
    groups = readers(problem)
    totals = {
        picks: evaluate(problem, picks) + own.of(held_bytes(problem, groups, picks)) for picks in all_picks(problem)
    }
    for entity, bounds in enumerate(reduction.extend(problem, left)):
        for k, bound in enumerate(bounds):
            assert bound <= min(cost for picks, cost in totals.items() if picks[entity] == k) + 1e-9


@settings(max_examples=40, deadline=None)
@given(problems(activations=False), st.integers(0, 5))
def test_the_lower_bound_of_a_choice_never_exceeds_its_cost(problem: Problem, price: int) -> None:
    kept = [list(range(len(c))) for c in problem.cost]
    bounds = marginals(
        EliminationInstance(problem, kept, Tables(), Prices([price] + [0.0] * (problem.activations.points - 1)))
    )
    assert bounds is not None
    picks = all_picks(problem)
    for entity, line in enumerate(bounds):
        for k, bound in enumerate(line):
            least = min(evaluate(problem, p) + price * resident(problem, p) for p in picks if p[entity] == k)
            assert bound <= least + 1e-9
            if max(map(len, readers(problem).values()), default=0) <= tuning.READERS_LIMITS[0]:
                assert bound == pytest.approx(least)  # nothing was relaxed


@settings(max_examples=40, deadline=None)
@given(problems())
def test_relaxed_tensors_give_a_bound_and_a_plan(problem: Problem) -> None:
    best = min(evaluate(problem, picks) for picks in all_picks(problem))
    kept = [list(range(len(c))) for c in problem.cost]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "READERS_LIMITS", (1,))
        found = eliminate(EliminationInstance(problem, kept, Tables(), FREE))
    assert found.bound <= best + 1e-9
    assert found.seconds == evaluate(problem, found.choices) >= best - 1e-9


@settings(max_examples=40, deadline=None)
@given(problems(), st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_relaxed_tensors_give_a_bound_at_any_prices_of_memory(problem: Problem, line: list[int]) -> None:
    own = Prices(line[: problem.activations.points])
    every = [list(range(len(costs))) for costs in problem.cost]
    best = min(evaluate(problem, p) + own.of(held_bytes(problem, problem.groups, p)) for p in all_picks(problem))
    for limit in (1, 2, 3):
        assert minimized(EliminationInstance(problem, every, Tables(), own), (), limit).bound <= best + 1e-6


@settings(max_examples=40, deadline=None)
@given(problems(), st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_tensors_are_exact_whose_readers_can_only_require_one_spec(problem: Problem, line: list[int]) -> None:
    own = Prices(line[: problem.activations.points])
    kept = [list(range(len(costs))) for costs in problem.cost]
    for group in problem.groups.values():
        fix_required(group, [0] * len(kept), kept, False)
    picks = [p for p in all_picks(problem) if all(k in choices for k, choices in zip(p, kept, strict=True))]
    best = min(evaluate(problem, p) + own.of(held_bytes(problem, problem.groups, p)) for p in picks)
    found = minimized(EliminationInstance(problem, kept, Tables(), own), (), 0)
    assert not found.relaxed
    assert found.bound == pytest.approx(best)


def test_readers_of_a_relaxed_tensor_pay_for_the_memory_of_their_own_conversions() -> None:
    """Five readers, one after the other, either convert a tensor, which holds 7 bytes, or take a second longer."""
    readers_ = 5
    edges = [Edge(0, 0, n, (0,), (1, 0), ((0.0, 0.5), (0.5, 0.0)), n, n) for n in range(1, readers_ + 1)]
    held = ConvertedTensor((0, 1), (7, 7), lambda: [[0, 0], [0, 0]])
    problem = Problem(
        [[0.0], *([0.0, 1.0] for _ in range(readers_))],
        [[0], *([0, 0] for _ in range(readers_))],
        0,
        edges,
        Activations(readers_ + 1, (), {0: held}),
    )
    every = [[0], *([0, 1] for _ in range(readers_))]
    for price, conversions in ((0.125, 0.5), (1.0, 0.0)):
        own = Prices([price] * (readers_ + 1))
        bound = minimized(EliminationInstance(problem, every, Tables(), own), (), 3).bound
        assert bound == pytest.approx(min(readers_, conversions + readers_ * 7 * price))


@settings(max_examples=30, deadline=None)
@given(problems())
def test_the_optimum_within_the_budget_is_that_of_all_plans_and_of_the_integer_program(problem: Problem) -> None:
    best = min(evaluate(problem, picks) for picks in all_picks(problem) if peak(problem, picks) <= problem.budget)
    found = optimize(problem, SolveOptions(solver_gap=1e-6))
    assert found.seconds == evaluate(problem, found.choices) == pytest.approx(best, abs=1e-4)
    assert peak(problem, found.choices) <= problem.budget
    assert found.gap <= 1.001e-6
    assert solve(problem).seconds == pytest.approx(best, abs=1e-4)


def with_other_costs(problem: Problem, factors: list[int]) -> Problem:
    """The problem with the cost of each entity's choices in the other order, so many times over."""
    turned = zip(cycle(factors), problem.cost, strict=False)
    cost = [[factor * c for c in reversed(own)] for factor, own in turned]
    return replace(problem, cost=cost)


@settings(max_examples=30, deadline=None)
@given(problems(), st.lists(st.integers(0, 3), min_size=1, max_size=3))
@pytest.mark.slow
def test_solutions_of_similar_problems_change_no_optimum(problem: Problem, factors: list[int]) -> None:
    like = optimize(problem, SolveOptions(solver_gap=1e-6))
    assert like.choices in like.known
    other = with_other_costs(problem, factors)
    best = min(evaluate(other, picks) for picks in all_picks(other) if peak(other, picks) <= other.budget)
    found = optimize(other, SolveOptions(solver_gap=1e-6), like)
    assert found.seconds == evaluate(other, found.choices) == pytest.approx(best, abs=1e-4)
    assert peak(other, found.choices) <= other.budget


@settings(max_examples=30, deadline=None)
@given(problems())
def test_without_a_proof_the_plan_fits_and_the_gap_is_honest(problem: Problem) -> None:
    best = min(evaluate(problem, picks) for picks in all_picks(problem) if peak(problem, picks) <= problem.budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "VERY_FEW_CHOICES", 0)  # as if these were many choices
        found = optimize(problem, SolveOptions(solver_gap=1e-6, prove=False))
    assert peak(problem, found.choices) <= problem.budget
    assert found.seconds == evaluate(problem, found.choices) >= best - 1e-9
    assert found.seconds * (1 - found.gap) <= best + 1e-9


@settings(max_examples=50, deadline=None)
@given(problems())
def test_the_least_memory_is_that_of_all_plans(problem: Problem) -> None:
    least = min(peak(problem, picks) for picks in all_picks(problem))
    found = least_memory(problem, SolveOptions())
    assert (peak(problem, found.choices), found.nbytes, found.bound_bytes) == (least, least, least)


def test_plans_that_peak_at_different_points_are_not_mixed() -> None:
    """Of two entities, one holds 16 bytes at either point, or 7 at both, and the other one 10 bytes all the time."""
    peaks = LiveInterval(0, 0, 0, (16, 0, 7)), LiveInterval(0, 1, 1, (0, 16, 7))
    problem = Problem([[0.0, 0.2, 4.0], [0.0, 3.0]], [[0, 0, 0], [10, 0]], 17, [], Activations(2, peaks, {}))
    bounds = []
    for points in tuning.JOINT_POINTS, 0:
        state = State(problem, SolveOptions(), [[0, 1, 2], [0, 1]])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "JOINT_POINTS", points)
            tables = Tables()
            probe_without_activations(state, tables)
            relax_budget(state, tables)
        bounds.append(state.bound)
    assert bounds[0] == pytest.approx(2.7)
    assert bounds[1] < 0.5  # the mean of plans that peak at either point is below all peaks


def chain(layers: int) -> Problem:
    """Equal layers one behind the other, each with a weight to split (half the bytes, 3 s) or not, of 10 bytes."""
    convert = ((0.0, 2.0), (5.0, 0.0))
    cost = [[0.0, 1.0]] * (layers + 1) + [[0.0, 0.0]] * layers
    memory = [[0, 0]] * (layers + 1) + [[10, 5]] * layers
    edges = [Edge(i, i, i + 1, (0, 1), (0, 1), convert) for i in range(layers)]
    edges += [Edge(layers + i, layers + 1 + i, i + 1, (0, 1), (0, 1), ((0.0, 0.0), (3.0, 0.0))) for i in range(layers)]
    return Problem(cost, memory, 10**6, edges)


def test_equal_layers_are_solved_once() -> None:
    nbytes = []
    for layers in (8, 64):
        problem, tables = chain(layers), Tables()
        assert eliminate(EliminationInstance(problem, [[0, 1]] * len(problem.cost), tables, FREE)).seconds == 0
        nbytes.append(tables.tables.nbytes)
    # One more table of two entries a layer (the chain so far), where a layer that was solved anew would add several.
    assert nbytes[1] - nbytes[0] <= (64 - 8) * 2 * 8


@pytest.mark.parametrize("split", [0, 3, 7, 10])
def test_equal_layers_need_not_have_equal_plans(split: int) -> None:
    """As many layers are split as the budget asks for; each costs the 3 s of gathering its weight, or less."""
    problem = chain(10)
    tight = Problem(problem.cost, problem.memory, 100 - 5 * split, problem.edges)
    found = optimize(tight, SolveOptions(solver_gap=1e-6))
    assert resident(tight, found.choices) == 100 - 5 * split
    assert found.seconds == pytest.approx(solve(tight).seconds, rel=1e-5)
    assert (found.seconds == 0) == (split == 0)


def test_a_budget_below_the_least_is_refused() -> None:
    problem = chain(4)
    with pytest.raises(InfeasibleError, match="Give at least 20 bytes"):
        optimize(Problem(problem.cost, problem.memory, 19, problem.edges))
    assert resident(problem, optimize(Problem(problem.cost, problem.memory, 20, problem.edges)).choices) == 20


def test_a_graph_too_wide_to_eliminate_is_left_to_the_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain(6)
    tight = Problem(problem.cost, problem.memory, 45, problem.edges)
    expected = optimize(tight, SolveOptions(solver_gap=1e-6)).seconds
    monkeypatch.setattr(tuning, "WORK_LIMIT", 0)
    assert optimize(tight, SolveOptions(solver_gap=1e-6)).seconds == pytest.approx(expected)


def test_choices_with_which_no_plan_fits_leave_no_gap() -> None:
    """A mixture of a plan far above the budget and one far below would fit, at half of the cost."""
    entities = 400  # more choices than the integer program decides at once
    problem = Problem([[0.0, 100.0]] + [[1.0, 2.0]] * entities, [[500, 0]] + [[1, 0]] * entities, 450, [])
    solution = optimize(problem, SolveOptions(solver_gap=1e-6, prove=False))
    assert solution.seconds == 100 + entities
    assert solution.gap <= 1e-6 * (1 + 1e-9)  # the bound is rounded


def test_a_search_does_not_depend_on_those_of_the_same_problem_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another search of the same problem learnt of shares leads to no other plan and no other bound."""
    monkeypatch.setattr(tuning, "READERS_LIMITS", (0, 1))  # nearly all tensors are relaxed, whose readers share costs
    problem = formulate_problem(normalize(models.gpt2(1)[0]), builtin("cpu", DeviceMesh((2, 2))))
    first = optimize(problem)
    optimize(replace(problem, budget=int(0.9 * max(problem.totals.nbytes(first.choices)))))
    assert optimize(problem) == first


@pytest.mark.parametrize("few", [10, 2500])
def test_many_choices_that_no_bound_drops_are_not_searched_again(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """One tensor in three specs, of which each of twelve readers takes one of two.

    Two specs suffice; shares of the conversions prove no more than one and a half (as for facility location).
    """
    monkeypatch.setattr(tuning, "FEW_CHOICES", few)
    monkeypatch.setattr(tuning, "VERY_FEW_CHOICES", 5)
    monkeypatch.setattr(tuning, "TIGHTENINGS", 0)  # the tensor's table is small
    convert = ((0.0, 1.0, 1.0, 1.0),) * 4
    pairs = [(1, 2), (1, 3), (2, 3)] * 4
    edges = [Edge(0, 0, 1 + n, (0,), pair, convert) for n, pair in enumerate(pairs)]
    sizes = [1] + [2] * len(pairs)
    problem = Problem([[0.0] * n for n in sizes], [[0] * n for n in sizes], 100, edges)
    solution = optimize(problem, SolveOptions(solver_gap=1e-3))
    assert (solution.seconds, evaluate(problem, solution.choices)) == (2.0, 2.0)
    assert solution.gap <= 1e-3 + 1e-9
    names = [step.name for step in solution.steps]
    assert names.count("narrowing") == (1 if few == 10 else 2)
