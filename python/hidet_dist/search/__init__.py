"""Search: from graphs and their rules to the plans of least predicted time that fit the memory budget."""

from hidet_dist.search.options import SearchOptions
from hidet_dist.search.planner import search
from hidet_dist.search.recost import recost_stage
from hidet_dist.search.request import FamilyMember
from hidet_dist.search.result import SearchResult

__all__ = ["FamilyMember", "SearchOptions", "SearchResult", "recost_stage", "search"]
