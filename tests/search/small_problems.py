"""Small problems, few enough to try all choices."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import strategies as st

from hidet_dist.search.problem import Activations, ConvertedTensor, Edge, LiveInterval, Problem, held_bytes, readers

prices = st.integers(0, 20).map(float)


@st.composite
def problems(draw: st.DrawFn, activations: bool = True) -> Problem:
    """A graph of up to 6 entities with tensors of up to 5 readers, in which some choices break the budget."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    cost = [draw(st.lists(prices, min_size=n, max_size=n)) for n in sizes]
    nbytes_ = st.integers(0, 9)
    memory = [draw(st.lists(nbytes_, min_size=n, max_size=n)) for n in sizes]
    moments = len(sizes)
    edges, tensors = [], {}
    for tensor in range(draw(st.integers(0, 4))):
        producer = draw(st.integers(0, len(sizes) - 2))
        specs = draw(st.integers(1, 3))
        spec = st.integers(0, specs - 1)
        convert = tuple(tuple(0.0 if s == d else draw(prices) for d in range(specs)) for s in range(specs))
        produced = tuple(draw(spec) for _ in range(sizes[producer]))
        for _ in range(draw(st.integers(1, 5))):
            consumer = draw(st.integers(producer + 1, len(sizes) - 1))
            consumed = tuple(draw(spec) for _ in range(sizes[consumer]))
            end = draw(st.integers(consumer, moments - 1))
            edges.append(Edge(tensor, producer, consumer, produced, consumed, convert, consumer, end))
        if activations:
            work = [[draw(nbytes_) for _ in range(specs)] for _ in range(specs)]
            layout = tuple(min(s, draw(spec)) for s in range(specs))
            nbytes = tuple(draw(nbytes_) for _ in range(specs))
            tensors[tensor] = ConvertedTensor(layout, nbytes, lambda work=work: work)
    holds = []
    for _ in range(draw(st.integers(0, 4)) if activations else 0):
        entity = draw(st.integers(0, len(sizes) - 1))
        begin = draw(st.integers(0, moments - 1))
        nbytes = tuple(draw(nbytes_) for _ in range(sizes[entity]))
        holds.append(LiveInterval(entity, begin, draw(st.integers(begin, moments - 1)), nbytes))
    problem = Problem(cost, memory, 0, edges, Activations(moments, tuple(holds), tensors))
    peaks = sorted(peak(problem, picks) for picks in all_picks(problem))
    return replace(problem, budget=draw(st.integers(peaks[0], peaks[-1])))


def resident(problem: Problem, picks: tuple[int, ...]) -> int:
    return sum(m[k] for m, k in zip(problem.memory, picks, strict=True))


def peak(problem: Problem, picks: tuple[int, ...]) -> int:
    return max(held_bytes(problem, readers(problem), picks))


def all_picks(problem: Problem) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(costs)) for costs in problem.cost)))
