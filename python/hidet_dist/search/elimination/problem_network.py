"""The network of a problem: variables for the choices of its entities, and tables of costs and priced memory."""

from __future__ import annotations

import math
import string
from collections.abc import Collection, Sequence

import numpy as np

from hidet_dist.search import tuning
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.layout import TensorTable, VariableLayout
from hidet_dist.search.elimination.network import Network, Table, Tables, TooWide
from hidet_dist.search.elimination.tensor_tables import (
    MOST_DIMS,
    pair_tables,
    split_tables,
    tensor_bytes,
    tensor_tables,
)
from hidet_dist.search.problem import LiveInterval, Problem, each
from hidet_dist.search.problem.equal_parts import EqualTensor
from hidet_dist.search.problem.prices import Prices


def network_of(
    instance: EliminationInstance, exact: Collection[int], limit: int, paired: int = 0
) -> tuple[Network, dict[int, bool]]:
    """Make the tables of a problem with priced memory; entities are the first variables.

    Returns the network, and the relaxed tensors: those of more readers than ``limit`` that may require several specs,
    with too large a table, or, up to the first of ``tuning.READERS_LIMITS``, those that are ``narrowed`` by the
    instance's relaxation. So are its ``pairs``; those that it keeps ``whole`` are relaxed only for too large a
    table, and those in ``exact`` never. Up to ``paired`` readers of a relaxed tensor, and those of ``pairs``, split the
    conversions from each spec of the producer (:func:`pair_tables`); relaxed tensors map to whether theirs do.
    """
    problem, kept, tables, prices = instance.problem, instance.kept, instance.tables, instance.prices
    if not tables.quantum:
        tables.quantum = _quantum(problem)
    equal, relaxation = problem.equal_parts, instance.relaxation
    # Entities and tensors with equal choices left, as in equal layers, get the same tables.
    left, known = tables.left(kept), tables.known_of(problem, relaxation)
    entities, entity_tables = equal.entities(left, prices), list[int]()
    for key, entity in entities.first:
        own = key, prices.total
        if own not in known.entities:
            known.entities[own] = _entity_table(problem, entity, kept[entity], tables, prices)
        entity_tables.append(known.entities[own])
    of_entities = np.array(entity_tables, dtype=np.int64)[entities.numbers]
    limits = dict[int, float]()
    if limit <= tuning.READERS_LIMITS[0]:
        limits |= dict.fromkeys(relaxation.narrowed or (), 1)
    limits |= dict.fromkeys(relaxation.pairs, 1)
    limits |= {tensor: len(problem.groups[tensor]) for tensor in relaxation.whole}
    limits |= dict.fromkeys(exact, math.inf)
    alike = equal.tensors_alike(left, prices, limits)
    recipes: list[tuple[TensorTable, ...]] = []
    shared = dict[int, bool]()
    for key, position in alike.first:
        tables.limits.check()
        tensor = equal.tensors[position]
        most = limits.get(tensor.tensor, limit)
        if (key, most) not in known.tensors:
            known.tensors[key, most] = tensor_tables(tables, kept, tensor, prices, most)
        recipe = known.tensors[key, most]
        if recipe is None:
            in_pairs = shared[len(recipes)] = len(tensor.group) <= paired or tensor.tensor in relaxation.pairs
            way = key, in_pairs, relaxation.version
            if way not in known.relaxed:
                make = pair_tables if in_pairs else split_tables
                known.relaxed[way] = make(tables, kept, tensor, prices, relaxation)
            recipe = known.relaxed[way]
        recipes.append(recipe)
    relaxed = dict[int, bool]()
    if shared:
        relaxed = {t.tensor: shared[n] for t, n in zip(equal.tensors, alike.numbers, strict=True) if n in shared}
    joint = []
    for price, points in prices.joint:
        scope, peak = joint_peak(problem, kept, tables, points, relaxed)
        joint.append((tables.tables.add(tables.rounded(price * peak)), scope))
    layout = VariableLayout([*map(len, kept)], of_entities, recipes, alike.numbers, equal.ends, equal.ends_begin)
    return Network(tables, layout, joint), relaxed


def _quantum(problem: Problem) -> float:
    """Compute what costs are rounded to multiples of, in seconds, or in bytes if nothing has a cost."""
    tables = {id(edge.convert): edge.convert for edge in problem.edges}  # equal layers share theirs
    greatest = {number: max(map(max, table)) for number, table in tables.items()}
    most = sum(each(max, problem.cost)) + sum(greatest[id(edge.convert)] for edge in problem.edges)
    if not most:
        most = float(sum(map(max, problem.memory)) + sum(max(live.nbytes) for live in problem.activations.intervals))
        most = max(most, 1.0)
    return 2.0 ** (math.frexp(most)[1] - tuning.COST_BITS)


