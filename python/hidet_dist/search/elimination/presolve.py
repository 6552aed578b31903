"""Presolve: remove choices that no best plan needs.

Choice a of an entity is dominated by choice b of the same entity when changing from a to b never raises the cost,
whatever all others choose: the cost of b, plus the greatest rise of the conversions around it, is at most the cost of
a, and b takes no more memory. This is the dead-end elimination of protein design (Goldstein, Biophysical Journal 66,
1994).

With prices, memory is a part of the cost, and domination depends on the prices: at least one of the best plans for
these prices consists of the remaining choices. The greatest rise of the cost from a to b also bounds the plans with
choice a, once those with b are bounded (:meth:`RemainingChoices.extend`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from hidet_dist.search import tuning
from hidet_dist.search.limits import Limits
from hidet_dist.search.problem import ConvertedTensor, Edge, Problem, readers
from hidet_dist.search.problem.equal_parts import Numbers, crossed
from hidet_dist.search.problem.prices import Prices

Matrix = npt.NDArray[np.float64]
_Choices = npt.NDArray[np.int64]
_Rise = tuple[Matrix, _Choices]  # the greatest rise of a cost from each spec to each other, and the spec of each choice
_Points = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # the first and last program points of live intervals


@dataclass(frozen=True)
class _Removal:
    """The removed and the remaining choices of an entity, and the greatest rise of the cost from each to each."""

    entity: int
    removed: Sequence[int]
    left: Sequence[int]
    rise: Matrix


@dataclass(frozen=True)
class RemainingChoices:
    """The remaining choices of each entity, at least one."""

    kept: list[list[int]]
    removals: list[_Removal]

    def extend(self, problem: Problem, bounds: Sequence[Matrix]) -> list[Matrix]:
        """Bound the cost of plans with each choice of an entity, from bounds for the remaining choices.

        ``bounds`` are those of ``kept``. Choices that the reduction did not start from have an infinite bound.
        """
        result = [np.full(len(costs), np.inf) for costs in problem.cost]
        for entity_bounds, kept, line in zip(result, self.kept, bounds, strict=True):
            entity_bounds[kept] = line
        # Replacing a removed choice of a plan by a remaining one raises the cost by at most ``rise``.
        for removal in reversed(self.removals):
            entity_bounds = result[removal.entity]
            entity_bounds[removal.removed] = (entity_bounds[removal.left][None, :] - removal.rise).max(axis=1)
        return result


@dataclass(frozen=True)
class _Exclusion:
    """The choices of an entity that are removed, those that are left with their number, and the rise between them."""

    removed: Sequence[int]
    left: Sequence[int]
    number: int
    rise: Matrix


class _Span:
    """The price of holding a converted tensor for its readers, in seconds per byte.

    ``most`` is the price from the first reader to the last.
    """

    def __init__(self, memory: ConvertedTensor, group: Sequence[Edge], prices: Prices, most: float):
        self.memory = memory
        self.most = most
        prices_by_edge = {id(edge): (prices.span(edge.begin, edge.end), prices.at[edge.begin]) for edge in group}
        self.by_edge = prices_by_edge
        self.least = min(span for span, _ in prices_by_edge.values())
        self.making = [making for _, making in prices_by_edge.values()]
        self.key = (id(memory), self.most, tuple(prices_by_edge.values()))


@dataclass(frozen=True)
class _Priced:
    """The effect of prices on entities and tensors; those without an effect are left out.

    Attributes
    ----------
    whole_run: the price of a byte during the whole run.
    live: for each entity, the price of each of its live intervals, with the bytes by choice.
    spans: for each tensor, the price of holding it converted.
    keys: for each entity, the effects on itself and on the tensors around it; equal only for equal effects.
    """

    whole_run: float
    live: dict[int, list[tuple[float, tuple[int, ...]]]]
    spans: dict[int, _Span]
    keys: dict[int, Hashable]


class Presolve:
    """The removal of dominated choices of one problem; equal entities with equal surroundings are reduced once."""

    def __init__(self, problem: Problem, like: Presolve | None = None):
        """Prepare for a problem. What is known of ``like``, whose problem is similar, is shared."""
        self.problem = problem
        self.groups = readers(problem)
        # Lists and tables are known by their identity, so the problems must live on.
        self._problems: list[Problem] = [] if like is None else like._problems
        self._problems.append(problem)
        self._known: dict[Hashable, _Exclusion] = {} if like is None else like._known
        self._numbers: Numbers = Numbers() if like is None else like._numbers
        self._arrays: dict[int, Matrix] = {} if like is None else like._arrays
        self._made: list[list[int]] = [[] for _ in problem.cost]
        self._reads: list[list[Edge]] = [[] for _ in problem.cost]
        for tensor, group in self.groups.items():
            self._made[group[0].producer].append(tensor)
            for edge in group:
                self._reads[edge.consumer].append(edge)
        held = problem.activations.tensors
        # Tensors that have readers.
        self._converted = [(tensor, held[tensor]) for tensor in self.groups if held.get(tensor) is not None]
        for edge in problem.edges:
            if id(edge.convert) not in self._arrays:
                self._arrays[id(edge.convert)] = np.array(edge.convert)
        intervals = problem.activations.intervals
        self._span_points = _points([self._span_of(tensor) for tensor, _ in self._converted])
        self._interval_points = _points([(interval.begin, interval.end) for interval in intervals])
        self._interval_numbers = [self._numbers.of_list(interval.nbytes) for interval in intervals]
        self._stored = {entity for entity, nbytes in enumerate(problem.memory) if any(nbytes)}
        # One number for an entity and its surroundings, as far as no reduction changes them.
        self._static = [self._surroundings(entity) for entity in range(len(problem.cost))]
        around = [self._others_around(entity) for entity in range(len(problem.cost))]
        self._neighbours = [sorted(set(others)) for others in around]
        self._around: list[Callable[[Sequence[int]], Hashable]] = [
            itemgetter(*others) if others else _nothing for others in around
        ]

    def _span_of(self, tensor: int) -> tuple[int, int]:
        """Return the first and the last program point at which a tensor is read."""
        group = self.groups[tensor]
        return min(edge.begin for edge in group), max(edge.end for edge in group)

    def _others_around(self, entity: int) -> tuple[int, ...]:
        """List the entities at the other ends of an entity's edges, one for each edge."""
        return (
            *(edge.consumer for tensor in self._made[entity] for edge in self.groups[tensor]),
            *(edge.producer for edge in self._reads[entity]),
        )

    def _surroundings(self, entity: int) -> int:
        problem, groups = self.problem, self.groups
        outs = tuple(
            (
                id(groups[tensor][0].convert),
                self._numbers.of_list(groups[tensor][0].produced),
                tuple(self._numbers.of_list(edge.consumed) for edge in groups[tensor]),
            )
            for tensor in self._made[entity]
        )
        ins = tuple(
            (
                id(edge.convert),
                self._numbers.of_list(edge.produced),
                self._numbers.of_list(edge.consumed),
                len(groups[edge.tensor]),
            )
            for edge in self._reads[entity]
        )
        costs = self._numbers.of_list(problem.cost[entity]), self._numbers.of_list(problem.memory[entity])
        return self._numbers.of((costs, outs, ins))

    def reduce(
        self,
        kept: Sequence[Sequence[int]],
        prices: Prices | None = None,
        limits: Limits | None = None,
        rounds: int = tuning.PRESOLVE_ROUNDS,
        fixed: Collection[int] = (),
    ) -> RemainingChoices:
        """Remove dominated choices, of all entities but those ``fixed``.

        With prices, at least one of the best plans for these prices remains. Without, a choice dominates only if it
        takes no more memory during the whole run, and activations do not count.

        Raises
        ------
        OutOfTimeError
            When the time limit is reached.
        """
        left_choices = [list(choices) for choices in kept]
        numbers = [self._numbers.of(tuple(choices)) for choices in left_choices]
        priced = self._priced(prices)
        joint = () if prices is None else [m for _, points in prices.joint for m in points]
        fixed = {*fixed, *self._at_points(sorted(set(joint)))}
        # Without prices, a choice must not take more memory either; where there is none, nothing depends on prices.
        unpriced = self._stored if prices is None else frozenset[int]()
        removals: list[_Removal] = []
        waiting = [len(choices) > 1 and entity not in fixed for entity, choices in enumerate(left_choices)]
        for _ in range(rounds):
            if not any(waiting):
                break
            for entity in range(len(left_choices)):
                if limits is not None and not entity % tuning.CHECK_STEPS:
                    limits.check()
                if not waiting[entity]:
                    continue
                waiting[entity] = False
                key = (
                    self._static[entity],
                    numbers[entity],
                    entity in unpriced,
                    priced.keys.get(entity),
                    self._around[entity](numbers),
                )
                outcome = self._known.get(key)
                if outcome is None:
                    outcome = self._known[key] = self._exclusion(entity, left_choices, entity in unpriced, priced)
                if not outcome.removed:
                    continue
                removals.append(_Removal(entity, outcome.removed, outcome.left, outcome.rise))
                left_choices[entity] = list(outcome.left)
                numbers[entity] = outcome.number
                for other in self._neighbours[entity]:
                    waiting[other] = len(left_choices[other]) > 1 and other not in fixed
        return RemainingChoices(left_choices, removals)

    def _exclusion(
        self, entity: int, left_choices: Sequence[Sequence[int]], unpriced: bool, priced: _Priced
    ) -> _Exclusion:
        choices = left_choices[entity]
        left, rise = self._left(entity, left_choices, unpriced, priced)
        gone = set(range(len(choices))).difference(left)
        kept = [choices[i] for i in left]
        return _Exclusion([choices[i] for i in sorted(gone)], kept, self._numbers.of(tuple(kept)), rise)

    def _at_points(self, points: Sequence[int]) -> Iterator[int]:
        """Yield the entities on which the bytes at some points, in ascending order, depend."""
        if not points:
            return
        for n in _containing(self._interval_points, points):
            yield self.problem.activations.intervals[n].entity
        for n in _containing(self._span_points, points):
            group = self.groups[self._converted[n][0]]
            yield group[0].producer
            yield from (edge.consumer for edge in group)

    def _priced(self, prices: Prices | None) -> _Priced:
        """Find the entities and tensors on which prices have an effect."""
        if prices is None or not prices.total:
            return _Priced(0.0, {}, {}, {})
        effects: dict[int, list[Hashable]] = {}
        live: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        spans: dict[int, _Span] = {}
        for entity in self._stored:
            effects[entity] = [prices.total]
        for n, price in _prices_of(self._interval_points, prices):
            interval = self.problem.activations.intervals[n]
            live.setdefault(interval.entity, []).append((price, interval.nbytes))
            effects.setdefault(interval.entity, []).append((price, self._interval_numbers[n]))
        for n, price in _prices_of(self._span_points, prices):
            tensor, memory = self._converted[n]
            group = self.groups[tensor]
            span = spans[tensor] = _Span(memory, group, prices, price)
            number = self._numbers.of(span.key)
            producer = group[0].producer
            effects.setdefault(producer, []).append((self._made[producer].index(tensor), number))
            for edge in group:
                at = next(i for i, read in enumerate(self._reads[edge.consumer]) if read is edge)
                effects.setdefault(edge.consumer, []).append((~at, number, span.by_edge[id(edge)]))
        return _Priced(prices.total, live, spans, {entity: tuple(own) for entity, own in effects.items()})

    def _left(
        self, entity: int, left_choices: Sequence[Sequence[int]], unpriced: bool, priced: _Priced
    ) -> tuple[list[int], Matrix]:
        """List the positions of undominated choices, and the rise of the cost from each other one to each of these."""
        problem, choices, spans = self.problem, left_choices[entity], priced.spans
        cost = np.array([problem.cost[entity][k] for k in choices])
        memory = np.array([problem.memory[entity][k] for k in choices])
        if priced.whole_run and entity in self._stored:
            cost = cost + priced.whole_run * memory
        for price, nbytes in priced.live.get(entity, ()):
            cost = cost + price * np.array([nbytes[k] for k in choices])
        rises: list[_Rise] = []
        for tensor in self._made[entity]:
            group = self.groups[tensor]
            required = sorted({edge.consumed[k] for edge in group for k in left_choices[edge.consumer]})
            produced = [group[0].produced[k] for k in choices]
            most, own = self._producer_rise(group, produced, required, spans.get(tensor))
            # Each distinct required spec is paid once: at least one, and at most one per reader.
            rises.append((np.where(most > 0, most * min(len(group), len(required)), most), own))
        for edge in self._reads[entity]:
            sources = sorted({edge.produced[k] for k in left_choices[edge.producer]})
            consumed = [edge.consumed[k] for k in choices]
            rises.append(self._consumer_rise(edge, sources, consumed, spans.get(edge.tensor)))
        gone = _dominated(cost, rises, memory if unpriced else None)
        left = np.flatnonzero(~gone)
        return left.tolist(), _worse(cost, rises, np.flatnonzero(gone), left)

    def _producer_rise(
        self, group: Sequence[Edge], produced: Sequence[int], required: Sequence[int], span: _Span | None
    ) -> _Rise:
        """Bound the greatest rise of one conversion's cost when the producer changes from one choice to another."""
        sources = tuple(dict.fromkeys(produced))
        at = crossed(sources, required)
        lines = self._arrays[id(group[0].convert)][at]
        if span is None:
            most = _greatest_rise(lines)
        else:
            held = span.memory.held[at]
            working = span.memory.worked[at] if any(span.making) else None
            lines = lines + span.least * held
            if working is not None:
                lines = lines + min(span.making) * working
            most = _greatest_rise(lines)
            if span.most > span.least:
                most = most + (span.most - span.least) * np.maximum(0.0, _greatest_rise(held))
            if working is not None and max(span.making) > min(span.making):
                rise = _greatest_rise(working)
                most = most + (max(span.making) - min(span.making)) * np.maximum(0.0, rise)
        place = {spec: i for i, spec in enumerate(sources)}
        return most, np.array([place[spec] for spec in produced])

    def _consumer_rise(self, edge: Edge, sources: Sequence[int], consumed: Sequence[int], span: _Span | None) -> _Rise:
        """Bound the greatest rise of a tensor's cost when its reader changes from one choice to another."""
        required = tuple(dict.fromkeys(consumed))
        at = crossed(sources, required)
        lines = self._arrays[id(edge.convert)][at].T
        alone = len(self.groups[edge.tensor]) == 1
        held_price = making_price = 0.0
        saved = np.zeros(len(required))
        if span is not None:
            held_price, making_price = span.by_edge[id(edge)]
            if not alone:
                held_price, most = span.most, max(span.making)
            held = span.memory.held[at].T
            lines = lines + held_price * held
            if any(span.making):
                working = span.memory.worked[at].T
                if alone:
                    lines = lines + making_price * working
                else:
                    lines = lines + most * working
                    # Without this reader, the conversion may be made for a later one, where memory is dearer.
                    saved = (most - making_price) * working.max(axis=-1)
        if alone:
            rise = _greatest_rise(lines)
        else:  # at worst, another reader pays for the spec of a anyway, and none for that of b
            rise = np.repeat((lines.max(axis=-1))[None, :], len(required), axis=0) + saved[:, None]
            np.fill_diagonal(rise, 0.0)
        place = {spec: i for i, spec in enumerate(required)}
        return rise, np.array([place[spec] for spec in consumed])


