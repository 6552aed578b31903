"""The pairwise solver as a solver of the search's own problems: for graphs that are too wide for elimination."""

from __future__ import annotations

from hidet_dist.errors import SolverError
from hidet_dist.search import tuning
from hidet_dist.search.ilp import StoppedError, TooLargeError
from hidet_dist.search.options import SolveOptions
from hidet_dist.search.pairwise import TooManyEntriesError, encode
from hidet_dist.search.pairwise import solve as solve_pairwise
from hidet_dist.search.problem import Problem, Solution, evaluate

_BYTES_PER_ENTRY = 32  # of a matrix, in both forms of the problem and while it is reduced


def solve(problem: Problem, options: SolveOptions | None = None, rounds: int = tuning.WIDE_ROUNDS) -> Solution:
    """Find a plan that fits, and a lower bound, in time linear in the sizes of the tables.

    The result depends on the arguments only, unless the time limit is reached. The gap is mostly larger than that of
    elimination.

    Raises
    ------
    StoppedError
        When no plan that fits was found; it has the lower bound.
    TooLargeError
        When the encoded problem would take more memory than the limits allow.
    """
    options = SolveOptions() if options is None else options
    limits = options.limits
    limits.check()
    encoded = encode(problem)
    most = limits.nbytes // _BYTES_PER_ENTRY - len(encoded.problem.cost)
    needed = _BYTES_PER_ENTRY * (len(encoded.problem.entries) + len(encoded.problem.cost))
    if len(encoded.problem.entries) > most:
        raise TooLargeError(f"The pairwise problem would take about {needed} bytes, and may take {limits.nbytes}.")
    bound = 0.0

    def show(_elapsed: float, _cost: float, least: float) -> bool:
        nonlocal bound
        bound = least * encoded.unit_seconds
        return limits.expired()

    try:
        solution = solve_pairwise(
            encoded.problem,
            limits.seconds_left() or None,
            rounds=rounds,
            gap=options.solver_gap,
            entries=most,
            on_incumbent=show,
        )
    except TooManyEntriesError as error:
        raise TooLargeError(f"{error} They may take {limits.nbytes} bytes.", bound) from error
    except SolverError as error:
        limits.expired()  # sets time_reached, if that is the reason
        raise StoppedError(str(error), bound) from error
    choices = encoded.choices(solution.assignment)
    seconds = evaluate(problem, choices)
    least = min(solution.bound * encoded.unit_seconds, seconds)
    return Solution(choices, seconds, 1 - least / seconds if seconds else 0.0)
