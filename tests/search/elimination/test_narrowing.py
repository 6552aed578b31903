"""Graphs that are too wide for elimination although few operators read each tensor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, peak, problems

from hidet_dist.search import tuning
from hidet_dist.search.budget.optimum import optimize
from hidet_dist.search.elimination.eliminate import eliminate
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.narrowing import narrow
from hidet_dist.search.elimination.network import Tables, TooWide
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.problem import Edge, Problem, evaluate, held_bytes, readers
from hidet_dist.search.problem.prices import Prices

SPECS = 4
OTHERS = tuple(tuple(float(s != d) for d in range(SPECS)) for s in range(SPECS))
CHEAP = tuple(tuple(0.125 * (s != d) for d in range(SPECS)) for s in range(SPECS))


def layers(count: int) -> Problem:
    """Layers of queries and keys from one input, in three branches, which share three tables and meet in an output.

    Entities of a layer: input, queries, keys, angles, three tables, three rotated queries, three rotated keys, output.
    """
    cost, edges, each = [], list[Edge](), tuple(range(SPECS))

    def connect(producer: int, *consumers: int, convert: tuple[tuple[float, ...], ...] = OTHERS) -> None:
        tensor = len(edges)
        edges.extend(Edge(tensor, producer, consumer, each, each, convert) for consumer in consumers)

    for layer in range(count):
        first = 14 * layer
        cost += [[3.0, 1.0, 2.0, 1.5]] + [[1.0, 2.0, 1.0, 2.0]] * 2 + [[0.25] * SPECS] * 4 + [[2.0, 1.0, 3.0, 1.0]] * 7
        if layer:
            connect(first - 1, first)
        connect(first, first + 1, first + 2)
        for branch in range(3):
            connect(first + 3, first + 4 + branch, convert=CHEAP)
            connect(first + 4 + branch, first + 7 + branch, first + 10 + branch, convert=CHEAP)
            for side in (0, 1):
                rotated = first + 7 + 3 * side + branch
                connect(first + 1 + side, rotated)
                connect(rotated, first + 13)
    return Problem(cost, [[0] * SPECS for _ in cost], 0, edges)


def choices(problem: Problem) -> list[list[int]]:
    return [list(range(len(costs))) for costs in problem.cost]


def no_prices(problem: Problem) -> Prices:
    return Prices([0.0] * problem.activations.points)


def test_equal_tensors_of_all_layers_are_relaxed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layers(3)
    exact = eliminate(EliminationInstance(problem, choices(problem), Tables(), no_prices(problem)))
    assert exact.bound == exact.seconds
    monkeypatch.setattr(tuning, "WORK_LIMIT", SPECS**6 - 1)
    narrow_ = EliminationInstance(problem, choices(problem), Tables(), no_prices(problem))
    relaxed = eliminate(narrow_)
    shared = [group[0] for group in readers(problem).values() if group[0].convert is CHEAP and group[1:]]
    assert narrow_.relaxation.narrowed == {edge.tensor for edge in shared}
    assert relaxed.bound <= exact.seconds <= relaxed.seconds


@settings(max_examples=40, deadline=None)
@given(problems(), st.lists(st.integers(0, 5), min_size=6, max_size=6), st.integers(1, 30))
def test_bounds_of_narrowed_graphs_hold(problem: Problem, line: list[int], most: int) -> None:
    prices = Prices([float(price) for price in line[: problem.activations.points]])
    groups = readers(problem)

    def priced(picks: tuple[int, ...]) -> float:
        return evaluate(problem, picks) + prices.of(held_bytes(problem, groups, picks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "WORK_LIMIT", most)
        try:
            result = eliminate(EliminationInstance(problem, choices(problem), Tables(), prices))
        except TooWide:
            return
    assert result.seconds == pytest.approx(priced(result.choices))
    assert result.bound <= min(map(priced, all_picks(problem))) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(1, 30))
def test_plans_of_narrowed_graphs_are_the_best(problem: Problem, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "WORK_LIMIT", most)
        solution = optimize(problem, SolveOptions(solver_gap=1e-6))
    best = min(evaluate(problem, picks) for picks in all_picks(problem) if peak(problem, picks) <= problem.budget)
    assert solution.seconds == pytest.approx(evaluate(problem, solution.choices))
    assert solution.seconds * (1 - solution.gap) <= best * (1 + 1e-9) <= solution.seconds * (1 + 2e-9)


def test_nothing_is_relaxed_where_that_leaves_the_graph_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layers(1)
    monkeypatch.setattr(tuning, "WORK_LIMIT", 1)
    instance = EliminationInstance(problem, choices(problem), Tables(), no_prices(problem))
    assert not narrow(instance)
    assert instance.relaxation.narrowed == frozenset()
