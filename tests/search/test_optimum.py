from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.errors import SolverError
from hidet_dist.search import eliminate as elimination
from hidet_dist.search.eliminate import Tables, eliminate, marginals
from hidet_dist.search.ilp import Edge, Problem, evaluate, solve
from hidet_dist.search.optimum import optimize
from hidet_dist.search.presolve import readers, undominated

prices = st.integers(0, 20).map(float)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A graph of up to 6 entities with tensors of up to 5 readers, in which some choices break the budget."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    cost = [draw(st.lists(prices, min_size=n, max_size=n)) for n in sizes]
    memory = [draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)) for n in sizes]
    edges = []
    for tensor in range(draw(st.integers(0, 4))):
        producer = draw(st.integers(0, len(sizes) - 2))
        specs = draw(st.integers(1, 3))
        spec = st.integers(0, specs - 1)
        convert = tuple(tuple(0.0 if s == d else draw(prices) for d in range(specs)) for s in range(specs))
        produced = tuple(draw(spec) for _ in range(sizes[producer]))
        for _ in range(draw(st.integers(1, 5))):
            consumer = draw(st.integers(producer + 1, len(sizes) - 1))
            consumed = tuple(draw(spec) for _ in range(sizes[consumer]))
            edges.append(Edge(tensor, producer, consumer, produced, consumed, convert))
    budget = draw(st.integers(sum(map(min, memory)), sum(map(max, memory))))
    return Problem(cost, memory, budget, edges)


def nbytes(problem: Problem, picks: tuple[int, ...]) -> int:
    return sum(m[k] for m, k in zip(problem.memory, picks, strict=True))


def all_picks(problem: Problem) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(costs)) for costs in problem.cost)))


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(0, 5))
def test_elimination_finds_the_optimum_at_any_price_of_memory(problem: Problem, price: int) -> None:
    def cost(picks: tuple[int, ...]) -> float:
        return evaluate(problem, picks) + price * nbytes(problem, picks)

    best = min(map(cost, all_picks(problem)))
    found = eliminate(problem, [list(range(len(c))) for c in problem.cost], Tables(), float(price))
    assert found.seconds == cost(found.choices) == pytest.approx(best)
    assert found.bound == pytest.approx(best)
    # Dominated choices are in no plan that is needed, whatever memory costs.
    assert eliminate(problem, undominated(problem), Tables(), float(price)).seconds == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 5))
def test_what_a_choice_costs_at_least_is_never_above_what_it_costs(problem: Problem, price: int) -> None:
    kept = [list(range(len(c))) for c in problem.cost]
    bounds = marginals(problem, kept, Tables(), float(price))
    assert bounds is not None
    picks = all_picks(problem)
    for entity, line in enumerate(bounds):
        for k, bound in enumerate(line):
            least = min(evaluate(problem, p) + price * nbytes(problem, p) for p in picks if p[entity] == k)
            assert bound <= least + 1e-9
            if max(map(len, readers(problem).values()), default=0) <= elimination._READERS_LIMITS[0]:
                assert bound == pytest.approx(least)  # nothing was relaxed


@settings(max_examples=100, deadline=None)
@given(problems())
def test_relaxed_tensors_give_a_bound_and_a_plan(problem: Problem) -> None:
    best = min(evaluate(problem, picks) for picks in all_picks(problem))
    kept = [list(range(len(c))) for c in problem.cost]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "_READERS_LIMITS", (1,))
        found = eliminate(problem, kept, Tables())
    assert found.bound <= best + 1e-9
    assert found.seconds == evaluate(problem, found.choices) >= best - 1e-9


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_optimum_within_the_budget_is_that_of_all_plans_and_of_the_integer_program(problem: Problem) -> None:
    best = min(evaluate(problem, picks) for picks in all_picks(problem) if nbytes(problem, picks) <= problem.budget)
    found = optimize(problem, gap=1e-6)
    assert found.seconds == evaluate(problem, found.choices) == pytest.approx(best, abs=1e-4)
    assert nbytes(problem, found.choices) <= problem.budget
    assert found.gap <= 1.001e-6
    assert solve(problem).seconds == pytest.approx(best, abs=1e-4)


def chain(layers: int) -> Problem:
    """Equal layers one behind the other, each with a weight to split (half the bytes, 3 s) or not, of 10 bytes."""
    convert = ((0.0, 2.0), (5.0, 0.0))
    cost = [[0.0, 1.0]] * (layers + 1) + [[0.0, 0.0]] * layers
    memory = [[0, 0]] * (layers + 1) + [[10, 5]] * layers
    edges = [Edge(i, i, i + 1, (0, 1), (0, 1), convert) for i in range(layers)]
    edges += [Edge(layers + i, layers + 1 + i, i + 1, (0, 1), (0, 1), ((0.0, 0.0), (3.0, 0.0))) for i in range(layers)]
    return Problem(cost, memory, 10**6, edges)


def test_equal_layers_are_solved_once() -> None:
    counts = []
    for layers in (8, 64):
        problem, tables = chain(layers), Tables()
        assert eliminate(problem, [[0, 1]] * len(problem.cost), tables).seconds == 0
        counts.append(len(tables.tables))
    # One more table a layer (the chain so far), where a layer that was solved anew would add several.
    assert counts[1] - counts[0] <= 64 - 8


@pytest.mark.parametrize("split", [0, 3, 7, 10])
def test_equal_layers_need_not_have_equal_plans(split: int) -> None:
    """As many layers are split as the budget asks for; each costs the 3 s of gathering its weight, or less."""
    problem = chain(10)
    tight = Problem(problem.cost, problem.memory, 100 - 5 * split, problem.edges)
    found = optimize(tight, gap=1e-6)
    assert nbytes(tight, found.choices) == 100 - 5 * split
    assert found.seconds == pytest.approx(solve(tight).seconds, rel=1e-5)
    assert (found.seconds == 0) == (split == 0)


def test_a_budget_below_the_least_is_refused() -> None:
    problem = chain(4)
    with pytest.raises(SolverError, match="No plan fits the memory budget of 19 bytes"):
        optimize(Problem(problem.cost, problem.memory, 19, problem.edges))
    assert nbytes(problem, optimize(Problem(problem.cost, problem.memory, 20, problem.edges)).choices) == 20


def test_a_graph_too_wide_to_eliminate_is_left_to_the_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain(6)
    tight = Problem(problem.cost, problem.memory, 45, problem.edges)
    expected = optimize(tight, gap=1e-6).seconds
    monkeypatch.setattr(elimination, "_WORK_LIMIT", 0)
    assert optimize(tight, gap=1e-6).seconds == pytest.approx(expected)
