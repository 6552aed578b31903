"""Search: from a graph and its rules to the plan of least predicted time that fits the memory budget."""

from hidet_dist.search.search import search

__all__ = ["search"]
