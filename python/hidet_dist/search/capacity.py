"""Choices and conversions that no plan within a budget can contain, found by adding up the least bytes around each.

At a program point, every plan holds at least the least bytes of each entity there. What the budget leaves beyond that
sum is the *room* of the point. A choice that holds more above the least than the room is in no plan that fits; neither
is a conversion that does so together with the least that its producer, its reader and the reader's other inputs hold
beside it. Each removal raises the least of an entity, so removals are repeated until nothing changes (constraint
propagation; Mackworth, Artificial Intelligence 8, 1977).

Bytes held during the whole run, those of weights above all, are *resident*; all others are transient. If the resident
bytes of a plan are known to be at least a number, the transient ones fit what that leaves of the budget, at every
point. A range of resident bytes thus restricts plans at all points at once, which prices on points cannot.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hidet_dist.search import tuning
from hidet_dist.search.limits import Limits
from hidet_dist.search.problem import ConvertedTensor, Edge, Problem

_Bytes = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]

_NEVER = 2**62 // 8  # bytes that fit no room; several of them add up without overflow


@dataclass(frozen=True)
class Fitting:
    """What is left of a problem: the choices of each entity, and the problem without the forbidden conversions.

    Attributes
    ----------
    kept: the choices of each entity, at least one.
    problem: the problem, in which forbidden conversions cost more than a given limit.
    resident: the least and the most resident bytes of plans that fit.
    """

    kept: list[list[int]]
    problem: Problem
    resident: tuple[int, int]


class _Exceeded(Exception):
    """No plan fits."""


class Capacity:
    """The bytes of one problem's choices and conversions, by program point."""

    def __init__(self, problem: Problem):
        self.problem = problem
        activations = problem.activations
        arrays: dict[int, _Bytes] = {}

        def array(values: Sequence[int]) -> _Bytes:
            if id(values) not in arrays:
                arrays[id(values)] = np.array(values, dtype=np.int64)
            return arrays[id(values)]

        self._extents: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._grouped: dict[tuple[int, tuple[int, ...]], _Grouped] = {}
        self._resident = [array(nbytes) for nbytes in problem.memory]
        self._intervals: list[list[tuple[int, int, _Bytes]]] = [[] for _ in problem.cost]
        for interval in activations.intervals:
            self._intervals[interval.entity].append((interval.begin, interval.end, array(interval.nbytes)))
        self._inputs: list[list[_Input]] = [[] for _ in problem.cost]
        known: dict[Hashable, tuple[_Bytes, _Bytes | None]] = {}
        for tensor, group in problem.groups.items():
            memory = activations.tensors.get(tensor)
            first = min(edge.begin for edge in group)
            alone = sum(edge.begin == first for edge in group) == 1
            for edge in group:
                held = working = None
                if memory is not None:
                    # Otherwise another reader may pay for the conversion's intermediate values.
                    pays = alone and edge.begin == first
                    key = id(memory), id(edge.produced), id(edge.consumed), pays
                    if key not in known:
                        known[key] = _conversion_bytes(memory, edge, pays)
                    held, working = known[key]
                most = sum(int(nbytes.max()) for nbytes in (held, working) if nbytes is not None)
                self._inputs[edge.consumer].append(
                    _Input(edge, array(edge.produced), array(edge.consumed), held, working, most)
                )
        self._readers: list[list[int]] = [[] for _ in problem.cost]
        for entity, inputs in enumerate(self._inputs):
            for one in inputs:
                self._readers[one.edge.producer].append(entity)

    def extent(self, nbytes: _Bytes, choices: tuple[int, ...]) -> tuple[int, int]:
        """Return the least and the most bytes of some choices of an entity, given those of all of its choices."""
        key = id(nbytes), choices
        if key not in self._extents:
            own = nbytes[list(choices)]
            self._extents[key] = int(own.min()), int(own.max())
        return self._extents[key]

    def grouped(self, specs: _Bytes, choices: Sequence[int]) -> _Grouped:
        """Group some choices of an entity by spec, given the specs of all of its choices."""
        key = id(specs), tuple(choices)
        known = self._grouped.get(key)
        if known is None:
            own = specs[list(choices)]
            order = np.argsort(own, kind="stable")
            ordered = own[order]
            begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
            known = self._grouped[key] = _Grouped(own, order, begins, ordered[begins])
        return known

    def fitting(
        self,
        kept: Sequence[Sequence[int]],
        budget: int,
        forbidden_cost: float,
        resident: tuple[int, int] | None = None,
        limits: Limits | None = None,
    ) -> Fitting | None:
        """Remove what no plan within the budget contains, of plans whose resident bytes are within a range.

        Forbidden conversions get the cost ``forbidden_cost``. None when no plan fits.

        Raises
        ------
        OutOfTimeError
            When the time limit is reached.
        """
        run = _Run(self, kept, budget, resident, limits)
        try:
            run.propagate()
        except _Exceeded:
            return None
        return Fitting(run.kept, run.restricted(forbidden_cost), (run.least_resident, run.most_resident))


