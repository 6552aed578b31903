"""Which tensors to relax where a graph is too wide to be eliminated, although few operators read each of them.

Tables of cosines that a layer computes for itself have two readers, those of the queries and of the keys. Together with
the scores, which bring queries and keys together again, they make a graph of several heads too wide. Relaxing all
tensors of as many readers would do, but those that carry the activations are among them, and the bound would be far
from any plan. So equal tensors are relaxed, of all layers at once: those whose relaxation leaves an elimination the
least work.
"""

from __future__ import annotations

from hidet_dist.search import tuning
from hidet_dist.search.elimination.instance import EliminationInstance
from hidet_dist.search.elimination.network import TooWide
from hidet_dist.search.elimination.problem_network import network_of


def narrow(instance: EliminationInstance) -> bool:
    """Choose the tensors to relax so that the graph is narrow, once; tell whether it is narrow enough then.

    Without such tensors, none is relaxed.
    """
    problem, relaxation, limit = instance.problem, instance.relaxation, tuning.READERS_LIMITS[0]
    if relaxation.narrowed is not None:
        return False
    kinds: dict[int, list[int]] = {}
    for tensor in problem.equal_parts.tensors:
        if len(tensor.group) > 1:
            kinds.setdefault(tensor.kind, []).append(tensor.tensor)
    chosen = frozenset[int]()
    for _ in range(tuning.NARROWINGS):
        found: tuple[float, float, int] | None = None
        for kind, tensors in kinds.items():
            instance.tables.limits.check()
            relaxation.narrowed = chosen.union(tensors)
            try:
                work, most = network_of(instance, (), limit)[0].least_work()
            except TooWide:
                continue
            if found is None or (work, most) < found[:2]:
                found = work, most, kind
        if found is None:
            break
        chosen = chosen.union(kinds.pop(found[2]))
        if found[1] <= tuning.WORK_LIMIT:
            relaxation.narrowed = chosen
            return True
    relaxation.narrowed = frozenset()
    return False
