"""The network of a problem: variables for the choices of its entities, and tables of costs and priced memory."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

import numpy as np

from hidet_dist.search import tuning
from hidet_dist.search.layout import Layout, TensorTable
from hidet_dist.search.network import Network, Table, Tables, TooWide
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import Problem
from hidet_dist.search.tensor_tables import MOST_DIMS, share_tables, tensor_bytes, tensor_tables


def network_of(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, exact: Sequence[int], limit: int
) -> tuple[Network, list[int]]:
    """Make the tables of a problem with priced memory; entities are the first variables.

    Returns the network, and the relaxed tensors: those of more readers than ``limit`` that may require several specs,
    with too large a table, or, up to the first of ``tuning.READERS_LIMITS``, those of the problem's ``narrowing``.
    Tensors in ``exact`` are never relaxed.
    """
    if not tables.quantum:
        tables.quantum = _quantum(problem)
    equal = problem.equal_parts
    # Entities and tensors with equal choices left, as in equal layers, get the same tables.
    lefts: dict[tuple[int, ...], int] = {}
    left = np.array([lefts.setdefault(tuple(choices), len(lefts)) for choices in kept], dtype=np.int64)
    first, numbers = equal.entities(left, prices)
    entity_tables = np.array([_entity_table(problem, e, kept[e], tables, prices) for e in first], dtype=np.int64)
    sizes, of_entities = [*map(len, kept)], entity_tables[numbers]
    limits = dict[int, float]()
    if limit <= tuning.READERS_LIMITS[0]:
        limits |= dict.fromkeys(problem.narrowing.tensors, 1)
    limits |= dict.fromkeys(exact, math.inf)
    first, numbers = equal.tensors_alike(left, prices, limits)
    recipes: list[tuple[TensorTable, ...]] = []
    shared = set[int]()
    for position in first:
        tables.limits.check()
        tensor = equal.tensors[position]
        recipe = tensor_tables(tables, kept, tensor, prices, limits.get(tensor.tensor, limit))
        if recipe is None:
            shared.add(len(recipes))
            recipe = share_tables(tables, kept, tensor, prices)
        recipes.append(recipe)
    relaxed = []
    if shared:
        relaxed = [tensor.tensor for tensor, n in zip(equal.tensors, numbers, strict=True) if n in shared]
    joint = []
    for price, points in prices.joint:
        scope, peak = joint_peak(problem, kept, tables, points, relaxed)
        joint.append((tables.tables.add(tables.rounded(price * peak)), scope))
    layout = Layout(sizes, of_entities, recipes, numbers, equal.ends, equal.ends_begin)
    return Network(tables, layout, joint), relaxed


def _quantum(problem: Problem) -> float:
    """Compute what costs are rounded to multiples of, in seconds, or in bytes if nothing has a cost."""
    most = sum(map(max, problem.cost)) + sum(max(map(max, edge.convert)) for edge in problem.edges)
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
    for tensor in free.equal_parts.tensors:
        if tensor.tensor in relaxed or tensor.memory is None:
            continue
        for m in points:
            if tensor.begin <= m <= tensor.end:
                for given in tensor_bytes(kept, tables, Prices.at_point(m, 1.0, count), tensor):
                    at[m].append(_over_choices(tables, given, tensor.ends))
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
