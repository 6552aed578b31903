"""Pairwise problems with a memory limit: flat arrays in, an assignment and a lower bound out.

Every node takes one strategy. The cost of a node depends on its strategy, that of an edge on the strategies of its two
nodes. At each program point, the bytes of all live nodes must fit a limit. :mod:`hidet_dist.search.pairwise.contest`
reads and writes files of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (google/iopddl), which poses
this problem. :mod:`hidet_dist.search.pairwise.encode` turns the search's own problem into one.
"""

from hidet_dist.search.pairwise.contest import load_problem, save_problem, save_solution
from hidet_dist.search.pairwise.encode import Encoded, encode
from hidet_dist.search.pairwise.problem import PairwiseProblem
from hidet_dist.search.pairwise.solver import Clock, PairwiseSolution, TooManyEntriesError, solve

__all__ = [
    "Clock",
    "Encoded",
    "PairwiseProblem",
    "PairwiseSolution",
    "TooManyEntriesError",
    "encode",
    "load_problem",
    "save_problem",
    "save_solution",
    "solve",
]
