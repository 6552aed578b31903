"""The problem that solvers take: lists of numbers, without graphs or specs.

Every *entity* (an operator, a weight, a graph input or output) takes exactly one of its choices. An *edge* carries a
tensor from its producer to a consumer. Where the produced and the consumed spec differ, the tensor is converted, which
is paid once for each (tensor, produced spec, consumed spec), however many consumers ask for it.

Memory is counted at *program points*. The bytes that a device holds at a point are a sum of terms of one choice each
(:class:`LiveInterval`) and of terms of one tensor each, which depend on the spec that it is made in and on those that
its readers require (:class:`ConvertedTensor`). The cost has the same structure, so that a price on the bytes of a point
adds to the tables of the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class LiveInterval:
    """Hold ``nbytes[k]`` bytes from program point ``begin`` to ``end`` (included) if the entity takes its choice k."""

    entity: int
    begin: int
    end: int
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class ConvertedTensor:
    """The memory that conversions of one tensor take, by the numbers of its specs.

    Numbers s with the same ``layout[s]`` stand for the same spec: nothing is converted between them. The tensor in spec
    d holds ``nbytes[d]`` from the first reader that requires d to the last. Converting it from s to d takes another
    ``working(s, d)`` bytes at the first reader.
    """

    layout: tuple[int, ...]
    nbytes: tuple[int, ...]
    working: Callable[[int, int], int]


@dataclass(frozen=True)
class Activations:
    """The bytes held at each of ``points`` program points, besides those held during the whole run.

    ``tensors`` are the converted tensors by number.
    """

    points: int
    intervals: tuple[LiveInterval, ...]
    tensors: Mapping[int, ConvertedTensor]


NO_ACTIVATIONS = Activations(1, (), {})


@dataclass(frozen=True)
class Edge:
    """One use of a tensor: its ``producer`` and one ``consumer`` (entity numbers).

    ``produced[k]`` is the number of the spec that the producer's choice k makes. ``consumed[k]`` is the number of the
    spec that the consumer's choice k requires. ``convert[s][d]`` is the time of converting from s to d, in seconds,
    and ``collectives[s][d]`` the number of collectives in that, where it is known.
    Edges of one ``tensor`` share the producer and the numbering of specs. A converted tensor is held for this consumer
    from program point ``begin`` to ``end``.
    """

    tensor: int
    producer: int
    consumer: int
    produced: tuple[int, ...]
    consumed: tuple[int, ...]
    convert: tuple[tuple[float, ...], ...]
    begin: int = 0
    end: int = 0
    collectives: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Problem:
    """``cost[e][k]`` in seconds, ``memory[e][k]`` and ``budget`` in bytes, for entity e and its choice k.

    ``memory`` is held during the whole run. ``activations`` are held besides, during live intervals.
    ``collectives[e][k]`` is the number of collectives in the cost, where it is known.
    """

    cost: Sequence[Sequence[float]]
    memory: Sequence[Sequence[int]]
    budget: int
    edges: Sequence[Edge]
    activations: Activations = NO_ACTIVATIONS
    collectives: Sequence[Sequence[int]] = ()

    @cached_property
    def groups(self) -> dict[int, list[Edge]]:
        """The edges of each tensor; edges with the same consumer and required specs (as of x * x) count once."""
        unique = {(edge.tensor, edge.consumer, edge.consumed): edge for edge in self.edges}
        groups: dict[int, list[Edge]] = {}
        for edge in unique.values():
            groups.setdefault(edge.tensor, []).append(edge)
        return groups

    @cached_property
    def without_costs(self) -> Problem:
        """The same problem with all costs and conversions at 0 seconds, so that only memory is left."""
        free: dict[tuple[int, int], tuple[tuple[float, ...], ...]] = {}
        edges = []
        for edge in self.edges:
            size = len(edge.convert), len(edge.convert[0])
            edges.append(replace(edge, convert=free.setdefault(size, ((0.0,) * size[1],) * size[0])))
        return replace(self, cost=[[0.0] * len(costs) for costs in self.cost], edges=edges)


@dataclass(frozen=True)
class Solution:
    """The choice of every entity; ``seconds`` is the objective, at most ``gap`` (relative) above the optimum.

    ``second_per_byte`` are the prices of bytes at program points for which the solution was computed; empty if the
    budget does not bind. ``points`` are the program points at which the search saw plans exceed the budget. ``known``
    are choices of other plans that it saw. Both speed up the search for a problem that differs only in its costs.
    """

    choices: tuple[int, ...]
    seconds: float
    gap: float
    second_per_byte: tuple[float, ...] = ()
    points: tuple[int, ...] = ()
    known: tuple[tuple[int, ...], ...] = ()


def evaluate(problem: Problem, choices: Sequence[int]) -> float:
    """Compute the cost in seconds of the choices, term by term, without a solver."""
    seconds = sum(costs[k] for costs, k in zip(problem.cost, choices, strict=True))
    paid: set[tuple[int, int, int]] = set()
    for edge in problem.edges:
        s, d = edge.produced[choices[edge.producer]], edge.consumed[choices[edge.consumer]]
        if (edge.tensor, s, d) not in paid:
            paid.add((edge.tensor, s, d))
            seconds += edge.convert[s][d]
    return seconds


def readers(problem: Problem) -> dict[int, list[Edge]]:
    """Map each tensor to its edges; edges with the same consumer and required specs (as of x * x) count once."""
    return problem.groups


def held_bytes(problem: Problem, groups: Mapping[int, Iterable[Edge]], choices: Sequence[int]) -> list[int]:
    """Compute the bytes held at each program point with these choices; ``groups`` are the edges of each tensor."""
    activations = problem.activations
    change = [0] * (activations.points + 1)
    change[0] = sum(nbytes[k] for nbytes, k in zip(problem.memory, choices, strict=True))
    for interval in activations.intervals:
        nbytes = interval.nbytes[choices[interval.entity]]
        change[interval.begin] += nbytes
        change[interval.end + 1] -= nbytes
    for tensor, group in groups.items():
        memory = activations.tensors.get(tensor)
        if memory is not None:
            add_converted(change, memory, group, choices)
    return list(accumulate(change))[:-1]


def add_converted(
    change: MutableSequence[int], memory: ConvertedTensor, group: Iterable[Edge], choices: Sequence[int]
) -> None:
    """Add the bytes that a tensor's conversions hold to the changes of the bytes held from point to point."""
    layout = memory.layout
    spans: dict[int, tuple[int, int]] = {}
    source = -1
    for edge in group:
        source, required = edge.produced[choices[edge.producer]], edge.consumed[choices[edge.consumer]]
        if layout[source] != layout[required]:
            begin, end = spans.get(required, (edge.begin, edge.end))
            spans[required] = min(begin, edge.begin), max(end, edge.end)
    for required, (begin, end) in spans.items():
        change[begin] += memory.nbytes[required]
        change[end + 1] -= memory.nbytes[required]
        working = memory.working(source, required)
        change[begin] += working
        change[begin + 1] -= working


