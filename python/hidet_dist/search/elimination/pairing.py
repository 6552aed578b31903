"""How costs of relaxed tensors are split: from each spec that the producer may make, where the graph stays narrow.

Where queries, keys and values have one input, all of them read what its producer makes. The tensor's table over all
four may be too large. Pairs of the producer and one reader are small, and bound the cost from each spec of the
producer: the network then has the producer beside its readers, as far as the last of them. That is near for queries,
keys and values, and far for a mask that all layers read, which is split from the least of all specs instead.
"""

from __future__ import annotations

from collections.abc import Collection

from hidet_dist.search import tuning
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.problem_network import network_of


def readers_in_pairs(instance: EliminationInstance, exact: Collection[int], limit: int) -> int:
    """Choose up to how many readers split conversions from each spec, in little work; once for a problem."""
    relaxation = instance.relaxation
    if relaxation.paired is None:
        network, relaxed = network_of(instance, exact, limit)
        if not relaxed:
            return 0
        work, _ = network.least_work()
        enough = max(tuning.PAIRED_WORK, tuning.PAIRED_FACTOR * work)
        relaxation.paired = _most_readers(instance, limit, relaxed, 0, enough)
    return relaxation.paired


def pair_more(instance: EliminationInstance, limit: int, relaxed: Collection[int]) -> bool:
    """Let more readers split conversions from each spec, in more work; tell whether any do. At most once a problem."""
    relaxation = instance.relaxation
    if relaxation.wide or relaxation.paired is None:
        return False
    relaxation.wide, before = True, relaxation.paired
    relaxation.paired = _most_readers(instance, limit, relaxed, before, tuning.PAIRED_MOST)
    return relaxation.paired > before


def _most_readers(
    instance: EliminationInstance, limit: int, relaxed: Collection[int], least: int, most_work: float
) -> int:
    """Find the most readers with which an elimination has so little work; ``least`` if there are none."""
    best = least
    # More readers in pairs only add tables, and so work.
    for readers in sorted({len(instance.problem.groups[tensor]) for tensor in relaxed}):
        if readers <= least:
            continue
        instance.tables.limits.check()
        work, most = network_of(instance, (), limit, readers)[0].least_work()
        if most > tuning.WORK_LIMIT or work > most_work:
            break
        best = readers
    return best