class _Grouped(NamedTuple):
    """Choices by spec: the spec of each, their order by spec, where each spec begins in that order, and the specs."""

    own: _Bytes
    order: _Bytes
    begins: _Bytes
    specs: _Bytes


@dataclass(frozen=True)
class _Input:
    """An edge, seen from its reader, with the bytes of each conversion: held, and while it is made (if surely paid).

    ``most`` are the most bytes of any conversion.
    """

    edge: Edge
    produced: _Bytes
    consumed: _Bytes
    held: _Bytes | None
    working: _Bytes | None
    most: int


def _conversion_bytes(memory: ConvertedTensor, edge: Edge, pays: bool) -> tuple[_Bytes, _Bytes | None]:
    """Tabulate the bytes that an edge's conversions hold, by the two specs, and those while made if it ``pays``."""
    layout = np.array(memory.layout)
    held = np.where(layout[:, None] != layout[None, :], np.array(memory.nbytes, dtype=np.int64)[None, :], 0)
    sources, required = np.unique(edge.produced), np.unique(edge.consumed)
    at = sources[:, None], required
    only = np.zeros_like(held)
    only[at] = held[at]
    if not pays:
        return only, None
    working = np.zeros_like(held)
    for s in sources.tolist():
        for d in required.tolist():
            if memory.layout[s] != memory.layout[d]:
                working[s, d] = memory.working(s, d)
    return only, working


