"""Pairwise problems as arrays, and the cost and memory of an assignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hidet_dist.errors import ProblemError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FORBIDDEN = 1e17
"""The least cost that forbids a strategy, or a pair of strategies. The sum of all allowed costs is below it."""


@dataclass(frozen=True)
class PairwiseProblem:
    """Nodes with strategies, edges with matrices of costs, and a limit on the bytes held at every program point.

    Attributes
    ----------
    strategy_begin: int64 array, nodes + 1
        Strategy s of node v is the entry ``strategy_begin[v] + s`` of ``cost`` and ``nbytes``.
    cost, nbytes: float64 arrays
        The cost and the bytes of each strategy, 0 or more.
    interval: int64 array, nodes x 2
        The program points at which a node holds its bytes: from the first, up to but not including the second.
    edge_nodes: int64 array, edges x 2
        The two nodes of each edge, which differ. Costs of parallel edges add up.
    edge_matrix: int64 array, edges
        The number of each edge's matrix.
    matrix_begin: int64 array
        The index of each matrix's first entry in ``entries``; a row per strategy of the first node, row-major.
    entries: float64 array
        The entries of all matrices, 0 or more.
    byte_limit: float
        The most bytes at every program point; infinite for no limit.

    Raises
    ------
    ProblemError
        When the arrays contradict one another; the message says where.
    """

    strategy_begin: Ints
    cost: Floats
    nbytes: Floats
    interval: Ints
    edge_nodes: Ints
    edge_matrix: Ints
    matrix_begin: Ints
    entries: Floats
    byte_limit: float

    def __post_init__(self) -> None:
        for name, dtype, columns in (
            ("strategy_begin", np.int64, 0),
            ("cost", np.float64, 0),
            ("nbytes", np.float64, 0),
            ("interval", np.int64, 2),
            ("edge_nodes", np.int64, 2),
            ("edge_matrix", np.int64, 0),
            ("matrix_begin", np.int64, 0),
            ("entries", np.float64, 0),
        ):
            array = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            object.__setattr__(self, name, array.reshape(-1, 2) if columns else array.reshape(-1))
        _check(self)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.strategy_begin) - 1

    @property
    def edges(self) -> int:
        """The number of edges."""
        return len(self.edge_nodes)

    @property
    def sizes(self) -> Ints:
        """The number of strategies of each node."""
        return np.diff(self.strategy_begin)

    def cost_of(self, assignment: Sequence[int] | Ints) -> float:
        """Compute the cost of an assignment, one strategy per node; ``FORBIDDEN`` or more if it is not allowed."""
        chosen = self._checked(assignment)
        first, second = self.edge_nodes[:, 0], self.edge_nodes[:, 1]
        places = self.matrix_begin[self.edge_matrix] + chosen[first] * self.sizes[second] + chosen[second]
        return float(self.cost[self.strategy_begin[:-1] + chosen].sum() + self.entries[places].sum())

    def peak_of(self, assignment: Sequence[int] | Ints) -> float:
        """Compute the most bytes that an assignment holds at any program point."""
        chosen = self._checked(assignment)
        alive = self.interval[:, 0] < self.interval[:, 1]
        if not alive.any():
            return 0.0
        nbytes = self.nbytes[self.strategy_begin[:-1] + chosen][alive]
        points, index = np.unique(self.interval[alive], return_inverse=True)
        index = index.reshape(-1, 2)
        changes = np.zeros(len(points))
        np.add.at(changes, index[:, 0], nbytes)
        np.add.at(changes, index[:, 1], -nbytes)
        return float(np.cumsum(changes).max())

    def _checked(self, assignment: Sequence[int] | Ints) -> Ints:
        chosen = np.asarray(assignment, dtype=np.int64).reshape(-1)
        if len(chosen) != self.nodes or (chosen < 0).any() or (chosen >= self.sizes).any():
            raise ProblemError(
                f"An assignment must give each of the {self.nodes} nodes the number of one of its strategies."
            )
        return chosen


def _check(problem: PairwiseProblem) -> None:
    begin = problem.strategy_begin
    if not len(begin) or begin[0] != 0 or begin[-1] != len(problem.cost) or len(problem.nbytes) != len(problem.cost):
        raise ProblemError("There must be a cost and a number of bytes for each strategy of the nodes.")
    for node in np.flatnonzero(np.diff(begin) < 1)[:1]:
        raise ProblemError(f"Node {node} has no strategy.")
    if len(problem.interval) != problem.nodes:
        raise ProblemError(f"There are {problem.nodes} nodes, but {len(problem.interval)} intervals.")
    for what, values in (("cost", problem.cost), ("number of bytes", problem.nbytes)):
        for place in np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[:1]:
            node = int(np.searchsorted(begin, place, side="right")) - 1
            raise ProblemError(f"Strategy {place - begin[node]} of node {node} has the {what} {values[place]}.")
    for edge in np.flatnonzero(((problem.edge_nodes < 0) | (problem.edge_nodes >= problem.nodes)).any(axis=1))[:1]:
        raise ProblemError(f"Edge {edge} joins {problem.edge_nodes[edge].tolist()}, of {problem.nodes} nodes.")
    for edge in np.flatnonzero(problem.edge_nodes[:, 0] == problem.edge_nodes[:, 1])[:1]:
        raise ProblemError(f"Edge {edge} joins node {problem.edge_nodes[edge, 0]} with itself.")
    if len(problem.edge_matrix) != problem.edges:
        raise ProblemError(f"There are {problem.edges} edges, but {len(problem.edge_matrix)} numbers of matrices.")
    if problem.edges:
        if problem.edge_matrix.min() < 0 or problem.edge_matrix.max() >= len(problem.matrix_begin):
            raise ProblemError(f"An edge has a matrix number outside the {len(problem.matrix_begin)} matrices.")
        ends = problem.matrix_begin[problem.edge_matrix] + problem.sizes[problem.edge_nodes].prod(axis=1)
        for edge in np.flatnonzero((problem.matrix_begin[problem.edge_matrix] < 0) | (ends > len(problem.entries)))[:1]:
            raise ProblemError(f"The matrix of edge {edge} lacks entries for some pairs of strategies.")
    for place in np.flatnonzero(~(np.isfinite(problem.entries) & (problem.entries >= 0)))[:1]:
        raise ProblemError(f"Entry {place} of the matrices is {problem.entries[place]}; costs are 0 or more.")
    if not problem.byte_limit >= 0:
        raise ProblemError(f"The limit must be 0 bytes or more; got {problem.byte_limit}.")
    most = _most_allowed(problem)
    if most >= FORBIDDEN:
        raise ProblemError(f"Allowed costs may add up to {most:.3g}; they must stay below {FORBIDDEN:.0e}.")


def _most_allowed(problem: PairwiseProblem) -> float:
    """Sum the greatest allowed cost of each node and of each edge: no allowed assignment costs more."""
    cost = np.where(problem.cost < FORBIDDEN, problem.cost, 0.0)
    most = float(np.maximum.reduceat(cost, problem.strategy_begin[:-1]).sum()) if problem.nodes else 0.0
    if not problem.edges:
        return most
    entries = np.where(problem.entries < FORBIDDEN, problem.entries, 0.0)
    numbers, first, counts = np.unique(problem.edge_matrix, return_index=True, return_counts=True)
    sizes = problem.sizes[problem.edge_nodes[first]].prod(axis=1)
    for number, size, count in zip(numbers, sizes, counts, strict=True):
        begin = problem.matrix_begin[number]
        most += float(entries[begin : begin + size].max()) * int(count)
    return most
