"""The problem of a few entities of a plan, all others of which keep their choices.

It has these entities and what they touch, so that it is as large as the window, and not as the graph. All else is a
constant cost, and bytes that are held beside. Between two points at which something of the window begins or ends, the
window's bytes are the same: only the most of the others' bytes there counts, so that these points become one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from hidet_dist.search.problem.problem import Activations, Edge, LiveInterval, Problem

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """The problem of some entities, and what its numbers are in the whole problem.

    Attributes
    ----------
    problem: its first entities are those of the window. The others have one choice each: they stand for the other ends
        of the window's tensors, and the last one for the bytes of all else.
    plan: the choices of all entities of the whole problem, which those of the window replace.
    entities: the numbers of the window's entities in the whole problem, in ascending order.
    seconds_beside: the cost of all else.
    begins: the first program point in the whole problem of each of the window's points.
    dearest: that of these points at which all else holds the most bytes, for each of the window's points.
    """

    problem: Problem
    plan: tuple[int, ...]
    entities: tuple[int, ...]
    seconds_beside: float
    begins: _Integers
    dearest: _Integers

    @property
    def choices(self) -> tuple[int, ...]:
        """The plan's choices of the window's problem."""
        return self._with_others([self.plan[entity] for entity in self.entities])

    def kept(self, kept: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Select the choices of the window's problem among those of the whole one."""
        others = [(0,)] * (len(self.problem.cost) - len(self.entities))
        return [*(kept[entity] for entity in self.entities), *others]

    def planned(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Replace the plan's choices by those of the window's problem."""
        plan = list(self.plan)
        for entity, choice in zip(self.entities, choices, strict=False):
            plan[entity] = choice
        return tuple(plan)

    def points(self, points: Sequence[int]) -> list[int]:
        """Map program points of the whole problem to those of the window, each once."""
        numbers: _Integers = np.searchsorted(self.begins, np.array(points, dtype=np.int64), "right") - 1
        return sorted(set(numbers.tolist()))

    def prices(self, second_per_byte: Sequence[float]) -> list[float]:
        """Sum up the prices of program points that are one in the window."""
        sums: list[float] = np.add.reduceat(np.array(second_per_byte), self.begins).tolist()
        return sums

    def _with_others(self, choices: Sequence[int]) -> tuple[int, ...]:
        return (*choices, *(0,) * (len(self.problem.cost) - len(choices)))


class Windows:
    """What windows of one problem are made of."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self._touched: list[list[int]] = [[] for _ in problem.cost]
        self._intervals: list[list[LiveInterval]] = [[] for _ in problem.cost]
        for tensor, group in problem.groups.items():
            for entity in dict.fromkeys((group[0].producer, *(edge.consumer for edge in group))):
                self._touched[entity].append(tensor)
        for interval in problem.activations.intervals:
            self._intervals[interval.entity].append(interval)

    def of(self, entities: Sequence[int], plan: Sequence[int]) -> Window:
        """Make the problem of some entities, in ascending order, of which all others have the choices of a plan."""
        whole, number = self._problem, {entity: n for n, entity in enumerate(entities)}
        made = _Ends(plan, number)
        tensors = dict.fromkeys(tensor for entity in entities for tensor in self._touched[entity])
        edges = [edge for tensor in tensors for edge in made.edges(whole.groups[tensor])]
        intervals = [
            replace(interval, entity=number[entity]) for entity in entities for interval in self._intervals[entity]
        ]
        last = len(number) + made.others
        cost = [*(whole.cost[entity] for entity in entities), *[[0.0]] * (made.others + 1)]
        memory = [*(whole.memory[entity] for entity in entities), *[[0]] * (made.others + 1)]
        held = {tensor: own for tensor in tensors if (own := whole.activations.tensors.get(tensor)) is not None}
        points = whole.activations.points
        problem = Problem(cost, memory, whole.budget, edges, Activations(points, tuple(intervals), held))
        choices = (*(plan[entity] for entity in entities), *(0,) * (made.others + 1))
        totals = problem.totals
        beside = np.array(whole.totals.nbytes(plan), dtype=np.int64) - np.array(totals.nbytes(choices), dtype=np.int64)
        begins = _begins(problem)
        ends = np.append(begins[1:], points)
        most: _Integers = np.maximum.reduceat(beside, begins)
        least = int(most.min())
        always = [LiveInterval(last, n, n, (int(nbytes) - least,)) for n, nbytes in enumerate(most) if nbytes > least]
        memory[-1] = [least]
        place = _WindowPoints(begins)
        activations = Activations(len(begins), (*map(place.interval, intervals), *always), held)
        problem = replace(problem, memory=memory, edges=[*map(place.edge, edges)], activations=activations)
        dearest = np.array([b + int(beside[b:e].argmax()) for b, e in zip(begins, ends, strict=True)], dtype=np.int64)
        seconds = whole.totals.seconds(plan) - totals.seconds(choices)
        return Window(problem, tuple(plan), tuple(entities), seconds, begins, dearest)


class _Ends:
    """The edges of the window's tensors, with entities of one choice in place of those beside the window.

    ``others`` counts these entities, whose numbers follow the window's.
    """

    def __init__(self, plan: Sequence[int], number: Mapping[int, int]):
        self._plan, self._number, self.others = plan, number, 0

    def edges(self, group: Sequence[Edge]) -> list[Edge]:
        """Make the edges of a tensor. Readers beside the window that require the same spec are one."""
        first, plan, number = group[0], self._plan, self._number
        producer, produced = number.get(first.producer), first.produced
        if producer is None:
            producer, produced = self._other(), (first.produced[plan[first.producer]],)
        edges: list[Edge] = []
        fixed: dict[int, list[Edge]] = {}
        for edge in group:
            consumer = number.get(edge.consumer)
            if consumer is None:
                fixed.setdefault(edge.consumed[plan[edge.consumer]], []).append(edge)
            else:
                edges.append(replace(edge, producer=producer, produced=produced, consumer=consumer))
        for spec, readers in fixed.items():
            begin, end = min(edge.begin for edge in readers), max(edge.end for edge in readers)
            one = replace(readers[0], consumer=self._other(), consumed=(spec,), begin=begin, end=end)
            edges.append(replace(one, producer=producer, produced=produced))
        return edges

    def _other(self) -> int:
        self.others += 1
        return len(self._number) + self.others - 1


def _begins(problem: Problem) -> _Integers:
    """List the program points at which something of a window begins, or has ended, and the first one."""
    spans = {(interval.begin, interval.end) for interval in problem.activations.intervals}
    spans |= {(edge.begin, edge.end) for edge in problem.edges}
    # Converting takes bytes at the first point alone.
    points = {0, *map(itemgetter(0), spans), *(begin + 1 for begin, _ in spans), *(end + 1 for _, end in spans)}
    return np.array(sorted(point for point in points if point < problem.activations.points), dtype=np.int64)


class _WindowPoints:
    """The window's points in place of those of the whole problem."""

    def __init__(self, begins: _Integers):
        self._begins = begins

    def interval(self, interval: LiveInterval) -> LiveInterval:
        return replace(interval, begin=self._at(interval.begin), end=self._at(interval.end))

    def edge(self, edge: Edge) -> Edge:
        return replace(edge, begin=self._at(edge.begin), end=self._at(edge.end))

    def _at(self, point: int) -> int:
        return int(np.searchsorted(self._begins, point, "right")) - 1