def peaks(nbytes: Sequence[int], points: Iterable[int]) -> list[int]:
    """Select the local peaks: the ``points`` at which no less is held than at both neighbours."""
    padded = (0, *nbytes, 0)
    return [m for m in points if padded[m + 1] >= padded[m] and padded[m + 1] >= padded[m + 2]]


def restricted(problem: Problem, kept: Sequence[Sequence[int]]) -> Problem:
    """Restrict the problem to the choices ``kept`` of each entity."""
    edges = [
        replace(
            edge,
            produced=tuple(edge.produced[k] for k in kept[edge.producer]),
            consumed=tuple(edge.consumed[k] for k in kept[edge.consumer]),
        )
        for edge in problem.edges
    ]
    intervals = tuple(
        replace(interval, nbytes=tuple(interval.nbytes[k] for k in kept[interval.entity]))
        for interval in problem.activations.intervals
    )
    return replace(
        problem,
        cost=[[costs[k] for k in choices] for costs, choices in zip(problem.cost, kept, strict=True)],
        memory=[[nbytes[k] for k in choices] for nbytes, choices in zip(problem.memory, kept, strict=True)],
        edges=edges,
        activations=replace(problem.activations, intervals=intervals),
        collectives=[[counts[k] for k in choices] for counts, choices in zip(problem.collectives, kept, strict=True)]
        if problem.collectives
        else (),
    )
