"""Relaxed tensors that leave a gap between bound and plan, and are relaxed less then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.small_problems import all_picks, problems

from hidet_dist.search import tuning
from hidet_dist.search.elimination.eliminate import Eliminated, eliminate
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import Tables, TooWide
from hidet_dist.search.problem import Edge, Problem, evaluate, held_bytes
from hidet_dist.search.problem.prices import Prices

READERS = 4
CONVERT = ((0.0, 1.0, 1.0, 1.0),) * 4


def instance_of(problem: Problem) -> EliminationInstance:
    every = [list(range(len(costs))) for costs in problem.cost]
    return EliminationInstance(problem, every, Tables(), Prices([0.0] * problem.activations.points))


def eliminated(problem: Problem) -> Eliminated:
    return eliminate(instance_of(problem), gap=1e-6)


def problem_of(choices: Sequence[int], edges: Sequence[Edge]) -> Problem:
    return Problem([[0.0] * n for n in choices], [[0] * n for n in choices], 0, edges)


def choosers(first: int, producer: int, tensor: int) -> list[Edge]:
    """Readers that each take one of two specs of three.

    Two specs suffice. Shares prove no more than one and a half (as for facility location).
    """
    pairs = [(1, 2), (1, 3), (2, 3), (2, 3)]
    return [Edge(tensor, producer, first + n, (0,), pair, CONVERT) for n, pair in enumerate(pairs)]


def test_a_tensor_is_kept_whole_where_shares_leave_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "READERS_LIMITS", (READERS - 1,))
    sizes = [1] + [2] * READERS
    tight = eliminated(problem_of(sizes, choosers(1, 0, 0)))
    assert (tight.bound, tight.seconds) == (2.0, 2.0)
    monkeypatch.setattr(tuning, "TIGHTENINGS", 0)
    assert eliminated(problem_of(sizes, choosers(1, 0, 0))).bound <= 1.5


def test_equal_tensors_are_kept_whole_and_others_stay_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that many operators read would make a table of all of them, and leaves no gap."""
    monkeypatch.setattr(tuning, "READERS_LIMITS", (READERS - 1,))
    count, first = 3, 1 + READERS
    own = [edge for n in range(count) for edge in choosers(first * n + 1, first * n, n)]
    mask = [Edge(count, first * count, edge.consumer, (0,), (0, 0), ((0.0,),)) for edge in own]
    instance = instance_of(problem_of(([1] + [2] * READERS) * count + [1], [*own, *mask]))
    tight = eliminate(instance, gap=1e-6)
    assert (tight.bound, tight.seconds) == (2.0 * count, 2.0 * count)
    assert instance.relaxation.whole == set(range(count))


def test_a_tensor_too_large_to_be_whole_is_shared_from_each_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion takes 6 s from the one spec, which takes 1 s to make, and none from the other, which takes 101 s."""
    for name in ("PAIRED_WORK", "PAIRED_FACTOR", "PAIRED_MOST"):  # not by the number of its readers
        monkeypatch.setattr(tuning, name, 0)
    monkeypatch.setattr(tuning, "TENSOR_ENTRIES", 8)
    convert = ((0.0, 6.0, 6.0), (6.0, 0.0, 0.0), (6.0, 0.0, 0.0))
    edges = [Edge(0, 0, n, (0, 1), (1, 2), convert, n, n) for n in range(1, 6)]
    instance = instance_of(Problem([[1.0, 101.0]] + [[0.0, 50.0]] * 5, [[0, 0]] * 6, 0, edges))
    assert eliminate(instance, gap=1e-6).bound == pytest.approx(7.0)
    assert (instance.relaxation.pairs, instance.relaxation.whole) == ({0}, frozenset())


def test_a_tensor_beside_it_is_shared_too_where_both_would_be_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors with the same three readers, of which one has a fourth.

    Converting that one takes 6 s from the spec that takes 1 s to make, and none from the others. Its producer, beside
    the three readers that the other tensor connects, makes a step of 81 additions.
    """
    specs, each = 3, (0, 1, 2)
    convert = ((0.0, 6.0, 6.0), (6.0, 0.0, 0.0), (6.0, 0.0, 0.0))
    edges = [Edge(0, 0, n, each, each, convert) for n in range(2, 6)]
    edges += [Edge(1, 1, n, (0,), each, convert) for n in range(3, 6)]
    cost = [[1.0, 101.0, 101.0], [0.0], *[[50.0, 0.0, 0.0]] * 4]
    instance = instance_of(Problem(cost, [[0] * len(own) for own in cost], 0, edges))
    for name in ("PAIRED_WORK", "PAIRED_FACTOR", "PAIRED_MOST"):
        monkeypatch.setattr(tuning, name, 0)
    monkeypatch.setattr(tuning, "WORK_LIMIT", specs**4 - 1)
    result = eliminate(instance, gap=1e-6)
    assert instance.relaxation.pairs == {0, 1}
    assert (result.bound, result.seconds) == (13.0, 13.0)


@settings(max_examples=80, deadline=None)
@given(problems(), st.lists(st.integers(0, 5), min_size=6, max_size=6), st.integers(1, 60))
def test_bounds_hold_however_little_work_is_left(problem: Problem, line: list[int], most: int) -> None:
    prices = Prices([float(price) for price in line[: problem.activations.points]])
    every = [list(range(len(costs))) for costs in problem.cost]

    def priced(picks: tuple[int, ...]) -> float:
        return evaluate(problem, picks) + prices.of(held_bytes(problem, problem.groups, picks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "READERS_LIMITS", (0, 1))
        patch.setattr(tuning, "TIGHT_WORK", most)
        try:
            result = eliminate(EliminationInstance(problem, every, Tables(), prices))
        except TooWide:
            return
    assert result.seconds == pytest.approx(priced(result.choices))
    assert result.bound <= min(map(priced, all_picks(problem))) * (1 + 1e-9)
