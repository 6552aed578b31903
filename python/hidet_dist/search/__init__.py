"""Search: from a graph and its rules to the plan of least predicted time that fits the memory budget."""

from hidet_dist.search.family import Family, FamilyMember, search_family
from hidet_dist.search.options import SearchOptions
from hidet_dist.search.planner import SearchResult, find_plan, search
from hidet_dist.search.recost import recost_stage
from hidet_dist.search.shares import search_shares

__all__ = [
    "Family",
    "FamilyMember",
    "SearchOptions",
    "SearchResult",
    "find_plan",
    "recost_stage",
    "search",
    "search_family",
    "search_shares",
]
