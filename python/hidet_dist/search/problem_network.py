"""The network of a problem: variables for the choices of its entities, and tables of costs and priced memory."""

from __future__ import annotations

import math
import string
from collections.abc import Hashable, Sequence

import numpy as np

from hidet_dist.search import tuning
from hidet_dist.search.network import Network, Table, Tables, TensorTable, TooWide
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import Problem
from hidet_dist.search.tensor_tables import MOST_DIMS, Priced, Spans, share_tables, tensor_bytes, tensor_tables


def network_of(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, exact: Sequence[int], limit: int
) -> tuple[Network, list[int]]:
    """Make the tables of a problem with priced memory; entities are the first variables.

    Returns the network, and the relaxed tensors: those of more readers than ``limit`` that may require several specs,
    or with too large a table. Tensors in ``exact`` are never relaxed.
    """
    network = Network(tables)
    if not tables.quantum:
        tables.quantum = _quantum(problem)
    equal, until = problem.equal_parts, prices.until
    # Entities and tensors with equal choices left, as in equal layers, get the same tables.
    lefts: dict[tuple[int, ...], int] = {}
    left = [lefts.setdefault(tuple(choices), len(lefts)) for choices in kept]
    known: dict[Hashable, int] = {}
    for entity, (kind, intervals) in enumerate(zip(equal.entities, equal.intervals, strict=True)):
        spans = [until[end + 1] - until[begin] for begin, end in intervals] if prices.total else ()
        same = kind, left[entity], *spans
        number = known.get(same)
        if number is None:
            number = known[same] = _entity_table(problem, entity, kept[entity], tables, prices, spans)
        network.give(number, (network.variable(len(kept[entity])),))
    relaxed = []
    recipes: dict[Hashable, tuple[tuple[TensorTable, ...], bool]] = {}
    for count, tensor in enumerate(equal.tensors):
        if not count % tuning.CHECK_STEPS:
            tables.limits.check()
        ends, is_exact = tensor.ends, tensor.tensor in exact
        has_price = bool(prices.total and tensor.memory and until[tensor.end + 1] != until[tensor.begin])
        alike: Hashable = (tensor.kind, is_exact, *[left[end] for end in ends])
        if has_price:
            first = until[tensor.begin]
            alike = alike, *[(until[b] - first, until[e + 1] - first, prices.at[b]) for b, e in tensor.lives]
        recipe = recipes.get(alike)
        if recipe is None:
            priced = Priced(tensor.memory, Spans(prices, tensor.group)) if tensor.memory and has_price else None
            own = tensor_tables(tables, kept, tensor.group, priced, math.inf if is_exact else limit)
            recipe = recipes[alike] = own or share_tables(tables, kept, tensor.group, priced), own is None
        if recipe[1]:
            relaxed.append(tensor.tensor)
        network.of_tensor[tensor.tensor] = [network.give_at(given, ends) for given in recipe[0]]
    for price, points in prices.joint:
        scope, peak = joint_peak(problem, kept, tables, points, relaxed)
        chosen = tuple(tuple(kept[entity]) for entity in scope)
        joint_key: Hashable = ("joint", price, points, chosen, tuple(relaxed))
        number = tables.find(joint_key)
        if number is None:
            number = tables.add(joint_key, tables.rounded(price * peak))
        network.give(number, scope)
    return network, relaxed


def _quantum(problem: Problem) -> float:
    """Compute what costs are rounded to multiples of, in seconds, or in bytes if nothing has a cost."""
    most = sum(map(max, problem.cost)) + sum(max(map(max, edge.convert)) for edge in problem.edges)
    if not most:
        most = float(sum(map(max, problem.memory)) + sum(max(live.nbytes) for live in problem.activations.intervals))
        most = max(most, 1.0)
    return 2.0 ** (math.frexp(most)[1] - tuning.COST_BITS)


def _entity_table(
    problem: Problem, entity: int, choices: Sequence[int], tables: Tables, prices: Prices, spans: Sequence[float]
) -> int:
    """Make the table of an entity's costs and priced bytes; its live intervals have the prices ``spans``."""
    paid, memory = problem.cost[entity], problem.memory[entity]
    live = [pair for pair in zip(spans, problem.equal_parts.interval_bytes[entity], strict=False) if pair[0]]
    costs = [paid[k] + prices.total * memory[k] + sum(price * nbytes[k] for price, nbytes in live) for k in choices]
    return tables.tables.add(tables.rounded(np.array(costs)))


def joint_peak(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, points: Sequence[int], relaxed: Sequence[int]
) -> tuple[tuple[int, ...], Table]:
    """Tabulate the most transient bytes at any of some points, over the choices of the entities that it depends on.

    Returns these entities and the table. Tensors in ``relaxed`` hold no bytes. Raises TooWide if it is too large.
    """
    free, count = problem.without_costs, problem.activations.points
    at: dict[int, list[tuple[Table, tuple[int, ...]]]] = {m: [] for m in points}
    for interval in problem.activations.intervals:
        for m in points:
            if interval.begin <= m <= interval.end:
                line = np.array([interval.nbytes[k] for k in kept[interval.entity]], dtype=float)
                at[m].append((line, (interval.entity,)))
    for tensor, group in free.groups.items():
        if tensor in relaxed or tensor not in problem.activations.tensors:
            continue
        begin, end = min(edge.begin for edge in group), max(edge.end for edge in group)
        ends = group[0].producer, *(edge.consumer for edge in group)
        for m in points:
            if begin <= m <= end:
                for given in tensor_bytes(free, kept, tables, Prices.at_point(m, 1.0, count), tensor):
                    at[m].append(_over_choices(tables, given, ends))
    scope = tuple(sorted({entity for terms in at.values() for table, own in terms for entity in own if table.any()}))
    shape = [len(kept[entity]) for entity in scope]
    if len(scope) > MOST_DIMS or math.prod(shape) > tuning.JOINT_ENTRIES:
        raise TooWide
    peak: Table = np.zeros(shape)
    for terms in at.values():
        held: Table = np.zeros(())
        for table, own in terms:
            if table.any():
                held = held + table.reshape([len(kept[entity]) if entity in own else 1 for entity in scope])
        peak = np.maximum(peak, held)
    return scope, peak


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
