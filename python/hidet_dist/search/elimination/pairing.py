"""How relaxed tensors are shared: from each spec that the producer may make, where that leaves the graph narrow enough.

Where queries, keys and values have one input, all of them read what its producer makes. The tensor's table over all
four may be too large. Pairs of the producer and one reader are small, and bound the cost from each spec of the
producer: the network then has the producer beside its readers, as far as the last of them. That is near for queries,
keys and values, and far for a mask that all layers read, which is shared from the least of all specs instead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from hidet_dist.search import tuning
from hidet_dist.search.elimination.network import Tables
from hidet_dist.search.elimination.problem_network import network_of
from hidet_dist.search.problem import Problem
from hidet_dist.search.problem.prices import Prices


def readers_in_pairs(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, exact: Collection[int], limit: int
) -> int:
    """Choose up to how many readers share conversions from each spec; once for a problem that has relaxed tensors."""
    sharing = problem.sharing
    if sharing.paired is not None:
        return sharing.paired
    alone, relaxed = network_of(problem, kept, tables, prices, exact, limit)
    if not relaxed:
        return 0
    work, most = alone.least_work()
    enough = max(tuning.PAIRED_WORK, tuning.PAIRED_FACTOR * work if most <= tuning.WORK_LIMIT else math.inf)
    sharing.paired = 0
    for readers in sorted({len(problem.groups[tensor]) for tensor in relaxed}, reverse=True):
        tables.limits.check()
        paired, _ = network_of(problem, kept, tables, prices, exact, limit, readers)
        work, most = paired.least_work()
        if most <= tuning.WORK_LIMIT and work <= enough:
            sharing.paired = readers
            break
    return sharing.paired
