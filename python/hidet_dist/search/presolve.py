"""Presolve: remove choices that no best plan needs.

Choice a of an entity is dominated by choice b of the same entity when changing from a to b never raises the cost,
whatever all others choose: the cost of b, plus the greatest rise of the conversions around it, is at most the cost of
a, and b takes no more memory. This is the dead-end elimination of protein design (Goldstein, Biophysical Journal 66,
1994).

With prices, memory is a part of the cost, and domination depends on the prices: at least one of the best plans for
these prices consists of the remaining choices. The greatest rise of the cost from a to b also bounds the plans with
choice a, once those with b are bounded (:meth:`Reduction.extend`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hidet_dist.search import tuning
from hidet_dist.search.limits import Limits
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import ConvertedTensor, Edge, Problem, readers

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Removal:
    """The removed and the remaining choices of an entity, and the greatest rise of the cost from each to each."""

    entity: int
    removed: Sequence[int]
    left: Sequence[int]
    rise: Matrix


@dataclass(frozen=True)
class Reduction:
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


class _Span:
    """The price of holding a converted tensor for its readers, in seconds per byte."""

    def __init__(self, memory: ConvertedTensor, group: Sequence[Edge], prices: Prices):
        self.memory = memory
        begin, end = min(edge.begin for edge in group), max(edge.end for edge in group)
        prices_by_edge = {id(edge): (prices.span(edge.begin, edge.end), prices.at[edge.begin]) for edge in group}
        self.by_edge = prices_by_edge
        self.most = prices.span(begin, end)
        self.least = min(span for span, _ in prices_by_edge.values())
        self.making = [making for _, making in prices_by_edge.values()]
        self.key = (id(memory), self.most, tuple(prices_by_edge.values()))


class Presolve:
    """The removal of dominated choices of one problem; equal entities with equal surroundings are reduced once."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.groups = readers(problem)
        self._known: dict[Hashable, tuple[list[int], Matrix]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._arrays: dict[int, Matrix] = {}
        self._held: dict[int, Matrix] = {}
        self._working: dict[Hashable, Matrix] = {}
        self._made: list[list[int]] = [[] for _ in problem.cost]
        self._reads: list[list[Edge]] = [[] for _ in problem.cost]
        for tensor, group in self.groups.items():
            self._made[group[0].producer].append(tensor)
            for edge in group:
                self._reads[edge.consumer].append(edge)
        for edge in problem.edges:
            if id(edge.convert) not in self._arrays:
                self._arrays[id(edge.convert)] = np.array(edge.convert)
        self._intervals: list[list[tuple[int, int, tuple[int, ...]]]] = [[] for _ in problem.cost]
        for interval in problem.activations.intervals:
            self._intervals[interval.entity].append((interval.begin, interval.end, interval.nbytes))
        # One number for an entity and its surroundings, as far as no reduction changes them.
        self._static = [self._surroundings(entity) for entity in range(len(problem.cost))]
        self._neighbours = [
            sorted(
                {edge.consumer for tensor in self._made[entity] for edge in self.groups[tensor]}
                | {edge.producer for edge in self._reads[entity]}
            )
            for entity in range(len(problem.cost))
        ]

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _surroundings(self, entity: int) -> int:
        problem, groups = self.problem, self.groups
        outs = tuple(
            (
                id(groups[tensor][0].convert),
                self._number(groups[tensor][0].produced),
                tuple(self._number(edge.consumed) for edge in groups[tensor]),
            )
            for tensor in self._made[entity]
        )
        ins = tuple(
            (id(edge.convert), self._number(edge.produced), self._number(edge.consumed), len(groups[edge.tensor]))
            for edge in self._reads[entity]
        )
        costs = self._number(tuple(problem.cost[entity])), self._number(tuple(problem.memory[entity]))
        return self._number((costs, outs, ins))

    def reduce(
        self,
        kept: Sequence[Sequence[int]],
        prices: Prices | None = None,
        limits: Limits | None = None,
        rounds: int = tuning.PRESOLVE_ROUNDS,
        fixed: Collection[int] = (),
    ) -> Reduction:
        """Remove dominated choices, of all entities but those ``fixed``.

        With prices, at least one of the best plans for these prices remains. Without, a choice dominates only if it
        takes no more memory during the whole run, and activations do not count.

        Raises
        ------
        OutOfTimeError
            When the time limit is reached.
        """
        left_choices = [list(choices) for choices in kept]
        numbers = [self._number(tuple(choices)) for choices in left_choices]
        spans: dict[int, _Span] = {}
        if prices is not None and prices.total:
            for tensor, memory in self.problem.activations.tensors.items():
                group = self.groups.get(tensor)
                if group and prices.span(min(e.begin for e in group), max(e.end for e in group)):
                    spans[tensor] = _Span(memory, group, prices)
        removals: list[_Removal] = []
        if prices is not None and prices.joint:
            fixed = {*fixed, *self._at_points({m for _, points in prices.joint for m in points})}
        waiting = [len(choices) > 1 and entity not in fixed for entity, choices in enumerate(left_choices)]
        for _ in range(rounds):
            if not any(waiting):
                break
            for entity, choices in enumerate(left_choices):
                if limits is not None and not entity % tuning.CHECK_STEPS:
                    limits.check()
                if not waiting[entity]:
                    continue
                waiting[entity] = False
                paid = self._paid(entity, prices)
                key = (
                    self._static[entity],
                    numbers[entity],
                    paid,
                    tuple(
                        (tensor in spans and spans[tensor].key, *(numbers[e.consumer] for e in self.groups[tensor]))
                        for tensor in self._made[entity]
                    ),
                    tuple(
                        (
                            e.tensor in spans and (spans[e.tensor].key, spans[e.tensor].by_edge[id(e)]),
                            numbers[e.producer],
                        )
                        for e in self._reads[entity]
                    ),
                )
                known = self._known.get(key)
                if known is None:
                    known = self._known[key] = self._left(entity, left_choices, prices, paid, spans)
                left, rise = known
                if len(left) == len(choices):
                    continue
                kept_now = [choices[i] for i in left]
                gone = set(left)
                removed = [k for i, k in enumerate(choices) if i not in gone]
                removals.append(_Removal(entity, removed, kept_now, rise))
                left_choices[entity] = kept_now
                numbers[entity] = self._number(tuple(kept_now))
                for other in self._neighbours[entity]:
                    waiting[other] = len(left_choices[other]) > 1 and other not in fixed
        return Reduction(left_choices, removals)

    def _at_points(self, points: Collection[int]) -> Iterator[int]:
        """Yield the entities on which the bytes at some points depend."""
        for entity, intervals in enumerate(self._intervals):
            if any(begin <= m <= end for begin, end, _ in intervals for m in points):
                yield entity
        for tensor in self.problem.activations.tensors:
            group = self.groups.get(tensor, ())
            if group and any(min(e.begin for e in group) <= m <= max(e.end for e in group) for m in points):
                yield group[0].producer
                yield from (edge.consumer for edge in group)

    def _paid(self, entity: int, prices: Prices | None) -> Hashable:
        """Return the prices of the entity's memory: that of the whole run, and that of each live interval."""
        if prices is None:
            return None
        live = []
        for begin, end, nbytes in self._intervals[entity]:
            price = prices.span(begin, end)
            if price:
                live.append((price, nbytes))
        return prices.total, tuple(live)

    def _left(
        self,
        entity: int,
        left_choices: Sequence[Sequence[int]],
        prices: Prices | None,
        paid: Any,
        spans: dict[int, _Span],
    ) -> tuple[list[int], Matrix]:
        """List the positions of undominated choices, and the rise of the cost from each other one to each of these."""
        problem, choices = self.problem, left_choices[entity]
        cost = np.array([problem.cost[entity][k] for k in choices])
        memory = np.array([problem.memory[entity][k] for k in choices])
        if paid is not None:
            total, live = paid
            cost = cost + total * memory
            for price, nbytes in live:
                cost = cost + price * np.array([nbytes[k] for k in choices])
        worse = cost[None, :] - cost[:, None]
        for tensor in self._made[entity]:
            group = self.groups[tensor]
            required = sorted({edge.consumed[k] for edge in group for k in left_choices[edge.consumer]})
            produced = [group[0].produced[k] for k in choices]
            most = self._producer_rise(group, produced, required, spans.get(tensor))
            # Each distinct required spec is paid once: at least one, and at most one per reader.
            worse = worse + np.where(most > 0, most * min(len(group), len(required)), most)
        for edge in self._reads[entity]:
            sources = sorted({edge.produced[k] for k in left_choices[edge.producer]})
            consumed = [edge.consumed[k] for k in choices]
            worse = worse + self._consumer_rise(edge, sources, consumed, spans.get(edge.tensor))
        first = np.arange(len(cost))
        dominates = (worse < 0) | ((worse == 0) & (first[None, :] < first[:, None]))
        if paid is None:
            dominates &= memory[None, :] <= memory[:, None]
        gone = dominates.any(axis=1)
        left = np.flatnonzero(~gone)
        return [int(i) for i in left], worse[np.ix_(np.flatnonzero(gone), left)]

    def _producer_rise(
        self, group: Sequence[Edge], produced: Sequence[int], required: Sequence[int], span: _Span | None
    ) -> Matrix:
        """Bound ``[a, b]``: the greatest rise of one conversion's cost when the producer changes from choice a to b."""
        sources = tuple(dict.fromkeys(produced))
        at = np.ix_(sources, required)
        lines = self._arrays[id(group[0].convert)][at]
        if span is None:
            most = _greatest_rise(lines)
        else:
            held = self._held_bytes(span.memory)[at]
            working = self._working_bytes(span.memory, sources, tuple(required)) if any(span.making) else None
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
        index = [place[spec] for spec in produced]
        return most[np.ix_(index, index)]

    def _consumer_rise(self, edge: Edge, sources: Sequence[int], consumed: Sequence[int], span: _Span | None) -> Matrix:
        """Bound ``[a, b]``: the greatest rise of a tensor's cost when its reader changes from choice a to b."""
        required = tuple(dict.fromkeys(consumed))
        at = np.ix_(sources, required)
        lines = self._arrays[id(edge.convert)][at].T
        alone = len(self.groups[edge.tensor]) == 1
        held_price = making_price = 0.0
        saved = np.zeros(len(required))
        if span is not None:
            held_price, making_price = span.by_edge[id(edge)]
            if not alone:
                held_price, most = span.most, max(span.making)
            held = self._held_bytes(span.memory)[at].T
            lines = lines + held_price * held
            if any(span.making):
                working = self._working_bytes(span.memory, tuple(sources), required).T
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
        index = [place[spec] for spec in consumed]
        result: Matrix = rise[np.ix_(index, index)]
        return result

    def _held_bytes(self, memory: ConvertedTensor) -> Matrix:
        """Compute ``[s, d]``: the bytes of a tensor in spec d, converted from s; 0 for the same layout."""
        known = self._held.get(id(memory))
        if known is None:
            layout = np.array(memory.layout)
            known = np.where(layout[:, None] != layout[None, :], np.array(memory.nbytes, dtype=float)[None, :], 0.0)
            self._held[id(memory)] = known
        return known

    def _working_bytes(self, memory: ConvertedTensor, sources: tuple[int, ...], required: tuple[int, ...]) -> Matrix:
        """Compute the working bytes of the conversion to each required spec, by source."""
        key = id(memory), sources, required
        if key not in self._working:
            layout = memory.layout
            self._working[key] = np.array(
                [[memory.working(s, d) if layout[s] != layout[d] else 0 for d in required] for s in sources],
                dtype=float,
            )
        return self._working[key]


def undominated(problem: Problem, limits: Limits | None = None) -> list[list[int]]:
    """List the undominated choices of each entity, ignoring activations; they contain one of the best plans."""
    return Presolve(problem).reduce([range(len(costs)) for costs in problem.cost], limits=limits).kept


def _greatest_rise(lines: Matrix) -> Matrix:
    """Compute ``[a, b]``: the greatest excess of an entry of line b over that of line a; a chunk of lines at a time."""
    count = max(1, tuning.CHUNK_ENTRIES // lines.size)
    parts = [(lines[None, :, :] - lines[at : at + count, None, :]).max(axis=-1) for at in range(0, len(lines), count)]
    return np.concatenate(parts)
