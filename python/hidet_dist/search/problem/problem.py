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
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from hidet_dist.search.problem.equal_parts import EqualParts, Numbers
from hidet_dist.spec.report import StepTaken


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
    ``buffers()[s][d]`` bytes at the first reader.
    """

    layout: tuple[int, ...]
    nbytes: tuple[int, ...]
    buffers: Callable[[], Sequence[Sequence[int]]]

    @cached_property
    def held(self) -> npt.NDArray[np.float64]:
        """``[s, d]``: the bytes that the tensor holds in spec d, converted from s."""
        layout = np.array(self.layout)
        return np.where(layout[:, None] != layout[None, :], np.array(self.nbytes, dtype=float)[None, :], 0.0)

    @cached_property
    def worked(self) -> npt.NDArray[np.float64]:
        """``[s, d]``: the bytes that converting the tensor from s to d takes besides."""
        layout = np.array(self.layout)
        return np.where(layout[:, None] != layout[None, :], np.array(self._buffers, dtype=float), 0.0)

    def working(self, source: int, required: int) -> int:
        """Return the bytes that a conversion takes besides what it reads and makes."""
        return self._buffers[source][required]

    @cached_property
    def _buffers(self) -> Sequence[Sequence[int]]:
        return self.buffers()


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
        number = Numbers()
        unique = {(edge.tensor, edge.consumer, number.of_list(edge.consumed)): edge for edge in self.edges}
        groups: dict[int, list[Edge]] = {}
        for edge in unique.values():
            groups.setdefault(edge.tensor, []).append(edge)
        return groups

    @cached_property
    def equal_parts(self) -> EqualParts:
        """What equal entities and tensors have in common."""
        return EqualParts(self)

    @cached_property
    def totals(self) -> Totals:
        """The cost and the memory of plans."""
        return Totals(self)

    def resident(self, choices: Sequence[int]) -> int:
        """Sum up the bytes that a plan holds during the whole run."""
        return sum(nbytes[k] for nbytes, k in zip(self.memory, choices, strict=True))

    @cached_property
    def without_costs(self) -> Problem:
        """The same problem with all costs and conversions at 0 seconds, so that only memory is left."""
        free: dict[tuple[int, int], tuple[tuple[float, ...], ...]] = {}
        edges = []
        for edge in self.edges:
            size = len(edge.convert), len(edge.convert[0])
            edges.append(replace(edge, convert=free.setdefault(size, ((0.0,) * size[1],) * size[0])))
        zeros: dict[int, list[float]] = {}
        cost = [zeros.setdefault(len(costs), [0.0] * len(costs)) for costs in self.cost]
        return replace(self, cost=cost, edges=edges)


class _JoinedOnce:
    """Lists joined to one array; equal objects, which must live on, are joined once."""

    def __init__(self, dtype: type[np.generic]):
        self.dtype = dtype
        self.parts: list[Sequence[float]] = []
        self._begins: dict[int, int] = {}
        self._size = 0

    def add(self, values: Sequence[float]) -> int:
        """Return the position at which a list begins."""
        begin = self._begins.get(id(values))
        if begin is None:
            begin = self._begins[id(values)] = self._size
            self.parts.append(values)
            self._size += len(values)
        return begin

    def array(self) -> npt.NDArray[Any]:
        return np.array([value for part in self.parts for value in part], dtype=self.dtype)


class _Choosing:
    """Values that depend on the choices of single entities, as one array."""

    def __init__(self, dtype: type[np.generic], values: Sequence[Sequence[float]], entities: Sequence[int]):
        joined = _JoinedOnce(dtype)
        self._begins = np.array([joined.add(own) for own in values], dtype=np.int64)
        self._entities = np.array(entities, dtype=np.int64)
        self._values = joined.array()

    def of(self, choices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the value of each list for these choices."""
        chosen: npt.NDArray[Any] = self._values[self._begins + choices[self._entities]]
        return chosen


