"""The removal of choices that no plan within a budget contains, in the part of a graph where the budget is tight.

:class:`hidet_dist.search.budget.capacity.Capacity` adds up the bytes around every entity. Where even the most bytes
around an entity leave room, it can remove nothing. Such entities are most of a large graph, and an addition of one
number each tells them: they take part with their least bytes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hidet_dist.search import tuning
from hidet_dist.search.budget.capacity import Capacity, Fitting
from hidet_dist.search.limits import Limits
from hidet_dist.search.problem import ConvertedTensor, Edge, Problem
from hidet_dist.search.problem.equal_parts import crossed

_Bytes = npt.NDArray[np.int64]


class Crowding:
    """The bytes that entities hold at least and at most, and the part of a problem where they may exceed a budget."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self._reads: list[list[Edge]] = [[] for _ in problem.cost]
        for group in problem.groups.values():
            for edge in group:
                self._reads[edge.consumer].append(edge)
        self._converted: dict[tuple[int, int, int], int] = {}

    def fitting(
        self, kept: Sequence[Sequence[int]], budget: int, forbidden_cost: float, limits: Limits | None = None
    ) -> Fitting | None:
        """Remove what no plan within the budget contains, as :meth:`Capacity.fitting` does. None when no plan fits.

        Raises
        ------
        OutOfTimeError
            When the time limit is reached.
        """
        crowded = self._crowded(kept, budget, limits)
        if crowded is None:
            return None
        part, own = self._part(kept, crowded)
        every = [range(len(choices)) if e in own else (0,) for e, choices in enumerate(kept)]
        fitting = Capacity(part).fitting(every, budget, forbidden_cost, None, limits)
        if fitting is None:
            return None
        left = [[choices[k] for k in fitting.kept[e]] if e in own else list(choices) for e, choices in enumerate(kept)]
        forbidden = {
            after.tensor: after.convert
            for after, before in zip(fitting.problem.edges, part.edges, strict=True)
            if after.convert is not before.convert
        }
        edges = [
            replace(edge, convert=forbidden[edge.tensor]) if edge.tensor in forbidden else edge
            for edge in self._problem.edges
        ]
        return Fitting(left, replace(self._problem, budget=budget, edges=edges), fitting.resident)

    def _crowded(self, kept: Sequence[Sequence[int]], budget: int, limits: Limits | None) -> set[int] | None:
        """Select the entities around which plans may exceed the budget; None if the least bytes of all do."""
        problem = self._problem
        numbers: dict[tuple[int, ...], int] = {}
        number = [numbers.setdefault(tuple(choices), len(numbers)) for choices in kept]
        known: dict[tuple[int, int], tuple[int, int]] = {}

        def extent(entity: int, nbytes: Sequence[int]) -> tuple[int, int]:
            key = id(nbytes), number[entity]
            if key not in known:
                values = [nbytes[k] for k in kept[entity]]
                known[key] = min(values), max(values)
            return known[key]

        extra, least = [0] * len(kept), 0
        begins, ends = [problem.activations.points - 1] * len(kept), [0] * len(kept)
        change = np.zeros(problem.activations.points + 1, dtype=np.int64)
        for entity, nbytes in enumerate(problem.memory):
            low, high = extent(entity, nbytes)
            least += low
            extra[entity] = high - low
        for live in problem.activations.intervals:
            low, high = extent(live.entity, live.nbytes)
            change[live.begin] += low
            change[live.end + 1] -= low
            extra[live.entity] += high - low
            begins[live.entity] = min(begins[live.entity], live.begin)
            ends[live.entity] = max(ends[live.entity], live.end)
        room: _Bytes = budget - least - np.cumsum(change)[:-1]
        if room.min() < 0:
            return None
        crowded = set()
        for entity, edges in enumerate(self._reads):
            if limits is not None and not entity % tuning.CHECK_STEPS:
                limits.check()
            most, begin, end = extra[entity], begins[entity], ends[entity]
            for edge in edges:
                most += extra[edge.producer] + self._most_converted(edge)
                begin, end = min(begin, edge.begin), max(end, edge.end)
            if most and (begin > end or most > room[begin : end + 1].min()):
                crowded.add(entity)
        return crowded

    def _most_converted(self, edge: Edge) -> int:
        """Compute the most bytes that a conversion of an edge holds, those while it is made included."""
        memory: ConvertedTensor | None = self._problem.activations.tensors.get(edge.tensor)
        if memory is None:
            return 0
        key = id(memory), id(edge.produced), id(edge.consumed)
        if key not in self._converted:
            at = crossed(*(tuple(dict.fromkeys(specs)) for specs in (edge.produced, edge.consumed)))
            self._converted[key] = int((memory.held[at] + memory.worked[at]).max())
        return self._converted[key]

    def _part(self, kept: Sequence[Sequence[int]], crowded: set[int]) -> tuple[Problem, set[int]]:
        """Make the problem of the crowded entities and those that share tensors with them, and list these entities.

        All others hold their least bytes.
        """
        problem = self._problem
        tensors = {edge.tensor for entity in crowded for edge in self._reads[entity]}
        own = set(crowded)
        for tensor in tensors:
            for edge in problem.groups[tensor]:
                own |= {edge.producer, edge.consumer}

        known: dict[tuple[int, tuple[int, ...], bool], tuple[int, ...]] = {}

        def taken(entity: int, values: Sequence[int], whole: bool = True) -> tuple[int, ...]:
            """Select the values of the choices left, or the least; equal lists stay one list."""
            key = id(values), tuple(kept[entity]), whole
            if key not in known:
                left = tuple(values[k] for k in kept[entity])
                known[key] = left if whole else (min(left),)
            return known[key]

        memory = [taken(entity, nbytes, entity in own) for entity, nbytes in enumerate(problem.memory)]
        intervals = tuple(
            replace(live, nbytes=taken(live.entity, live.nbytes, live.entity in own))
            for live in problem.activations.intervals
        )
        edges = [
            replace(edge, produced=taken(edge.producer, edge.produced), consumed=taken(edge.consumer, edge.consumed))
            for edge in problem.edges
            if edge.tensor in tensors
        ]
        activations = replace(problem.activations, intervals=intervals)
        cost = [[0.0] * len(nbytes) for nbytes in memory]
        return replace(problem, cost=cost, memory=memory, edges=edges, activations=activations, collectives=()), own
