"""Solving a pairwise problem with the native library."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from hidet_dist.errors import ConfigError, InfeasibleError, SolverError
from hidet_dist.native.search.library import last_error, library
from hidet_dist.native.search.signatures import (
    NativePairwiseProblem,
    PairwiseOptions,
    PairwiseProgress,
    PairwiseResult,
)
from hidet_dist.search.pairwise.problem import FORBIDDEN, Ints, PairwiseProblem

# The statuses of the native function.
_SOLVED, _OUT_OF_TIME, _INFEASIBLE, _NOTHING_FITS, _TOO_LARGE = 0, 1, 2, 3, 4
_UNLIMITED_BYTES = 2.0**62

Clock = Literal["wall", "cpu"]


class TooManyEntriesError(SolverError):
    """The matrices of a problem have more entries than were allowed."""


@dataclass(frozen=True)
class PairwiseSolution:
    """An assignment, its cost, and a lower bound of the cost of every assignment.

    Attributes
    ----------
    assignment: a strategy for each node.
    cost: its cost, exact but for the rounding of sums.
    bound: no assignment within the limit costs less.
    seconds: the elapsed time.
    rounds: the number of rounds of the search.
    """

    assignment: Ints
    cost: float
    bound: float
    seconds: float
    rounds: int

    @property
    def gap(self) -> float:
        """(cost - bound) / cost, the most that a better assignment could save; 0 for a cost of 0."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


def solve(
    problem: PairwiseProblem,
    seconds: float | None = None,
    *,
    rounds: int | None = None,
    gap: float = 1e-9,
    seed: int = 0,
    threads: int = 1,
    clock: Clock = "wall",
    entries: int = 0,
    on_incumbent: Callable[[float, float, float], bool | None] | None = None,
) -> PairwiseSolution:
    """Find an assignment of low cost within the limit, and a lower bound.

    Nodes whose strategies follow from a neighbour's are merged into it. Memory is priced at every program point.
    Messages between nodes and edges bound the priced problem (TRW-S; V. Kolmogorov, PAMI 28(10), 2006), and prices
    follow the excess of memory. Induced forests of the graph are solved exactly, for priced costs at first, then within
    the limit. With ``rounds`` alone, the result depends only on the arguments; with ``seconds`` it depends on the
    machine.

    Parameters
    ----------
    problem: PairwiseProblem
        The problem.
    seconds, rounds: float, int
        When to stop; at least one of them.
    gap: float
        Stop once (cost - bound) / cost is at most this.
    seed: int
        The seed of random choices.
    threads: int
        1, or 2 to bound and search at the same time.
    clock: str
        What ``seconds`` are: of the clock on the wall, or of this process's CPU time, divided by the threads ("cpu"),
        which does not depend on what else the machine does.
    entries: int
        How many entries of 8 bytes the matrices may have while the problem is reduced, which merges nodes and
        eliminates others as far as that fits; 0 for any number.
    on_incumbent: callable, optional
        Called as ``(seconds, cost, bound)`` at the first assignment and after each round; the cost is infinite as long
        as there is no assignment. If it returns True, the search ends with the best assignment so far. An exception
        from it ends the search and is raised again.

    Raises
    ------
    ConfigError
        When no limit, or an unfit one, threads or a clock is given.
    InfeasibleError
        When the forbidden pairs leave no assignment.
    TooManyEntriesError
        When the problem has more ``entries`` than may be.
    SolverError
        When no assignment within the limit exists, or was found in time.
    """
    if seconds is None and rounds is None:
        raise ConfigError("Say when to stop: seconds, rounds, or both.")
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        raise ConfigError(f"seconds must be above 0; got {seconds!r}.")
    if rounds is not None and rounds < 1:
        raise ConfigError(f"rounds must be 1 or more; got {rounds!r}.")
    if threads not in (1, 2):
        raise ConfigError(f"threads must be 1 or 2; got {threads!r}.")
    if clock not in get_args(Clock):
        raise ConfigError(f"clock must be one of {', '.join(get_args(Clock))}; got {clock!r}.")
    raised: list[BaseException] = []

    def progress(_context: int | None, elapsed: float, cost: float, bound: float) -> int:
        try:
            return int(bool(on_incumbent and on_incumbent(elapsed, cost if cost < FORBIDDEN else math.inf, bound)))
        except BaseException as error:
            raised.append(error)
            return 1

    def pointer(array: np.ndarray) -> ctypes.Array | ctypes._Pointer:
        kind = ctypes.c_int64 if array.dtype == np.int64 else ctypes.c_double
        return array.ctypes.data_as(ctypes.POINTER(kind))

    begin, end = (np.ascontiguousarray(problem.interval[:, side]) for side in (0, 1))
    arrays = (problem.edge_nodes, problem.edge_matrix, problem.matrix_begin, problem.entries)
    native = NativePairwiseProblem(
        problem.nodes,
        problem.edges,
        *map(pointer, (problem.strategy_begin, problem.cost, problem.nbytes, begin, end, *arrays)),
        min(problem.byte_limit, _UNLIMITED_BYTES),
        FORBIDDEN,
    )
    options = PairwiseOptions(seconds or 0.0, gap, rounds or 0, seed, threads, int(clock == "cpu"), entries)
    assignment, result = np.zeros(problem.nodes, dtype=np.int32), PairwiseResult()
    status = library().hidet_dist_pairwise_solve(
        ctypes.byref(native),
        ctypes.byref(options),
        PairwiseProgress(progress),
        None,
        assignment.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
        ctypes.byref(result),
    )
    if raised:
        raise raised[0]
    if status == _INFEASIBLE:
        raise InfeasibleError("The forbidden pairs of strategies leave no assignment, whatever the limit of bytes.", 0)
    if status == _TOO_LARGE:
        raise TooManyEntriesError(f"The problem is too large for {entries} entries: {last_error()}.")
    if status == _NOTHING_FITS:
        raise SolverError(f"No assignment fits within {problem.byte_limit:.0f} bytes. Allow more bytes.")
    if status == _OUT_OF_TIME:
        raise SolverError(
            f"No assignment within {problem.byte_limit:.0f} bytes was found in {result.seconds:.1f} s and "
            f"{result.rounds} rounds; none costs less than {result.bound:.6g}. Allow more time, or more bytes."
        )
    if status != _SOLVED:
        raise SolverError(f"The solver refused the problem: {last_error()}.")
    strategies = assignment.astype(np.int64)
    return PairwiseSolution(strategies, problem.cost_of(strategies), result.bound, result.seconds, int(result.rounds))