class _Run:
    """One propagation: the choices left, the conversions allowed, and the least bytes at each program point."""

    def __init__(
        self,
        capacity: Capacity,
        kept: Sequence[Sequence[int]],
        budget: int,
        resident: tuple[int, int] | None,
        limits: Limits | None,
    ):
        self.capacity = capacity
        self.budget = budget
        self.limits = limits
        self.kept = [list(choices) for choices in kept]
        self.index = [np.array(choices) for choices in kept]
        self.given_resident = resident
        self.allowed: dict[int, _Mask] = {}  # by the edge's id: the pairs of specs that may be converted
        # What the choices left of each entity hold at most above the least: resident bytes, and all others.
        self.spread = [(0, 0)] * len(self.kept)
        # The sum of the least bytes: the resident ones, and by how much the others change at each point.
        self.sum_resident = 0
        self.change = np.zeros(capacity.problem.activations.points + 1, dtype=np.int64)
        for entity in range(len(self.kept)):
            self._add_least(entity, 1)

    def _add_least(self, entity: int, sign: int) -> None:
        """Add the least bytes of an entity to the sums, or subtract them; note what it holds above them at most."""
        capacity, choices = self.capacity, tuple(self.kept[entity])
        least, most = capacity.extent(capacity._resident[entity], choices)
        self.sum_resident += sign * least
        resident, transient = most - least, 0
        for begin, end, nbytes in capacity._intervals[entity]:
            least, most = capacity.extent(nbytes, choices)
            self.change[begin] += sign * least
            self.change[end + 1] -= sign * least
            transient += most - least
        self.spread[entity] = resident, transient

    def propagate(self) -> None:
        waiting = [True] * len(self.kept)
        least = -1
        for _ in range(tuning.CAPACITY_ROUNDS):
            self._find_room()
            if least >= 0 and self.least_resident > least:
                waiting = [True] * len(self.kept)  # there is less room at all points
            least = self.least_resident
            if not any(waiting):
                break
            for entity, waits in enumerate(waiting):
                if waits:
                    if self.limits is not None and not entity % tuning.CHECK_STEPS:
                        self.limits.check()
                    waiting[entity] = False
                    for changed in self._visit(entity):
                        waiting[changed] = True
                        for reader in self.capacity._readers[changed]:
                            waiting[reader] = True
                        for one in self.capacity._inputs[changed]:
                            waiting[one.edge.producer] = True
        self._find_room()

    def _find_room(self) -> None:
        """Find the room at each point beside the least bytes of all entities. Raises _Exceeded."""
        least, transient = self.sum_resident, np.cumsum(self.change)[:-1]
        self.least_resident, self.most_resident = least, self.budget - int(transient.max())
        if self.given_resident is not None:
            self.least_resident = max(least, self.given_resident[0])
            self.most_resident = min(self.most_resident, self.given_resident[1])
        if self.least_resident > self.most_resident:
            raise _Exceeded
        # The room for transient bytes beside the least resident ones, and for both beside the sum of the least.
        self.transient_room = self.budget - self.least_resident - transient
        self.room = self.budget - least - transient
        self.resident_room = self.most_resident - least

    def _points(self, entity: int) -> _Bytes:
        """List the points at which to add up bytes: where intervals begin, and where there is least room in them."""
        points = {one.edge.begin for one in self.capacity._inputs[entity]}
        for begin, end, _ in self.capacity._intervals[entity]:
            points.add(begin)
            points.add(begin + int(np.argmin(self.transient_room[begin : end + 1])))
        return np.array(sorted(points or {int(np.argmin(self.room))}))

    def _extra(self, entity: int, points: _Bytes) -> tuple[_Bytes, _Bytes]:
        """Compute what each choice left holds above the least: resident bytes, and transient ones at the points."""
        index = self.index[entity]
        resident = self.capacity._resident[entity][index]
        transient = np.zeros((len(index), len(points)), dtype=np.int64)
        for begin, end, nbytes in self.capacity._intervals[entity]:
            own = nbytes[index]
            inside = (points >= begin) & (points <= end)
            if inside.any():
                transient[:, inside] += (own - own.min())[:, None]
        return resident - resident.min(), transient

    def _visit(self, entity: int) -> list[int]:
        """Remove choices of an entity, of the producers that it reads, and conversions; list the changed entities."""
        inputs = self.capacity._inputs[entity]
        resident_most, transient_most = self.spread[entity]
        settled = resident_most <= self.resident_room
        for one in inputs:
            beside = self.spread[one.edge.producer]
            resident_most += beside[0]
            transient_most += beside[1] + one.most
            settled &= id(one.edge) not in self.allowed
        points = self._points(entity)
        room, transient_room = self.room[points], self.transient_room[points]
        # Where even the most bytes around the entity leave room, nothing can be removed.
        tight = (room < resident_most + transient_most) | (transient_room < transient_most)
        if settled and not tight.any():
            return []
        points, room, transient_room = points[tight], room[tight], transient_room[tight]
        resident, own = self._extra(entity, points)
        producers = [one.edge.producer for one in inputs]
        # By input: the transient and all bytes above the least, for each spec produced and each choice of the entity.
        parts: list[tuple[_Input, _Bytes, _Bytes, _Bytes, _Mask]] = []
        transient_sum, whole_sum = own, own + resident[:, None]
        certain = np.ones(len(self.index[entity]), dtype=bool)
        for one in inputs:
            if one.edge.producer == entity:
                continue
            part = self._part(one, entity, points)
            parts.append(part)
            certain &= part[4].any(axis=0)
            if producers.count(one.edge.producer) == 1:  # bytes of one producer must not count twice
                transient_sum = transient_sum + part[2].min(axis=0)
                whole_sum = whole_sum + part[3].min(axis=0)
        changed = []
        good = (transient_sum <= transient_room).all(axis=1) & (whole_sum <= room).all(axis=1) & certain
        good &= resident <= self.resident_room
        if not good.any():
            raise _Exceeded
        for one, specs, transient, whole, pairs in parts:
            transient_rest, whole_rest = own, own + resident[:, None]
            if producers.count(one.edge.producer) == 1:
                transient_rest = transient_sum - transient.min(axis=0)
                whole_rest = whole_sum - whole.min(axis=0)
            fits = (transient + transient_rest <= transient_room).all(axis=2)
            fits &= (whole + whole_rest <= room).all(axis=2)
            fits &= pairs & good[None, :]
            if self._allow(one, specs, fits):
                changed.append(one.edge.producer)
        if not good.all():
            self._keep(entity, good)
            changed.append(entity)
        return changed

    def _part(self, one: _Input, entity: int, points: _Bytes) -> tuple[_Input, _Bytes, _Bytes, _Bytes, _Mask]:
        producer = one.edge.producer
        resident, transient = self._extra(producer, points)
        _, order, begins, specs = self.capacity.grouped(one.produced, self.kept[producer])
        required = self.capacity.grouped(one.consumed, self.kept[entity]).own
        # The least of the choices that make each spec.
        transient = transient[order]
        least = np.minimum.reduceat(transient, begins, axis=0)
        whole = np.minimum.reduceat(transient + resident[order][:, None], begins, axis=0)
        converted = np.zeros((len(specs), len(required), len(points)), dtype=np.int64)
        at = specs[:, None], required
        if one.held is not None:
            inside = (points >= one.edge.begin) & (points <= one.edge.end)
            converted += one.held[at][:, :, None] * inside
            if one.working is not None:
                converted += one.working[at][:, :, None] * (points == one.edge.begin)
        allowed = self.allowed.get(id(one.edge))
        pairs = np.ones(converted.shape[:2], dtype=bool) if allowed is None else allowed[at]
        converted[~pairs] = _NEVER
        return one, specs, converted + least[:, None, :], converted + whole[:, None, :], pairs

    def _allow(self, one: _Input, specs: _Bytes, fits: _Mask) -> bool:
        """Allow only conversions that fit; whether the choices of the producer, or the conversions, are fewer now."""
        if fits.all():
            return False
        edge = one.edge
        _, order, begins, columns = self.capacity.grouped(one.consumed, self.kept[edge.consumer])
        at = specs[:, None], columns
        fits = np.logical_or.reduceat(fits[:, order], begins, axis=1)
        allowed = self.allowed.get(id(edge))
        if fits.all() if allowed is None else fits[allowed[at]].all():
            return False
        left = np.ones((len(edge.convert), len(edge.convert[0])), dtype=bool) if allowed is None else allowed.copy()
        left[at] &= fits
        self.allowed[id(edge)] = left
        produced = self.capacity.grouped(one.produced, self.kept[edge.producer]).own
        good: _Mask = np.any(left[produced[:, None], columns], axis=1)
        if not good.all():
            self._keep(edge.producer, good)
        return True

    def _keep(self, entity: int, good: _Mask) -> None:
        if not good.any():
            raise _Exceeded
        self._add_least(entity, -1)
        self.index[entity] = self.index[entity][good]
        self.kept[entity] = self.index[entity].tolist()
        self._add_least(entity, 1)

    def restricted(self, forbidden_cost: float) -> Problem:
        """Make the problem in which conversions that no reader of a tensor allows cost ``forbidden_cost``."""
        problem = self.capacity.problem
        tables: dict[Hashable, tuple[tuple[float, ...], ...]] = {}
        changed: dict[int, tuple[tuple[float, ...], ...]] = {}
        for tensor, group in problem.groups.items():
            masks = [self.allowed.get(id(edge)) for edge in group]
            if all(mask is None for mask in masks):
                continue
            convert = group[0].convert
            allowed = np.zeros((len(convert), len(convert[0])), dtype=bool)
            possible = allowed.copy()
            for edge, mask in zip(group, masks, strict=True):
                made = sorted({edge.produced[k] for k in self.kept[edge.producer]})
                required = sorted({edge.consumed[k] for k in self.kept[edge.consumer]})
                at = np.ix_(made, required)
                possible[at] = True
                allowed[at] |= True if mask is None else mask[at]
            forbidden = possible & ~allowed
            if not forbidden.any():
                continue
            key = id(convert), forbidden.tobytes()
            if key not in tables:
                costs = np.where(forbidden, forbidden_cost, np.array(convert))
                tables[key] = tuple(map(tuple, costs.tolist()))
            changed[tensor] = tables[key]
        edges = [
            replace(edge, convert=changed[edge.tensor]) if edge.tensor in changed else edge for edge in problem.edges
        ]
        return replace(problem, budget=self.budget, edges=edges)
