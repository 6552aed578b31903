"""Branch and bound where frontiers have too many labels: plans are divided into parts, each with its prices."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hidet_dist.errors import InfeasibleError
from hidet_dist.search import tuning
from hidet_dist.search.budget.capacity import Capacity
from hidet_dist.search.budget.combination import search_below_limits
from hidet_dist.search.budget.least_memory import find_fitting
from hidet_dist.search.budget.relaxation import Mixture, relax_budget
from hidet_dist.search.budget.state import ProbedPlan, State, narrow_choices
from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.limits import OutOfTimeError
from hidet_dist.search.problem import Activations, LiveInterval, Problem
from hidet_dist.search.problem.prices import Prices
from hidet_dist.search.steps import step


@dataclass(frozen=True, order=True)
class _PlansPart:
    """The plans whose resident bytes are within a range, among choices that are kept, and a lower bound of their cost.

    Parts are in the order of their bounds, then of their numbers. ``prices`` are those of the plans that it is a part
    of, the last one for the most resident bytes. ``state`` is that of the part, once it is opened.
    """

    bound: float
    number: int
    resident: tuple[int, int] = field(compare=False)
    kept: list[list[int]] = field(compare=False)
    prices: Sequence[float] = field(compare=False)
    state: State | None = field(compare=False, default=None)


@step("parts")
def divide_plans(state: State, mixture: Mixture) -> None:
    """Divide the plans into parts, the one of least bound first, until no part can have a better plan.

    Prices mix plans that exceed the budget at one point with plans that have room there. Where little is known to be
    left for transient bytes, because the resident ones are within a range, such plans are told apart: choices and
    conversions that do not fit are dropped. Where resident bytes differ little, parts differ in the choices of an
    entity. ``mixture`` is that of the best prices for all plans.

    A part is opened first, with a probe at the prices of the plans that it is a part of: that often finds a better
    plan, or excludes the part. Prices of its own are searched once all parts of smaller bounds are done.
    """
    problem = state.problem
    capacity, left, gap = Capacity(problem), math.inf, math.inf
    fitting = capacity.fitting(state.kept, problem.budget, _forbidden_cost(state), limits=state.limits)
    if fitting is None:
        if state.best:
            state.raise_bound(state.cutoff())  # choices were dropped whose plans reach the cutoff
        return
    prices: Sequence[float] = (*mixture.prices, 0.0)
    ranges = _ranges(problem, fitting.resident, mixture)
    waiting = [_PlansPart(state.bound, n, ends, fitting.kept, prices) for n, ends in enumerate(ranges)]
    number, count = len(waiting), 0
    most = min(tuning.PARTS, tuning.PART_CHOICES // sum(map(len, problem.cost)))
    while waiting and waiting[0].bound < state.cutoff():
        part = waiting[0]
        if part.state is None:
            if count == most:
                break
            if not count % tuning.PARTS_STALL:
                if state.seconds - part.bound > tuning.PARTS_PROGRESS * gap:
                    break
                gap = state.seconds - part.bound
            count += 1
        heapq.heappop(waiting)
        others = waiting[0].bound if waiting else math.inf
        try:
            if part.state is None:
                parts: list[_PlansPart] | float = _open_part(state, capacity, part)
            else:
                parts = _divide_part(state, part, part.state, others)
        except OutOfTimeError:
            state.raise_bound(min(left, part.bound))  # no part waiting has a smaller bound
            raise
        if isinstance(parts, float):
            left = min(left, parts)
            parts = []
        for one in parts:
            heapq.heappush(waiting, replace(one, number=number))
            number += 1
    state.divided = True
    bound = min([left, state.cutoff(), *(part.bound for part in waiting)])
    if math.isfinite(bound):
        state.raise_bound(bound)


def _forbidden_cost(state: State) -> float:
    """Return the cost of a conversion with which no plan fits: more than that of any plan of interest."""
    known = [probe.seconds for probe in state.known_plans]
    return tuning.FORBIDDEN_COSTS * (state.seconds if state.best else max(known))


def _open_part(state: State, capacity: Capacity, part: _PlansPart) -> list[_PlansPart]:
    """Make the state of a part, with a first bound; return the part with it, or nothing if it has no better plan."""
    budget = state.problem.budget
    fitting = capacity.fitting(part.kept, budget, _forbidden_cost(state), part.resident, state.limits)
    if fitting is None:
        return []
    limited = _with_most_resident(fitting.problem, fitting.resident[1])
    options = replace(state.options, on_incumbent=None)
    inner = State(
        limited,
        options,
        fitting.kept,
        state.best,
        state.seconds,
        part.bound,
        outer=state,
    )
    tables = Tables(state.limits)
    first = inner.probe(tables, Prices(part.prices), coarse=True)
    inner.known_plans.append(first)
    inner.raise_bound(first.bound)
    return [] if inner.done() else [replace(part, bound=inner.bound, resident=fitting.resident, state=inner)]


_Half = tuple[tuple[int, int], list[list[int]]]  # a range of resident bytes, and the choices kept


def _divide_part(state: State, part: _PlansPart, inner: State, others: float) -> list[_PlansPart] | float:
    """Bound the plans of a part, whose state is ``inner``, by prices of its own, and record those found on the way.

    Returns the part itself as soon as its bound exceeds ``others``, the least one of other parts. Otherwise returns the
    parts that it is divided into, if it may have a better plan, or its bound if it cannot be divided.
    """
    if not state.best and math.isinf(others):
        state.known_plans.append(find_fitting(state))
    inner.best, inner.seconds = state.best, state.seconds
    inner.enough = others * (1 + tuning.EQUAL)
    tables = Tables(state.limits)
    try:
        inner.known_plans, mixture = relax_budget(inner, tables)
    except InfeasibleError:
        if state.best:
            raise
        state.known_plans.append(find_fitting(state))  # the part has no plan that fits, which it excludes
        return [part]
    if inner.done() or math.isinf(inner.bound):
        return []
    if inner.bound > inner.enough:
        return [replace(part, bound=inner.bound)]
    prices = inner.prices(mixture.prices)
    narrow_choices(inner, tables, prices)
    if inner.seconds - inner.bound <= tuning.FRONTIER_GAP * inner.seconds:
        search_below_limits(inner, tables, prices)
    if inner.done():
        return []
    halves = list(_halves(inner, part.resident, mixture))
    return [_PlansPart(inner.bound, 0, ends, kept, mixture.prices) for ends, kept in halves] or inner.bound


def _with_most_resident(problem: Problem, most: int) -> Problem:
    """Add a program point at which a plan holds its resident bytes alone, and what the budget exceeds ``most`` by."""
    activations = problem.activations
    point, beyond = activations.points, problem.budget - most
    interval = LiveInterval(0, point, point, (beyond,) * len(problem.cost[0]))
    intervals = (*activations.intervals, interval)
    return replace(problem, activations=Activations(point + 1, intervals, activations.tensors))


def _ranges(problem: Problem, resident: tuple[int, int], mixture: Mixture) -> list[tuple[int, int]]:
    """Divide a range of resident bytes: first those that are about as many as the mixture's."""
    low, high = resident
    width = max(1, -(-(high + 1 - low) // tuning.RESIDENT_RANGES))
    ranges = [(begin, min(begin + width - 1, high)) for begin in range(low, high + 1, width)]
    mean = sum(fraction * problem.resident(plan.choices) for fraction, plan in mixture.parts)
    return sorted(ranges, key=lambda ends: abs((ends[0] + ends[1]) / 2 - mean))


def _halves(state: State, resident: tuple[int, int], mixture: Mixture) -> Iterator[_Half]:
    """Divide the plans by what those of the mixture differ in most: their resident bytes, or those of an entity.

    The bytes of an entity are those at the point that plans of the mixture exceed most. Yields two halves, or nothing.
    """
    problem, plans = state.problem, [probe for _, probe in mixture.parts]
    fractions = [fraction for fraction, _ in mixture.parts]
    budget = problem.budget
    low, high = resident

    def spread(values: Sequence[int]) -> tuple[float, float]:
        mean = sum(fraction * value for fraction, value in zip(fractions, values, strict=True))
        return sum(fraction * abs(value - mean) for fraction, value in zip(fractions, values, strict=True)), mean

    most, mean = spread([problem.resident(plan.choices) for plan in plans])
    division: tuple[int, list[bool]] | None = None  # an entity, and for each of its choices whether it is in one half
    if not low <= int(mean) < high:
        most = 0.0
    excess = [
        sum(fraction * max(0, plan.nbytes[point] - budget) for fraction, plan in mixture.parts)
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


def _bytes_at(
    state: State, point: int, plans: Sequence[ProbedPlan]
) -> Iterator[tuple[int, Sequence[float], list[int]]]:
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
