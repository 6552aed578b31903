"""Branch and bound for graphs that are too wide for frontiers: plans are divided into parts, each with its prices."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hidet_dist.search import tuning
from hidet_dist.search.capacity import Capacity
from hidet_dist.search.combination import search_below_limits
from hidet_dist.search.limits import OutOfTimeError
from hidet_dist.search.network import Tables
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import Activations, LiveInterval, Problem
from hidet_dist.search.relaxation import Mixture, relax_budget
from hidet_dist.search.state import Probe, State, narrow_choices


@dataclass(frozen=True, order=True)
class _Part:
    """The plans whose resident bytes are within a range, among choices that are kept, and a lower bound of their cost.

    Parts are in the order of their bounds, then of their numbers. ``prices`` are those of the plans that it is a part
    of, the last one for the most resident bytes.
    """

    bound: float
    number: int
    resident: tuple[int, int] = field(compare=False)
    kept: list[list[int]] = field(compare=False)
    prices: Sequence[float] = field(compare=False)


def divide_plans(state: State, mixture: Mixture) -> None:
    """Divide the plans into parts, the one of least bound first, until no part can have a better plan.

    Prices mix plans that exceed the budget at one point with plans that have room there. Where little is known to be
    left for transient bytes, because the resident ones are within a range, such plans are told apart: choices and
    conversions that do not fit are dropped. Where resident bytes differ little, parts differ in the choices of an
    entity. ``mixture`` is that of the best prices for all plans.
    """
    capacity, left, gap = Capacity(state.problem), math.inf, math.inf
    resident = _resident_range(state, capacity)
    if resident is None:
        state.raise_bound(state.cutoff())  # choices were dropped whose plans reach the cutoff
        return
    prices: Sequence[float] = (*mixture.prices, 0.0)
    ranges = _ranges(state, resident, mixture)
    waiting = [_Part(state.bound, n, ends, kept, prices) for n, (ends, kept) in enumerate(ranges)]
    number = len(waiting)
    most = min(tuning.PARTS, tuning.PART_CHOICES // sum(map(len, state.problem.cost)))
    for count in range(most):
        if not waiting or waiting[0].bound >= state.cutoff():
            break
        if not count % tuning.PARTS_STALL:
            if state.seconds - waiting[0].bound > tuning.PARTS_PROGRESS * gap:
                break
            gap = state.seconds - waiting[0].bound
        part = heapq.heappop(waiting)
        try:
            solved = _solve_part(state, capacity, part)
        except OutOfTimeError:
            state.raise_bound(min(left, part.bound))  # no part waiting has a smaller bound
            raise
        if solved is None:
            continue
        bound, prices, halves = solved
        for ends, half in halves:
            heapq.heappush(waiting, _Part(bound, number, ends, half, prices))
            number += 1
        if not halves:
            left = min(left, bound)
    state.divided = True
    state.raise_bound(min([left, state.cutoff(), *(part.bound for part in waiting)]))


def _resident_range(state: State, capacity: Capacity) -> tuple[int, int] | None:
    """Bound the resident bytes of plans that fit; None if no plan of the choices that are left does."""
    forbidden = tuning.FORBIDDEN_COSTS * state.seconds
    fitting = capacity.fitting(state.kept, state.problem.budget, forbidden, limits=state.limits)
    return None if fitting is None else fitting.resident


_Half = tuple[tuple[int, int], list[list[int]]]  # a range of resident bytes, and the choices kept


def _solve_part(state: State, capacity: Capacity, part: _Part) -> tuple[float, list[float], list[_Half]] | None:
    """Bound the plans of a part, and record those found on the way; None if none of them is better than the best.

    Returns the bound, the prices for it, and the parts that the part is divided into, if it can be.
    """
    problem = state.problem
    forbidden = tuning.FORBIDDEN_COSTS * state.seconds
    fitting = capacity.fitting(part.kept, problem.budget, forbidden, part.resident, state.limits)
    if fitting is None:
        return None
    limited = _with_most_resident(fitting.problem, fitting.resident[1])
    inner = State(limited, replace(state.options, on_incumbent=None), fitting.kept, state.best, state.seconds)
    inner.outer, inner.bound = state, part.bound
    tables = Tables(state.limits)
    try:
        return _bound_part(inner, tables, part, fitting.resident)
    finally:
        tables.last = None  # tables that refer to themselves would outlive the part


def _bound_part(
    inner: State, tables: Tables, part: _Part, resident: tuple[int, int]
) -> tuple[float, list[float], list[_Half]] | None:
    """Bound the plans of a part, with the state and the tables for it, as :func:`_solve_part` does."""
    first = inner.probe(tables, Prices(part.prices), coarse=True)
    inner.known_plans.append(first)
    inner.raise_bound(first.bound)
    if inner.done():
        return None
    _, mixture = relax_budget(inner, tables)
    if inner.done():
        return None
    prices = Prices(mixture.prices)
    narrow_choices(inner, tables, prices)
    if inner.seconds - inner.bound <= tuning.FRONTIER_GAP * inner.seconds:
        search_below_limits(inner, tables, prices)
    if inner.done():
        return None
    return inner.bound, mixture.prices, list(_halves(inner, resident, mixture))


def _with_most_resident(problem: Problem, most: int) -> Problem:
    """Add a program point at which a plan holds its resident bytes alone, and what the budget exceeds ``most`` by."""
    activations = problem.activations
    point, beyond = activations.points, problem.budget - most
    interval = LiveInterval(0, point, point, (beyond,) * len(problem.cost[0]))
    intervals = (*activations.intervals, interval)
    return replace(problem, activations=Activations(point + 1, intervals, activations.tensors))


def _ranges(state: State, resident: tuple[int, int], mixture: Mixture) -> list[_Half]:
    """Divide the plans by their resident bytes alone: first those that hold about as much as the mixture's."""
    low, high = resident
    width = max(1, -(-(high + 1 - low) // tuning.RESIDENT_RANGES))
    ranges = [(begin, min(begin + width - 1, high)) for begin in range(low, high + 1, width)]
    mean = sum(share * _resident_bytes(state.problem, plan) for share, plan in mixture.parts)
    ranges.sort(key=lambda ends: abs((ends[0] + ends[1]) / 2 - mean))
    return [(ends, state.kept) for ends in ranges]


def _halves(state: State, resident: tuple[int, int], mixture: Mixture) -> Iterator[_Half]:
    """Divide the plans by what those of the mixture differ in most: their resident bytes, or those of an entity.

    The bytes of an entity are those at the point at which the mixture's plans exceed the budget most. Yields two
    halves, or nothing.
    """
    problem, plans = state.problem, [probe for _, probe in mixture.parts]
    shares = [share for share, _ in mixture.parts]
    budget = problem.budget

    def spread(values: Sequence[int]) -> tuple[float, float]:
        mean = sum(share * value for share, value in zip(shares, values, strict=True))
        return sum(share * abs(value - mean) for share, value in zip(shares, values, strict=True)), mean

    low, high = resident
    most, mean = spread([_resident_bytes(problem, plan) for plan in plans])
    division: tuple[int, list[bool]] | None = None  # an entity, and for each of its choices whether it is in one half
    if not low <= int(mean) < high:
        most = 0.0
    excess = [
        sum(share * max(0, plan.nbytes[point] - budget) for share, plan in mixture.parts)
        for point in range(problem.activations.points)
    ]
    point = excess.index(max(excess))
    for entity, nbytes, chosen in _bytes_at(state, point, plans):
        own, middle = spread(chosen)
        above = [n > middle for n in nbytes]
        sides = {above[k] for k in state.kept[entity]}
        if own > most and len(sides) == 2:
            most, division = own, (entity, above)
    if division is not None:
        entity, above = division
        for side in (True, False):
            kept = list(state.kept)
            kept[entity] = [k for k in kept[entity] if above[k] is side]
            yield resident, kept
    elif most:
        yield (int(mean) + 1, high), state.kept
        yield (low, int(mean)), state.kept


def _resident_bytes(problem: Problem, plan: Probe) -> int:
    return sum(nbytes[k] for nbytes, k in zip(problem.memory, plan.choices, strict=True))


def _bytes_at(state: State, point: int, plans: Sequence[Probe]) -> Iterator[tuple[int, Sequence[float], list[int]]]:
    """Yield entities with figures for the bytes of their choices at a program point, and the bytes in each plan.

    Conversions count for their reader, by the spec that it requires, if the plans' readers require different ones, or
    else for the producer, by the spec that it produces.
    """
    problem = state.problem
    for interval in problem.activations.intervals:
        if interval.begin <= point <= interval.end:
            yield interval.entity, interval.nbytes, [interval.nbytes[plan.choices[interval.entity]] for plan in plans]
    for tensor, memory in problem.activations.tensors.items():
        for edge in state.groups.get(tensor, ()):
            if not edge.begin <= point <= edge.end:
                continue
            pairs = [(edge.produced[p.choices[edge.producer]], edge.consumed[p.choices[edge.consumer]]) for p in plans]
            nbytes = [
                memory.nbytes[d] + (memory.working(s, d) if point == edge.begin else 0)
                if memory.layout[s] != memory.layout[d]
                else 0
                for s, d in pairs
            ]
            for side, entity, specs in ((1, edge.consumer, edge.consumed), (0, edge.producer, edge.produced)):
                if len({pair[side] for pair in pairs}) > 1:
                    dearest = pairs[nbytes.index(max(nbytes))][side]
                    yield entity, [math.inf if spec == dearest else -math.inf for spec in specs], nbytes
                    break
