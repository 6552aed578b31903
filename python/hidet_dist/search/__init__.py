"""Search: from a graph and its rules to the plan of least predicted time that fits the memory budget."""

from hidet_dist.search.recost import recost
from hidet_dist.search.search import Found, find, search

__all__ = ["Found", "find", "recost", "search"]
