"""The integer linear program of a problem: its rows, and the solvers HiGHS and CBC."""

from hidet_dist.search.ilp.program import (
    NothingFitsError,
    StoppedError,
    TooLargeError,
    program_bytes,
    solve,
    solve_peak,
)

__all__ = ["NothingFitsError", "StoppedError", "TooLargeError", "program_bytes", "solve", "solve_peak"]
