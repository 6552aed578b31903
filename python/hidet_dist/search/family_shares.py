"""The search for the shares of a mesh's first axis for several graphs that share weights, on unequal devices."""

from __future__ import annotations

from collections.abc import Sequence

from hidet_dist.machine import Cluster
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search.family import Family, FamilyMember, search_family
from hidet_dist.search.limits import Limits
from hidet_dist.search.options import SearchOptions
from hidet_dist.search.planner import warn_of_limit
from hidet_dist.search.shares import DividedGraph, best_of_shares
from hidet_dist.view import graph_symbols


def search_family_shares(
    members: Sequence[FamilyMember], cluster: Cluster, options: SearchOptions, rules: RuleTable | None = None
) -> Family:
    """Find the family of least weighted time for the even mesh and for the proposed shares of its first axis.

    Raises and warns as :func:`hidet_dist.search.search_family` does. A mesh for which there are no plans within the
    budget or the limits is left out, unless that is so for all.
    """
    limits = options.limits()
    divided = []
    for member in members:
        declared = options.symbols if member.symbols is None else member.symbols
        symbols = {name: declared[name] for name in graph_symbols(member.graph) if name in declared}
        divided.append(DividedGraph(member.graph, symbols, member.frequency))

    def search_on(on: Cluster, part: Limits) -> Family:
        return search_family(members, on, options, rules=rules, limits=part)

    best = best_of_shares(divided, cluster, options, limits, rules, search_on, lambda family: family.seconds)
    warn_of_limit(limits, best.gap)
    return best
