"""Presolve: remove choices that no best plan needs.

Choice a of an entity is dominated by choice b of the same entity when changing from a to b can only pay, whatever all
others choose: its own cost, plus the most that the conversions around it can become dearer by, is not above a's, and it
takes no more memory. This is the dead-end elimination of protein design (Goldstein, Biophysical Journal 66, 1994).
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from hidet_dist.search import tuning
from hidet_dist.search.limits import Limits
from hidet_dist.search.problem import Edge, Problem, readers

Matrix = npt.NDArray[np.float64]


def undominated(problem: Problem, limits: Limits | None = None, rounds: int = 3) -> list[list[int]]:
    """List the choices left of each entity, at least one; one of the best plans is made of them."""
    kept = [list(range(len(costs))) for costs in problem.cost]
    groups = readers(problem)
    made: list[list[list[Edge]]] = [[] for _ in kept]
    reads: list[list[tuple[Edge, int]]] = [[] for _ in kept]
    for group in groups.values():
        made[group[0].producer].append(group)
        for edge in group:
            reads[edge.consumer].append((edge, len(group)))
    arrays: dict[int, Matrix] = {}
    for edge in problem.edges:
        if id(edge.convert) not in arrays:
            arrays[id(edge.convert)] = np.array(edge.convert)
    known: dict[Hashable, list[int]] = {}
    for _ in range(rounds):
        before = sum(map(len, kept))
        for entity, choices in enumerate(kept):
            if limits is not None:
                limits.check()
            if len(choices) == 1:
                continue
            outs = tuple(
                (
                    id(group[0].convert),
                    tuple(group[0].produced[k] for k in choices),
                    tuple(sorted({edge.consumed[k] for edge in group for k in kept[edge.consumer]})),
                    len(group),
                )
                for group in made[entity]
            )
            ins = tuple(
                (
                    id(edge.convert),
                    tuple(sorted({edge.produced[k] for k in kept[edge.producer]})),
                    tuple(edge.consumed[k] for k in choices),
                    count,
                )
                for edge, count in reads[entity]
            )
            costs = tuple((problem.cost[entity][k], problem.memory[entity][k]) for k in choices)
            key = (costs, outs, ins)
            if key not in known:
                known[key] = _left(costs, outs, ins, arrays)
            kept[entity] = [choices[i] for i in known[key]]
        if sum(map(len, kept)) == before:
            break
    return kept


_Side = tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...]


def _left(costs: tuple[tuple[float, int], ...], outs: _Side, ins: _Side, arrays: dict[int, Matrix]) -> list[int]:
    """List the positions that no other dominates; worse[a, b] is the most that changing from a to b can cost."""
    cost, memory = (np.array(column) for column in zip(*costs, strict=True))
    worse = cost[None, :] - cost[:, None]
    for convert, produced, required, count in outs:
        lines = arrays[convert][np.ix_(produced, required)]
        most = _greatest_rise(lines)
        # Each distinct required spec is paid once: there are at least one and at most as many as there are readers.
        worse = worse + np.where(most > 0, most * min(count, len(required)), most)
    for convert, sources, consumed, count in ins:
        lines = arrays[convert][np.ix_(sources, consumed)].T
        if count == 1:
            worse = worse + _greatest_rise(lines)
        else:  # another reader may pay for the spec that a requires anyway, and none for that of b
            spec = np.array(consumed)
            worse = worse + np.where(spec[None, :] == spec[:, None], 0.0, lines.max(axis=-1)[None, :])
    first = np.arange(len(cost))
    dominates = (worse < 0) | ((worse == 0) & (first[None, :] < first[:, None]))
    dominates &= memory[None, :] <= memory[:, None]
    return [int(i) for i in np.flatnonzero(~dominates.any(axis=1))]


def _greatest_rise(lines: Matrix) -> Matrix:
    """``[a, b]``: the most by which an entry of line b is above that of line a; a chunk of lines at a time."""
    count = max(1, tuning.CHUNK_ENTRIES // lines.size)
    parts = [(lines[None, :, :] - lines[at : at + count, None, :]).max(axis=-1) for at in range(0, len(lines), count)]
    return np.concatenate(parts)
