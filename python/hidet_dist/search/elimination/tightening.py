"""Which relaxed tensors to relax less where their relaxation leaves a gap between bound and plan.

The gap of an elimination is a sum over the relaxed tensors: what the conversions of each cost in the plan, less what
its readers pay. So it is known which tensors are at fault. Equal tensors, of all layers at once, become exact if that
leaves an elimination little work, or else are split from each spec that the producer may make. In a layer of experts,
the weights of the tokens are such a tensor: four operators read it, which no other tensor connects with as little work.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from hidet_dist.search import tuning
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import TooWide
from hidet_dist.search.elimination.problem_network import network_of
from hidet_dist.search.elimination.tensor_tables import tensor_tables
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.equal_parts import EqualTensor

if TYPE_CHECKING:
    from hidet_dist.search.elimination.eliminate import Solved


def tighten(solved: Solved, instance: EliminationInstance, limit: int, enough: float) -> bool:
    """Relax tensors less in the eliminations to come, until what they lack is ``enough``; tell whether any are.

    ``solved`` is an elimination with this limit of readers; what its tensors lack is its gap, in
    seconds. The instance's relaxation says how they are relaxed.
    """
    relaxation = instance.relaxation
    if relaxation.tightenings == tuning.TIGHTENINGS:
        return False
    relaxation.tightenings += 1
    lacking, equal = dict[int, float](), dict[int, list[int]]()
    plan = [[choices[k]] for choices, k in zip(instance.kept, solved.values, strict=False)]
    for position, tensor in enumerate(solved.problem.equal_parts.tensors):
        if tensor.tensor in solved.relaxed:
            lack = _cost(replace(instance, kept=plan), tensor) - solved.network.paid(position, solved.values)
            lacking[tensor.kind] = lacking.get(tensor.kind, 0.0) + lack
            equal.setdefault(tensor.kind, []).append(tensor.tensor)
    changed, least = False, enough * tuning.TIGHT_FRACTION
    for kind in sorted(lacking, key=lambda kind: -lacking[kind]):
        if enough <= 0 or lacking[kind] <= least:
            break
        if _relax_less(solved, instance, limit, frozenset(equal[kind])):
            enough -= lacking[kind]
            changed = True
    relaxation.version += changed
    return changed


def _cost(plan: EliminationInstance, tensor: EqualTensor) -> float:
    """Compute the cost of a tensor's conversions in a plan, which leaves each entity one choice, with priced memory."""
    recipe = tensor_tables(plan.tables, plan.kept, tensor, plan.prices, math.inf)
    assert recipe is not None  # without a limit none is relaxed
    return sum(float(plan.tables.tables[table.table].item()) for table in recipe)


def _relax_less(solved: Solved, instance: EliminationInstance, limit: int, tensors: frozenset[int]) -> bool:
    """Relax tensors less, if there is a way that leaves an elimination little work; tell whether there is.

    They are kept whole; or they are split from each spec; or so they are together with others beside them, which were
    not relaxed: of these ways, the first, and of others beside them those with which there is the least work.
    """
    problem, relaxation = solved.problem, instance.relaxation
    before = whole, pairs = relaxation.whole, relaxation.pairs

    def work(more_whole: frozenset[int], more_pairs: frozenset[int]) -> float:
        """Compute the additions of an elimination; infinite if they are too many, or the tensors no less relaxed."""
        instance.tables.limits.check()
        relaxation.whole, relaxation.pairs = more_whole, more_pairs
        try:
            network, still = network_of(instance, (), limit, relaxation.paired or 0)
            total, most = network.least_work()
        except TooWide:
            return math.inf
        finally:
            relaxation.whole, relaxation.pairs = before
        # A tensor whose table is too large is relaxed all the same.
        is_less = not tensors & more_whole & still.keys() and all(still.get(tensor, True) for tensor in tensors)
        return total if is_less and most <= tuning.WORK_LIMIT and total <= tuning.TIGHT_WORK else math.inf

    ways: list[list[tuple[frozenset[int], frozenset[int]]]] = [[(whole | tensors, pairs)]]
    if not all(solved.relaxed[tensor] for tensor in tensors):
        others = _beside(problem, solved.relaxed, tensors)
        ways += [[(whole, pairs | tensors)], [(whole - other, pairs | tensors | other) for other in others]]
    for alike in ways:
        least, now = min(((work(*way), way) for way in alike), key=lambda each: each[0], default=(math.inf, before))
        if math.isfinite(least):
            relaxation.whole, relaxation.pairs = now
            for tensor in relaxation.pairs - pairs:
                relaxation.restart(tensor)
            return True
    return False


def _beside(problem: Problem, relaxed: Collection[int], tensors: frozenset[int]) -> list[frozenset[int]]:
    """List the kinds of tensors that are not relaxed, of which one has two entities in common with one of ``tensors``.

    Two tensors between the same operators are what makes a graph wide.
    """
    given = [(frozenset(tensor.ends), tensor) for tensor in problem.equal_parts.tensors if len(tensor.group) > 1]
    ends = [own for own, tensor in given if tensor.tensor in tensors]
    touched = frozenset[int]().union(*ends)
    kinds = {
        tensor.kind
        for own, tensor in given
        if tensor.tensor not in relaxed and len(own & touched) > 1 and any(len(own & other) > 1 for other in ends)
    }
    equal: dict[int, list[int]] = {kind: [] for kind in sorted(kinds)}
    for _, tensor in given:
        if tensor.kind in kinds:
            equal[tensor.kind].append(tensor.tensor)
    return [frozenset(own) for own in equal.values()]
