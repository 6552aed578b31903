"""Choices with which every plan exceeds the budget at one program point.

The bytes at a program point are a sum over the entities, except where a converted tensor is held for its readers. So
most entities can be taken alone; those with live intervals and converted tensors at the point make a small problem,
without costs, whose min-marginals are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hidet_dist.search import tuning
from hidet_dist.search.elimination.eliminate import marginals
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.elimination.presolve import Presolve
from hidet_dist.search.limits import Limits
from hidet_dist.search.problem import Activations, Edge, Problem
from hidet_dist.search.problem.prices import Prices


def fitting_choices(
    problem: Problem, kept: Sequence[Sequence[int]], point: int, limits: Limits
) -> list[list[int]] | None:
    """Select the choices ``kept`` with which some plan may fit the budget at a program point.

    None when the entities at this point are too densely connected. An entity may be left without a choice: then no plan
    fits.

    Raises
    ------
    OutOfTimeError
        When the time limit is reached.
    """
    limits.check()
    bounds = [np.array([memory[k] for k in own], dtype=float) for memory, own in zip(problem.memory, kept, strict=True)]
    entities, local = _problem_at(problem, point)
    if entities:
        left = [kept[entity] for entity in entities]
        prices = Prices.at_point(point, 1.0, problem.activations.points)
        reduction = Presolve(local).reduce(left, prices, limits)
        found = marginals(EliminationInstance(local, reduction.kept, Tables(limits), prices))
        if found is None:
            return None
        extended = reduction.extend(local, found)
        for entity, own, line in zip(entities, left, extended, strict=True):
            bounds[entity] = line[own]
        together = float(extended[0].min())
    else:
        together = 0.0
    inside = set(entities)
    least = [0.0 if entity in inside else float(line.min()) for entity, line in enumerate(bounds)]
    total = sum(least) + together
    limit = problem.budget * (1 + tuning.ROUNDING)
    result = []
    for entity, (own, line) in enumerate(zip(kept, bounds, strict=True)):
        others = total - (together if entity in inside else least[entity])
        result.append([k for k, nbytes in zip(own, line.tolist(), strict=True) if others + nbytes <= limit])
    return result


def _problem_at(problem: Problem, point: int) -> tuple[list[int], Problem]:
    """Restrict the problem to what holds transient bytes at a point; returns its entities by number, and no costs."""
    activations = problem.activations
    intervals = [interval for interval in activations.intervals if interval.begin <= point <= interval.end]
    groups = [
        group
        for tensor, group in problem.groups.items()
        if tensor in activations.tensors
        and min(edge.begin for edge in group) <= point <= max(edge.end for edge in group)
    ]
    ends = {entity for group in groups for edge in group for entity in (edge.producer, edge.consumer)}
    entities = sorted(ends.union(interval.entity for interval in intervals))
    number = {entity: n for n, entity in enumerate(entities)}
    free: dict[tuple[int, int], tuple[tuple[float, ...], ...]] = {}

    def without_cost(edge: Edge) -> Edge:
        size = len(edge.convert), len(edge.convert[0])
        convert = free.setdefault(size, ((0.0,) * size[1],) * size[0])
        return replace(edge, producer=number[edge.producer], consumer=number[edge.consumer], convert=convert)

    return entities, Problem(
        [[0.0] * len(problem.cost[entity]) for entity in entities],
        [problem.memory[entity] for entity in entities],
        problem.budget,
        [without_cost(edge) for group in groups for edge in group],
        Activations(
            activations.points,
            tuple(replace(interval, entity=number[interval.entity]) for interval in intervals),
            activations.tensors,
        ),
    )
