"""The search's own problem as a pairwise problem: with the same plans, costs and memory.

A :class:`~hidet_dist.search.problem.Problem` has two things that a pairwise problem lacks: an entity holds bytes during
several live intervals, and a tensor with several readers is converted once for all that require the same spec. Both
become nodes and edges:

* Each further live interval of an entity is a node with the distinct numbers of bytes, tied to the entity.
* An entity with many more choices than specs at an edge gets a node for the spec, tied to it.
* A tensor with one reader is an edge with the costs of its conversions. Where conversions hold memory, it is a node
  with the pairs of specs, tied to both sides.
* For a tensor with several readers there is a node for each spec: whether it is required, and at what cost. Its memory
  is a chain of nodes, one for each segment between the program points at which a reader's interval begins or ends. The
  states of a segment are "same layout", "before", "begins", "held" and "after". A reader that requires the spec
  excludes "before" and "after" in the first and the last segment of its interval; one that does not excludes "begins".

Tied strategies have edges of 0 and :data:`FORBIDDEN`. An assignment may pay more and hold more than the choices of its
entities need, never less, so the least cost within a limit is the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hidet_dist.errors import ProblemError
from hidet_dist.search import tuning
from hidet_dist.search.pairwise.problem import FORBIDDEN, Ints, PairwiseProblem
from hidet_dist.search.problem import ConvertedTensor, Edge, LiveInterval, Problem, readers

_SAME, _BEFORE, _HELD, _AFTER, _BEGINS = range(5)  # states of a segment; from _BEGINS on, one for each number of bytes
_LARGEST = 2.0**53  # integers up to here are exact in double precision
_Matrix = npt.NDArray[np.float64]
_Derived = Callable[[Sequence[int]], int]
_Segment = tuple[int, int, Edge | None]  # its first point, that of the next one, and the reader that begins with it


@dataclass(frozen=True)
class Encoded:
    """A pairwise problem, and its relation to the problem that it stands for.

    Attributes
    ----------
    problem: the pairwise problem. Its first nodes are the entities, whose strategies are their choices.
    unit_seconds: the seconds that its costs count in, a power of 1000.
    """

    problem: PairwiseProblem
    unit_seconds: float
    entities: int
    derived: tuple[_Derived, ...]

    def choices(self, assignment: Sequence[int] | Ints) -> tuple[int, ...]:
        """Read the choices of the entities off an assignment."""
        return tuple(int(strategy) for strategy in assignment[: self.entities])

    def assignment(self, choices: Sequence[int]) -> Ints:
        """Extend the choices of the entities to the assignment that costs and holds what they do."""
        return np.array([*choices, *(strategy(choices) for strategy in self.derived)], dtype=np.int64)


def encode(problem: Problem) -> Encoded:
    """Encode a problem as a pairwise problem. Raises ProblemError when costs are negative or not finite."""
    return _Encoder(problem).encoded()


class _Encoder:
    def __init__(self, problem: Problem):
        self.given = problem
        self.unit = _unit_seconds(problem)
        self.costs: list[_Matrix] = []
        self.nbytes: list[_Matrix] = []
        self.intervals: list[tuple[int, int]] = []
        self.derived: list[_Derived] = []
        self.ends: list[tuple[int, int]] = []
        self.edge_matrix: list[int] = []
        self.matrices: list[_Matrix] = []
        self.numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        self.spec_nodes: dict[tuple[int, tuple[int, ...]], int] = {}
        self._entities()
        for tensor, group in readers(problem).items():
            memory = problem.activations.tensors.get(tensor)
            if len(group) == 1:
                self._one_reader(group[0], memory)
                continue
            for spec in sorted({d for edge in group for d in edge.consumed}):
                self._paid(group, spec)
                if memory is not None:
                    self._held(group, spec, memory)

    def encoded(self) -> Encoded:
        sizes = [len(costs) for costs in self.costs]
        problem = PairwiseProblem(
            np.cumsum([0, *sizes]),
            _joined(self.costs),
            _joined(self.nbytes),
            np.array(self.intervals, dtype=np.int64),
            np.array(self.ends, dtype=np.int64),
            np.array(self.edge_matrix, dtype=np.int64),
            np.cumsum([0, *(matrix.size for matrix in self.matrices)])[:-1],
            _joined([matrix.reshape(-1) for matrix in self.matrices]),
            float(self.given.budget),
        )
        return Encoded(problem, self.unit, len(self.given.cost), tuple(self.derived))

    def _node(self, costs: Iterable[float], nbytes: Iterable[float], interval: tuple[int, int]) -> int:
        self.costs.append(np.array(list(costs), dtype=np.float64))
        self.nbytes.append(np.array(list(nbytes), dtype=np.float64))
        self.intervals.append(interval)
        return len(self.costs) - 1

    def _more(self, derived: _Derived, costs: Iterable[float], nbytes: Iterable[float], begin: int, end: int) -> int:
        """Add a node that is no entity; ``derived`` gives its strategy from the choices of the entities."""
        self.derived.append(derived)
        return self._node(costs, nbytes, (begin, end))

    def _edge(self, first: int, second: int, matrix: _Matrix) -> None:
        if not matrix.any():
            return
        number = self.numbers.setdefault((matrix.shape, matrix.tobytes()), len(self.matrices))
        if number == len(self.matrices):
            self.matrices.append(matrix)
        self.ends.append((first, second))
        self.edge_matrix.append(number)

    def _allow(self, first: int, second: int, allowed: npt.NDArray[np.bool_]) -> None:
        """Forbid all pairs of strategies but those allowed."""
        self._edge(first, second, np.where(allowed, 0.0, FORBIDDEN * 10))

    def _entities(self) -> None:
        """Add the nodes of the entities, then those of the live intervals that do not fit on them."""
        problem = self.given
        intervals: list[list[LiveInterval]] = [[] for _ in problem.cost]
        for interval in problem.activations.intervals:
            intervals[interval.entity].append(interval)
        spans: list[dict[tuple[int, int], tuple[int, ...]]] = []
        for costs, whole, held_during in zip(problem.cost, problem.memory, intervals, strict=True):
            held = {(0, problem.activations.points): tuple(whole)}
            for interval in held_during:
                key = interval.begin, interval.end + 1
                before = held.get(key, (0,) * len(interval.nbytes))
                held[key] = tuple(a + b for a, b in zip(before, interval.nbytes, strict=True))
            spans.append({span: nbytes for span, nbytes in held.items() if any(nbytes) and span[0] < span[1]})
            span = next(iter(spans[-1]), (0, 0))
            self._node((cost / self.unit for cost in costs), spans[-1].pop(span, (0,) * len(costs)), span)
        for e, rest in enumerate(spans):
            for (begin, end), nbytes in rest.items():
                self._tied(e, nbytes, begin, end)

    def _tied(self, node: int, nbytes: Sequence[int], begin: int, end: int, derived: _Derived | None = None) -> None:
        """Add a node that holds what the strategy of another one tells; ``derived`` gives the latter's strategy."""
        distinct = sorted(set(nbytes))
        numbers = [distinct.index(n) for n in nbytes]

        def strategy(choices: Sequence[int]) -> int:
            return numbers[choices[node] if derived is None else derived(choices)]

        tied = self._more(strategy, [0.0] * len(distinct), distinct, begin, end)
        self._allow(node, tied, np.array(nbytes)[:, None] == np.array(distinct)[None, :])

    def _spec(self, e: int, specs: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return a node, and the spec for each of its strategies: that of the entity, or one for the spec alone."""
        distinct = tuple(dict.fromkeys(specs))
        if len(distinct) * tuning.SHARED_SPECS >= len(specs):
            return e, specs
        node = self.spec_nodes.get((e, specs))
        if node is None:
            numbers = [distinct.index(spec) for spec in specs]
            zeros = [0.0] * len(distinct)
            node = self._more(lambda choices: numbers[choices[e]], zeros, zeros, 0, 0)
            self._allow(e, node, np.array(specs)[:, None] == np.array(distinct)[None, :])
            self.spec_nodes[e, specs] = node
        return node, distinct

    def _one_reader(self, edge: Edge, memory: ConvertedTensor | None) -> None:
        (producer, produced), (consumer, consumed) = (
            self._spec(edge.producer, edge.produced),
            self._spec(edge.consumer, edge.consumed),
        )
        pairs = [(s, d) for s in dict.fromkeys(produced) for d in dict.fromkeys(consumed)]
        held = [0 if memory is None else _converted(memory, s, d) for s, d in pairs]
        working = [0 if memory is None else _working(memory, s, d) for s, d in pairs]
        if not any(held) and not any(working):
            self._edge(producer, consumer, np.array(edge.convert)[np.ix_(produced, consumed)] / self.unit)
            return
        numbers = {pair: i for i, pair in enumerate(pairs)}

        def strategy(choices: Sequence[int]) -> int:
            return numbers[edge.produced[choices[edge.producer]], edge.consumed[choices[edge.consumer]]]

        if edge.begin == edge.end:
            held, working = [a + b for a, b in zip(held, working, strict=True)], []
        costs = [edge.convert[s][d] / self.unit for s, d in pairs]
        node = self._more(strategy, costs, held, edge.begin, edge.end + 1)
        self._allow(producer, node, np.array([[s == spec for s, _ in pairs] for spec in produced]))
        self._allow(consumer, node, np.array([[d == spec for _, d in pairs] for spec in consumed]))
        if any(working):
            self._tied(node, working, edge.begin, edge.begin + 1, strategy)

    def _paid(self, group: Sequence[Edge], spec: int) -> None:
        """Add a node for whether a spec is required of a tensor with several readers, and the cost of converting it."""
        first = group[0]
        producer, produced = self._spec(first.producer, first.produced)
        seconds = [first.convert[s][spec] for s in produced]
        distinct = sorted(set(seconds))
        if not any(distinct):
            return

        def strategy(choices: Sequence[int]) -> int:
            if not any(edge.consumed[choices[edge.consumer]] == spec for edge in group):
                return 0
            return 1 + distinct.index(first.convert[first.produced[choices[first.producer]]][spec])

        free = [0.0, *distinct]
        node = self._more(strategy, [cost / self.unit for cost in free], [0.0] * len(free), 0, 0)
        paid = np.array(seconds)[:, None] == np.array(distinct)[None, :]
        self._allow(producer, node, np.concatenate([np.ones((len(seconds), 1), dtype=bool), paid], axis=1))
        required = np.arange(len(free)) > 0
        for edge in group:
            self._require(edge, spec, node, required)

    def _require(self, edge: Edge, spec: int, node: int, allowed: npt.NDArray[np.bool_]) -> None:
        """Restrict a node to the allowed strategies if a reader requires the spec."""
        consumer, consumed = self._spec(edge.consumer, edge.consumed)
        self._allow(consumer, node, (np.array(consumed) != spec)[:, None] | allowed[None, :])

    def _held(self, group: Sequence[Edge], spec: int, memory: ConvertedTensor) -> None:
        """Add the chain of nodes for the memory of a tensor in a spec that several readers share."""
        first = group[0]
        requiring = [edge for edge in group if spec in edge.consumed]
        producer, produced = self._spec(first.producer, first.produced)
        working = [_working(memory, s, spec) for s in produced]
        same = np.array([memory.layout[s] == memory.layout[spec] for s in produced])
        distinct = sorted({n for n, unchanged in zip(working, same, strict=True) if not unchanged})
        if same.all() or not (memory.nbytes[spec] or any(distinct)):
            return
        chain = _chain(requiring)
        count = _BEGINS + len(distinct)
        states = np.arange(count)
        holds = (states == _HELD) | (states >= _BEGINS)
        present = holds | (states == _SAME)
        # What may follow a state: nothing is held before "begins", "held" follows it, and "after" is for good.
        follows = np.zeros((count, count), dtype=bool)
        follows[_SAME, _SAME] = follows[_AFTER, _AFTER] = True
        follows[_BEFORE, _BEFORE] = follows[_BEFORE, _BEGINS:] = True
        follows[np.ix_(holds, (states == _HELD) | (states == _AFTER))] = True
        fits = np.ones((len(produced), count), dtype=bool)
        fits[:, _SAME] = same
        fits[:, _BEGINS:] = (np.array(working)[:, None] == np.array(distinct)[None, :]) & ~same[:, None]
        nodes: list[int] = []
        for number, (begin, end, reader) in enumerate(chain):
            possible = states <= _BEFORE
            if number:
                possible |= (states == _HELD) | (states == _AFTER)
            if reader is not None:
                possible |= states >= _BEGINS
            costs = np.where(possible, 0.0, FORBIDDEN * 10)
            strategy = self._state(requiring, spec, memory, distinct, chain, number)
            nodes.append(self._more(strategy, costs, np.where(holds, memory.nbytes[spec], 0), begin, end))
            if number:
                self._allow(nodes[-2], nodes[-1], follows)
            if reader is not None:
                if any(distinct):
                    self._tied(nodes[-1], [*[0] * _BEGINS, *distinct], begin, begin + 1, strategy)
                self._allow(producer, nodes[-1], fits)
                self._require(reader, spec, nodes[-1], present)
                # It begins with a reader that requires it: not before, where its buffers may fit better.
                consumer, consumed = self._spec(reader.consumer, reader.consumed)
                self._allow(consumer, nodes[-1], (np.array(consumed) == spec)[:, None] | (states < _BEGINS)[None, :])
        for edge in requiring:
            last = max(number for number, (begin, _, _) in enumerate(chain) if begin <= edge.end)
            if chain[last][2] is not edge:
                self._require(edge, spec, nodes[last], present)

    def _state(
        self,
        requiring: Sequence[Edge],
        spec: int,
        memory: ConvertedTensor,
        distinct: Sequence[int],
        chain: Sequence[_Segment],
        number: int,
    ) -> _Derived:
        """Return the function from choices to the state of one segment."""

        def strategy(choices: Sequence[int]) -> int:
            source = requiring[0].produced[choices[requiring[0].producer]]
            if memory.layout[source] == memory.layout[spec]:
                return _SAME
            active = [edge for edge in requiring if edge.consumed[choices[edge.consumer]] == spec]
            if not active:
                return _BEFORE
            first = min(i for i, (_, _, reader) in enumerate(chain) if any(reader is edge for edge in active))
            if number <= first:
                return _BEFORE if number < first else _BEGINS + distinct.index(_working(memory, source, spec))
            return _HELD if chain[number][0] <= max(edge.end for edge in active) else _AFTER

        return strategy


def _chain(requiring: Sequence[Edge]) -> list[_Segment]:
    """Cut time where the interval of a reader begins or ends; of readers that begin together, each has a segment."""
    begins = sorted(requiring, key=lambda edge: edge.begin)
    ends = {edge.end + 1 for edge in requiring} - {edge.begin for edge in requiring}
    events: list[tuple[int, Edge | None]] = [*((edge.begin, edge) for edge in begins), *((end, None) for end in ends)]
    events.sort(key=lambda event: event[0])
    return [(begin, end, reader) for (begin, reader), (end, _) in itertools.pairwise(events)]


def _converted(memory: ConvertedTensor, s: int, d: int) -> int:
    """The bytes that a tensor holds in spec d if it was made in spec s."""
    return 0 if memory.layout[s] == memory.layout[d] else memory.nbytes[d]


def _working(memory: ConvertedTensor, s: int, d: int) -> int:
    """The bytes that converting a tensor from spec s to d takes besides."""
    return 0 if memory.layout[s] == memory.layout[d] else memory.working(s, d)


def _joined(arrays: Sequence[_Matrix]) -> _Matrix:
    return np.concatenate([*arrays, np.zeros(0)])


def _unit_seconds(problem: Problem) -> float:
    """The least power of 1000 of a second in which all costs, rounded to integers, add up exactly."""
    most = sum(map(max, problem.cost))
    for group in readers(problem).values():
        specs = 1 if len(group) == 1 else len(group[0].convert[0])
        most += specs * max(map(max, group[0].convert))
    if not math.isfinite(most):
        raise ProblemError("Only a problem with finite costs can be written as a pairwise problem.")
    thousandths = 0
    while most and most * 1e3 ** (thousandths + 1) < _LARGEST:
        thousandths += 1
    return 1e3**-thousandths
