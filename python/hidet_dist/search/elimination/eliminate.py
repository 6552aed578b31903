"""Exact minimisation by variable elimination, for the problem without its memory budget.

The cost of a plan is a sum of small tables: one an entity, one a tensor over its producer and consumers
(:mod:`hidet_dist.search.elimination.problem_network`). Variable elimination minimises it
(:mod:`hidet_dist.search.elimination.network`). Graphs of neural networks are narrow, so the tables stay small.

Repeated blocks are solved once: tables are numbered by content, and an elimination of the same tables in the same way
is looked up. Layers need not be declared equal for that, and need not get the same plan.

A tensor that very many operators read (an attention mask, a table of cosines) would make one table over all of them.
It is relaxed: each reader pays its portion of the conversion, from each spec that may be made
(:mod:`hidet_dist.search.elimination.pairing`) or from the one of least cost, which gives a lower bound. A second
elimination, with the required specs of these readers fixed, gives a plan. Both bound and cost are reported.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np

from hidet_dist.search import tuning
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.narrowing import narrow
from hidet_dist.search.elimination.network import Network, Table, Tables, TooWide
from hidet_dist.search.elimination.pairing import pair_more, readers_in_pairs
from hidet_dist.search.elimination.problem_network import network_of
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.elimination.tightening import tighten
from hidet_dist.search.problem import Edge, Problem, readers
from hidet_dist.search.problem.equal_parts import EqualTensor


@dataclass(frozen=True)
class Eliminated:
    """The result of an elimination: choices, their cost in ``seconds``, and a lower ``bound`` of every plan's cost.

    Both include the price of memory, if there is one.
    """

    choices: tuple[int, ...]
    seconds: float
    bound: float

    def joined(self, other: Eliminated) -> Eliminated:
        """The better plan and the greater bound of two eliminations of one problem."""
        better = min(self, other, key=lambda one: one.seconds)
        return Eliminated(better.choices, better.seconds, max(self.bound, other.bound))

    def lacks(self, gap: float) -> float:
        """Compute the seconds by which the bound is too low for a relative gap; 0 or less if it is not."""
        return self.seconds - self.bound - gap * abs(self.seconds)


def eliminate(instance: EliminationInstance, gap: float = 0.0, coarse: bool = False) -> Eliminated:
    """Minimise the cost over the choices left of each entity, with priced memory and without a budget.

    Tensors of many readers are relaxed first, and fewer of them until bound and cost are within the relative ``gap``;
    then those that leave the gap are relaxed less (:mod:`hidet_dist.search.elimination.tightening`). With ``coarse``
    the first relaxation is the answer, whatever its gap. If the graph is too wide even so, further tensors are relaxed
    (:mod:`hidet_dist.search.elimination.narrowing`), in this elimination and those to come.

    Raises
    ------
    TooWide
        When the graph is too densely connected for the limits on work and memory.
    OutOfTimeError
        When the time limit is reached.
    """
    best: Eliminated | None = None
    most = 0  # readers of tensors that were treated exactly
    for limit in tuning.READERS_LIMITS:
        if limit < most:
            continue  # with more tensors relaxed, the bound is no greater
        result = _eliminate(instance, limit, gap, coarse)
        if result is None and limit == tuning.READERS_LIMITS[0] and narrow(instance):
            instance.relaxation.paired = None
            result = _eliminate(instance, limit, gap, coarse)
        if result is None:
            continue
        most = limit
        best = result if best is None else best.joined(result)
        if coarse or best.lacks(gap) <= 0:
            return best
    if best is None:
        raise TooWide
    while best.lacks(gap) > 0:
        last = minimized(instance, (), most)
        if not tighten(last, instance, most, best.lacks(gap)):
            break
        result = _eliminate(instance, most, gap, coarse)
        if result is None:
            break
        best = best.joined(result)
    return best


def boundary_table(instance: EliminationInstance, ends: Sequence[int]) -> Table:
    """Tabulate a lower bound of the cost for all choices of the entities ``ends``, one dim each, in their order.

    It is exact unless a tensor of many readers had to be relaxed. Raises TooWide when the graph is too densely
    connected.
    """
    for limit in sorted(tuning.READERS_LIMITS, reverse=True):
        instance.tables.make_room()
        try:
            network, _ = network_of(instance, (), limit)
            return network.least_over(ends)
        except TooWide:
            continue
    raise TooWide


def marginals(instance: EliminationInstance) -> list[Table] | None:
    """Bound the cost of plans with each choice left of each entity from below: the min-marginals.

    None when the graph is too densely connected.
    """
    too_wide = math.inf
    for limit in tuning.READERS_LIMITS:
        if limit > too_wide:
            continue  # with fewer tensors relaxed, the graph is no narrower
        try:
            return minimized(instance, (), limit).network.marginals(len(instance.kept))
        except TooWide:
            too_wide = limit
    return None


def _eliminate(instance: EliminationInstance, limit: int, gap: float, coarse: bool) -> Eliminated | None:
    """Eliminate with one limit of readers; None where the graph is too wide."""
    problem, prices, relaxation = instance.problem, instance.prices, instance.relaxation
    try:
        bound, choices, relaxed = _solve(instance, (), limit)
    except TooWide:
        return None
    if math.isinf(bound):
        return Eliminated(tuple(choices), bound, bound)
    totals, groups = problem.totals, readers(problem)

    def cost(choices: Sequence[int]) -> float:
        seconds = totals.seconds(choices)
        return seconds + prices.of(totals.nbytes(choices)) if prices.total else seconds

    best, seconds = choices, cost(choices)
    while relaxed:
        stalls, steps = 0, max(map(relaxation.steps.get, relaxed, repeat(0)))
        few = coarse or (prices.total and steps >= tuning.PORTION_ROUNDS)
        for _ in range(1 if few else tuning.PORTION_ROUNDS):
            left = seconds - bound
            if left <= gap * abs(seconds) or not split_costs_by_plan(problem, relaxation, relaxed, choices):
                break
            other_bound, choices, _ = _solve(instance, (), limit)
            bound = max(bound, other_bound)
            if cost(choices) < seconds:
                best, seconds = choices, cost(choices)
            stalls = stalls + 1 if seconds - bound > tuning.PORTION_PROGRESS * left else 0
            if stalls == tuning.PORTION_STALLS:
                break
        if coarse or seconds - bound <= gap * abs(seconds):
            break
        if not pair_more(instance, limit, relaxed):
            break
        other_bound, choices, relaxed = _solve(instance, (), limit)
        bound = max(bound, other_bound)
        if cost(choices) < seconds:
            best, seconds = choices, cost(choices)
    for same in (True, False) if relaxed else ():
        if seconds - bound <= gap * abs(seconds):
            break
        narrowed = [list(entity_choices) for entity_choices in instance.kept]
        for tensor in relaxed:
            fix_required(groups[tensor], choices, narrowed, same)
        try:
            _, other, _ = _solve(replace(instance, kept=narrowed), relaxed, limit)
        except TooWide:
            break
        if cost(other) < seconds:
            best, seconds = other, cost(other)
    return Eliminated(tuple(best), seconds, min(bound, seconds))


def split_costs_by_plan(
    problem: Problem, relaxation: TensorRelaxation, tensors: Collection[int], choices: Sequence[int]
) -> bool:
    """Let the readers that require a spec in a plan pay more of the conversion; tell whether that is a change.

    Equal portions leave a gap where only some readers require the spec: the queries, say, of queries and keys. The
    readers that require it in the plan split it at first, and then those of all plans so far, the last ones more: steps
    that become smaller along the subgradients, for whose sequence the bound approaches the best that portions can give.
    """
    number = {tensor.tensor: tensor for tensor in problem.equal_parts.tensors}
    kinds: dict[int, list[EqualTensor]] = {}
    for tensor in tensors:
        kinds.setdefault(number[tensor].kind, []).append(number[tensor])
    changed = False
    for equal in kinds.values():  # they have equal tables, so equal portions
        step = max(1 / (1 + relaxation.steps.get(equal[0].tensor, 0)), tuning.PORTION_STEP)
        readers_, specs = len(equal[0].group), len(equal[0].group[0].convert[0])
        before = relaxation.of(equal[0].tensor, readers_, specs)
        required = np.array([[edge.consumed[choices[edge.consumer]] for edge in tensor.group] for tensor in equal])
        uses = required[:, :, None] == np.arange(specs)
        paid = np.where(uses.any(axis=1, keepdims=True), uses / np.maximum(1, uses.sum(axis=1, keepdims=True)), before)
        portions = before + step * (paid.mean(axis=0) - before)
        if not np.array_equal(before, portions):
            changed = True
            relaxation.portions |= dict.fromkeys([tensor.tensor for tensor in equal], portions)
    if changed:
        relaxation.steps |= {tensor: 1 + relaxation.steps.get(tensor, 0) for tensor in tensors}
        relaxation.version += 1
    return changed


def fix_required(group: list[Edge], choices: Sequence[int], kept: list[list[int]], same: bool) -> None:
    """Restrict each reader of a tensor to choices that require one spec: its present one, or the ``same`` for all.

    ``choices`` are the present choices of all entities, and ``kept`` is changed.
    """
    required = [edge.consumed[choices[edge.consumer]] for edge in group]
    commonest = max(required, key=required.count)
    for edge, present in zip(group, required, strict=True):
        for spec in (commonest, present) if same else (present,):
            left = [k for k in kept[edge.consumer] if edge.consumed[k] == spec]
            if left:
                kept[edge.consumer] = left
                break


def _solve(
    instance: EliminationInstance, exact: Collection[int], limit: int
) -> tuple[float, list[int], dict[int, bool]]:
    """Solve once: return the bound, the choices, and the relaxed tensors (those in ``exact`` never are)."""
    solved = minimized(instance, exact, limit)
    return (
        solved.bound,
        [choices[solved.values[entity]] for entity, choices in enumerate(instance.kept)],
        solved.relaxed,
    )


@dataclass(frozen=True)
class Solved:
    """A network after its elimination, with the least sum and the values for it; and the relaxed tensors.

    ``paired`` is what the network was made with.
    """

    problem: Problem
    relaxation: TensorRelaxation
    key: Hashable
    network: Network
    relaxed: dict[int, bool]
    paired: int
    bound: float
    values: list[int]

    def is_of(self, instance: EliminationInstance) -> bool:
        """Tell whether an instance is of the same problem and search."""
        return self.problem is instance.problem and self.relaxation is instance.relaxation


def minimized(instance: EliminationInstance, exact: Collection[int], limit: int) -> Solved:
    """Eliminate a network of :func:`network_of`. The last one without exact tensors is looked up. Raises TooWide."""
    tables, relaxation = instance.tables, instance.relaxation
    key = instance.prices.key, relaxation.version, tuple(map(tuple, instance.kept)), limit
    last = tables.last
    if last is not None and not exact and last.is_of(instance) and last.key == key:
        return last
    tables.make_room()
    paired = readers_in_pairs(instance, exact, limit)
    network, relaxed = network_of(instance, exact, limit, paired)
    try:
        bound, values = _minimum(tables, network)
    except TooWide:
        if not any(relaxed.values()) and not relaxation.whole:
            raise
        relaxation.relax_most()
        key, paired = (*key[:1], relaxation.version, *key[2:]), 0
        network, relaxed = network_of(instance, exact, limit)
        bound, values = _minimum(tables, network)
    solved = Solved(instance.problem, relaxation, key, network, relaxed, paired, bound, values)
    if not exact:
        tables.last = solved
    return solved


def _minimum(tables: Tables, network: Network) -> tuple[float, list[int]]:
    """Eliminate a network, and note the work of its largest step. Raises TooWide."""
    try:
        return network.minimum()
    finally:
        tables.widest = max(tables.widest, network.widest)