class Totals:
    """The costs and the memory of plans of one problem: :func:`evaluate` and :func:`held_bytes` of arrays.

    The sums are those of the functions to the last bit.
    """

    def __init__(self, problem: Problem):
        every, edges = range(len(problem.cost)), problem.edges
        self._points = problem.activations.points
        self._cost = _Choosing(np.float64, problem.cost, every)
        self._memory = _Choosing(np.int64, problem.memory, every)
        self._tensors = [edge.tensor for edge in edges]
        self._produced = _Choosing(np.int64, [e.produced for e in edges], [e.producer for e in edges])
        self._consumed = _Choosing(np.int64, [e.consumed for e in edges], [e.consumer for e in edges])
        self._join_tables(edges)
        self._join_memory(problem)

    def _join_tables(self, edges: Sequence[Edge]) -> None:
        tables = _JoinedOnce(np.float64)
        tables_of: dict[int, Sequence[float]] = {}
        for edge in edges:
            if id(edge.convert) not in tables_of:
                tables_of[id(edge.convert)] = [seconds for line in edge.convert for seconds in line]
        self._convert_begins = np.array([tables.add(tables_of[id(e.convert)]) for e in edges], dtype=np.int64)
        self._convert_widths = np.array([len(e.convert[0]) for e in edges], dtype=np.int64)
        self._convert = tables.array()

    def _join_memory(self, problem: Problem) -> None:
        intervals = problem.activations.intervals
        self._held = _Choosing(np.int64, [i.nbytes for i in intervals], [i.entity for i in intervals])
        self._begin = np.array([interval.begin for interval in intervals], dtype=np.int64)
        self._end = np.array([interval.end for interval in intervals], dtype=np.int64)
        held = [
            (memory, edge)
            for tensor, group in problem.groups.items()
            if (memory := problem.activations.tensors.get(tensor)) is not None
            for edge in group
        ]
        self._converted = held
        layouts = _JoinedOnce(np.int64)
        begins = np.array([layouts.add(memory.layout) for memory, _ in held], dtype=np.int64)
        self._layouts, self._layout_begins = layouts.array(), begins
        self._source = _Choosing(np.int64, [e.produced for _, e in held], [e.producer for _, e in held])
        self._required = _Choosing(np.int64, [e.consumed for _, e in held], [e.consumer for _, e in held])

    def seconds(self, choices: Sequence[int]) -> float:
        """Compute the cost in seconds of the choices."""
        picks = np.array(choices, dtype=np.int64)
        seconds = sum(self._cost.of(picks).tolist(), 0.0)
        source, required = self._produced.of(picks), self._consumed.of(picks)
        paid = self._convert[self._convert_begins + source * self._convert_widths + required]
        known: set[tuple[int, int, int]] = set()
        for n in np.flatnonzero(paid).tolist():
            key = self._tensors[n], int(source[n]), int(required[n])
            if key not in known:
                known.add(key)
                seconds += float(paid[n])
        return seconds

    def nbytes(self, choices: Sequence[int]) -> list[int]:
        """Compute the bytes held at each program point with these choices."""
        picks = np.array(choices, dtype=np.int64)
        change = np.zeros(self._points + 1, dtype=np.int64)
        change[0] = self._memory.of(picks).sum()
        held = self._held.of(picks)
        np.add.at(change, self._begin, held)
        np.subtract.at(change, self._end + 1, held)
        source, required = self._source.of(picks), self._required.of(picks)
        converts = self._layouts[self._layout_begins + source] != self._layouts[self._layout_begins + required]
        groups: dict[int, tuple[ConvertedTensor, list[Edge]]] = {}
        for n in np.flatnonzero(converts).tolist():
            memory, edge = self._converted[n]
            groups.setdefault(edge.tensor, (memory, []))[1].append(edge)
        changes = change.tolist()
        for memory, group in groups.values():
            add_converted(changes, memory, group, choices)
        return list(accumulate(changes))[:-1]


@dataclass(frozen=True)
class Solution:
    """The choice of every entity; ``seconds`` is the objective, at most ``gap`` (relative) above the optimum.

    ``second_per_byte`` are the prices of bytes at program points for which the solution was computed; empty if the
    budget does not bind. ``points`` are the program points at which the search saw plans exceed the budget. ``known``
    are choices of other plans that it saw, and ``narrowed`` the tensors that it relaxed so that eliminations were not
    too wide, or None. They speed up the search for a problem that differs only in its costs. ``steps`` are those that
    the search took.
    """

    choices: tuple[int, ...]
    seconds: float
    gap: float
    second_per_byte: tuple[float, ...] = ()
    points: tuple[int, ...] = ()
    known: tuple[tuple[int, ...], ...] = ()
    narrowed: frozenset[int] | None = None
    steps: tuple[StepTaken, ...] = field(default=(), compare=False)


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


def each(of: Callable[[Sequence[float]], float], lists: Sequence[Sequence[float]]) -> list[float]:
    """Apply ``max`` or ``min`` to each list; equal entities share theirs, which is read once."""
    known = {number: of(values) for number, values in {id(values): values for values in lists}.items()}
    return [known[id(values)] for values in lists]


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
    change: MutableSequence[int] | npt.NDArray[np.int64],
    memory: ConvertedTensor,
    group: Iterable[Edge],
    choices: Sequence[int],
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
