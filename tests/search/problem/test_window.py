"""The problem of a window has the costs and the peaks of the whole one, whose other entities keep their choices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import problems

from hidet_dist.search.problem import Activations, ConvertedTensor, Edge, LiveInterval, Problem, evaluate, held_bytes
from hidet_dist.search.problem.window import Windows


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_all_plans_of_a_window_cost_and_hold_what_those_of_the_whole_do(problem: Problem, data: st.DataObject) -> None:
    sizes = [len(costs) for costs in problem.cost]
    plan = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    entities = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=4)))
    window = Windows(problem).of(entities, plan)
    own = window.problem
    assert window.planned(window.choices) == plan
    for picks in itertools.product(*(range(sizes[entity]) for entity in entities)):
        choices = (*picks, *window.choices[len(entities) :])
        whole = window.planned(choices)
        assert evaluate(own, choices) + window.seconds_beside == pytest.approx(evaluate(problem, whole))
        held, beside = held_bytes(own, own.groups, choices), held_bytes(problem, problem.groups, whole)
        assert max(held) == max(beside)
        assert held == [max(part) for part in _parts(beside, window.begins.tolist())]


def _parts(values: list[int], begins: list[int]) -> list[list[int]]:
    return [values[begin:end] for begin, end in itertools.pairwise([*begins, len(values)])]


def chain(layers: int) -> Problem:
    """A chain of layers, all of which read one tensor, too."""
    convert = ((0.0, 1.0), (1.0, 0.0))
    own = [Edge(n, n, n + 1, (0, 1), (0, 1), convert, n + 1, n + 1) for n in range(layers)]
    shared = [Edge(layers, 0, n, (0, 1), (0, 1), convert, n, n) for n in range(1, layers + 1)]
    tensors = {n: ConvertedTensor((0, 1), (3, 5), lambda: ((0, 2), (2, 0))) for n in range(layers + 1)}
    intervals = tuple(LiveInterval(n, n, n, (1, 2)) for n in range(layers + 1))
    count = layers + 1
    activations = Activations(count, intervals, tensors)
    return Problem([[0.0, 1.0]] * count, [[4, 2]] * count, 10**6, [*own, *shared], activations)


def test_a_window_is_as_large_as_its_entities() -> None:
    sizes = []
    for layers in (100, 200):
        window = Windows(chain(layers)).of([50, 51], (0,) * 50 + (1,) * (layers - 49))
        sizes.append((len(window.problem.cost), len(window.problem.edges), window.problem.activations.points))
    assert sizes[0] == sizes[1]
    entities, edges, points = sizes[0]
    assert entities < 10 and edges < 10 and points < 16


def test_points_and_prices_of_a_window_are_sums() -> None:
    problem = chain(100)
    window = Windows(problem).of([50, 51], (0,) * 101)
    seconds = [float(n) for n in range(101)]
    assert sum(window.prices(seconds)) == sum(seconds)
    assert window.points([5, 10, 20]) == window.points([5])
    assert window.points([50, 51]) == [window.points([50])[0], window.points([51])[0]]
    begins = [*window.begins.tolist(), 101]
    assert all(b <= d < e for b, d, e in zip(begins[:-1], window.dearest.tolist(), begins[1:], strict=True))