def _nothing(numbers: Sequence[int]) -> Hashable:
    """The numbers of no entities."""
    return ()


def _points(spans: Sequence[tuple[int, int]]) -> _Points:
    """Separate the first program points of live intervals from the last."""
    array = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _prices_of(spans: _Points, prices: Prices) -> list[tuple[int, float]]:
    """List the live intervals during which memory has a price, with the price of a byte."""
    until = np.array(prices.until)
    seconds = until[spans[1] + 1] - until[spans[0]]
    some = np.flatnonzero(seconds)
    return list(zip(some.tolist(), seconds[some].tolist(), strict=True))


def _containing(spans: _Points, points: Sequence[int]) -> list[int]:
    """List the live intervals that contain any of the points, which are in ascending order."""
    numbers: list[int] = np.flatnonzero(
        np.searchsorted(points, spans[0], "left") < np.searchsorted(points, spans[1], "right")
    ).tolist()
    return numbers


def _worse(cost: Matrix, rises: Sequence[_Rise], rows: _Choices, columns: _Choices) -> Matrix:
    """Compute ``[a, b]``: the greatest rise of the cost from the choice a of ``rows`` to b of ``columns``."""
    worse = cost[columns] - cost[rows, None]
    for rise, specs in rises:
        worse += rise[specs[rows]].take(specs[columns], axis=1)
    return worse


def _dominated(cost: Matrix, rises: Sequence[_Rise], memory: Matrix | None) -> npt.NDArray[np.bool_]:
    """Tell which choices others dominate, that take no more ``memory`` if it is given; a chunk of them at a time."""
    every = np.arange(len(cost))
    gone = np.zeros(len(cost), dtype=bool)
    count = max(1, tuning.CHUNK_ENTRIES // len(cost))
    for at in range(0, len(cost), count):
        rows = every[at : at + count]
        worse = _worse(cost, rises, rows, every)
        dominates = (worse < 0) | ((worse == 0) & (every < rows[:, None]))
        if memory is not None:
            dominates &= memory <= memory[rows, None]
        gone[rows] = dominates.any(axis=1)
    return gone


def _greatest_rise(lines: Matrix) -> Matrix:
    """Compute ``[a, b]``: the greatest excess of an entry of line b over that of line a; a chunk of lines at a time."""
    count = max(1, tuning.CHUNK_ENTRIES // lines.size)
    parts = [(lines[None, :, :] - lines[at : at + count, None, :]).max(axis=-1) for at in range(0, len(lines), count)]
    return np.concatenate(parts)
