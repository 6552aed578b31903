"""Search: from a graph and its rules to the plan of least predicted time that fits the memory budget."""

from hidet_dist.search.family import Family, search_family
from hidet_dist.search.planner import Found, find, search
from hidet_dist.search.recost import recost

__all__ = ["Family", "Found", "find", "recost", "search", "search_family"]