def _entity_table(problem: Problem, entity: int, choices: Sequence[int], tables: Tables, prices: Prices) -> int:
    """Make the table of an entity's costs and priced bytes."""
    equal, left = problem.equal_parts, np.array(choices)
    costs: Table = equal.costs[entity][left]
    if prices.total:
        costs += prices.total * equal.memory[entity][left]
        spans = [(prices.span(*ends), nbytes) for ends, nbytes in equal.held[entity]]
        costs += sum((price * nbytes[left] for price, nbytes in spans if price), np.zeros(len(left)))
    return tables.tables.add(tables.rounded(costs))


def joint_peak(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, points: Sequence[int], relaxed: Collection[int]
) -> tuple[tuple[int, ...], Table]:
    """Tabulate the most transient bytes at any of some points, over the choices of the entities that it depends on.

    Returns these entities and the table. Tensors in ``relaxed`` hold no bytes. Raises TooWide if it is too large.
    """
    first, last = min(points), max(points)
    intervals = [live for live in problem.activations.intervals if live.begin <= last and live.end >= first]
    tensors = [
        tensor
        for tensor in problem.without_costs.equal_parts.tensors
        if tensor.memory is not None and tensor.begin <= last and tensor.end >= first and tensor.tensor not in relaxed
    ]
    entities = dict.fromkeys([live.entity for live in intervals])
    entities |= dict.fromkeys(end for tensor in tensors for end in tensor.ends)
    # Most networks of a search differ by prices, or by the choices of other entities.
    key = (tuple(points), tuple(tensor.tensor for tensor in tensors), tuple((e, tuple(kept[e])) for e in entities))
    known = tables.peaks.get(key)
    if known is None:
        known = tables.peaks[key] = _tabulate_peak(problem, kept, tables, points, intervals, tensors)
    scope, number = known
    if number is None:
        raise TooWide
    return scope, tables.tables[number]


def _summed(
    kept: Sequence[Sequence[int]], terms: Sequence[tuple[Table, tuple[int, ...]]], scope: Sequence[int]
) -> Table:
    """Add up tables over some entities of a scope."""
    total: Table = np.zeros([len(kept[entity]) for entity in scope])
    for table, own in terms:
        total = total + table.reshape([len(kept[entity]) if entity in own else 1 for entity in scope])
    return total


def _tabulate_peak(
    problem: Problem,
    kept: Sequence[Sequence[int]],
    tables: Tables,
    points: Sequence[int],
    intervals: Sequence[LiveInterval],
    tensors: Sequence[EqualTensor],
) -> tuple[tuple[int, ...], int | None]:
    """Tabulate the most bytes that intervals and tensors hold at any of some points: entities, and table by number.

    The number is None if the table is too large.
    """
    at = _terms_at(problem, kept, tables, points, intervals, tensors)
    scope = tuple(sorted({entity for terms in at.values() for _, own in terms for entity in own}))
    shape = [len(kept[entity]) for entity in scope]
    if len(scope) > MOST_DIMS or math.prod(shape) > tuning.JOINT_ENTRIES:
        return scope, None
    peak: Table = np.zeros(shape)
    for terms in at.values():
        peak = np.maximum(peak, _summed(kept, terms, scope))
    return scope, tables.tables.add(peak)


def _terms_at(
    problem: Problem,
    kept: Sequence[Sequence[int]],
    tables: Tables,
    points: Sequence[int],
    intervals: Sequence[LiveInterval],
    tensors: Sequence[EqualTensor],
) -> dict[int, list[tuple[Table, tuple[int, ...]]]]:
    """Tabulate the bytes of each interval and each tensor at each of some points, with the entities of the tables."""
    units = {m: Prices.at_point(m, 1.0, problem.activations.points) for m in points}
    at: dict[int, list[tuple[Table, tuple[int, ...]]]] = {m: [] for m in points}
    for interval in intervals:
        line = np.array([interval.nbytes[k] for k in kept[interval.entity]], dtype=float)
        for m in points:
            if line.any() and interval.begin <= m <= interval.end:
                at[m].append((line, (interval.entity,)))
    for tensor in tensors:
        for m in points:
            if tensor.begin <= m <= tensor.end:
                given = (_over_choices(tables, t, tensor.ends) for t in tensor_bytes(kept, tables, units[m], tensor))
                at[m] += [(table, own) for table, own in given if table.any()]
    return at


def _over_choices(tables: Tables, given: TensorTable, ends: Sequence[int]) -> tuple[Table, tuple[int, ...]]:
    """Expand a table over choices or specs of the entities ``ends`` to one over choices, in the entities' order."""
    table, scope = tables.tables[given.table], [ends[end] for end, _, _ in given.dims]
    for dim, (_, _, tie) in enumerate(given.dims):
        if tie is not None:
            table = table.take(tables.tables[tie].argmin(axis=1), axis=dim)
    own = sorted(set(scope))
    # An entity that occurs twice, by its choices and by its specs, takes one choice.
    letters = dict(zip(own, string.ascii_letters, strict=False))
    diagonal = "".join(map(letters.__getitem__, scope)) + "->" + "".join(map(letters.__getitem__, own))
    taken: Table = np.einsum(diagonal, table)
    return taken, tuple(own)
