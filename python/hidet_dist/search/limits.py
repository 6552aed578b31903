"""The time and the memory that planning may take."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hidet_dist.errors import SearchLimitWarning, SolverError
from hidet_dist.options.planning import MEMORY_LIMIT_BYTES
from hidet_dist.search import tuning

Clock = Callable[[], float]


class OutOfTimeError(Exception):
    """The time limit was reached; the search catches this and returns the best plan known."""


class Limits:
    """A deadline and a bound on memory that all parts of one search share.

    Parameters
    ----------
    seconds: float, optional
        Seconds from now until the search ends with the best plan known; None for no limit.
    nbytes: int
        Bytes that the tables of eliminations, or the rows and columns of an integer program, may take. Sizes are
        estimated before anything is allocated, so that the limit acts alike on every machine.
    clock: callable
        The time in seconds, from any origin. Tests pass one that they advance by hand; one that jumps to infinity ends
        a search that nobody waits for.

    Attributes
    ----------
    time_reached: whether the time limit has cut something short.
    given_seconds: the time limit of the whole search; ``seconds`` may be a part of it.
    """

    def __init__(
        self, seconds: float | None = None, nbytes: int = MEMORY_LIMIT_BYTES, clock: Clock = time.perf_counter
    ):
        self.seconds = self.given_seconds = seconds
        self.nbytes = nbytes
        self.time_reached = False
        self._clock = clock
        self._begin = clock()
        self._parent: Limits | None = None
        self._is_part = self._judged = False

    def elapsed_seconds(self) -> float:
        """Seconds since the search began."""
        return self._clock() - self._begin

    def seconds_left(self) -> float | None:
        """Seconds until the deadline, 0 or more; None without one."""
        return None if self.seconds is None else max(0.0, self.seconds - self.elapsed_seconds())

    @property
    def has_own_clock(self) -> bool:
        """Whether seconds are those of another clock than the wall's, which is all that some solvers look at."""
        return self._clock is not time.perf_counter

    def expired(self) -> bool:
        """Whether the deadline has passed. If so, sets ``time_reached``: the caller skips work."""
        if self.seconds is None or self.elapsed_seconds() < self.seconds:
            return False
        self.reach()
        return True

    def spent(self, fraction: float) -> bool:
        """Whether this fraction of the time has passed. If so, sets ``time_reached``: the caller takes another way."""
        if self.seconds is None or self.elapsed_seconds() < fraction * self.seconds:
            return False
        self.reach()
        return True

    def check(self) -> None:
        """Raise OutOfTimeError once the deadline has passed."""
        if self.expired():
            raise OutOfTimeError

    def check_pace(self, done: Callable[[], float]) -> None:
        """Give up a part of a search that will by far not end in time: raise OutOfTimeError.

        ``done`` returns the fraction of its work that is done. It is asked once, when some of the time has passed.
        """
        if self._judged or not self._is_part or self.seconds is None:
            return
        elapsed = self.elapsed_seconds()
        if elapsed < tuning.JUDGED_FRACTION * self.seconds:
            return
        self._judged = True
        if elapsed > tuning.HOPELESS * done() * self.seconds:
            self.reach()
            raise OutOfTimeError

    def reach(self) -> None:
        """Set ``time_reached``: the time limit cut something short, so the result depends on the machine's speed."""
        self.time_reached = True
        if self._parent is not None:
            self._parent.reach()

    def part(self, fraction: float) -> Limits:
        """Make the limits of a part of the search that may take this fraction of the remaining time."""
        left = self.seconds_left()
        limits = self._of(None if left is None else fraction * left)
        limits._parent = self
        return limits

    def trial(self, fraction: float) -> Limits:
        """Make the limits of a part that others follow whether it ends in time or not.

        To reach them cuts nothing. The part ends when this fraction of the whole time has passed, which may be above 1.
        """
        return self._of(None if self.seconds is None else max(0.0, fraction * self.seconds - self.elapsed_seconds()))

    def _of(self, seconds: float | None) -> Limits:
        limits = Limits(seconds, self.nbytes, self._clock)
        limits._is_part, limits.given_seconds = True, self.given_seconds
        return limits


@contextmanager
def limits_as_errors(limits: Limits) -> Iterator[None]:
    """Turn a time limit reached without a plan, and a lack of memory, into SolverError."""
    try:
        yield
    except OutOfTimeError:
        raise SolverError(
            f"No plan was found within the time limit of {limits.given_seconds} s. Allow more time "
            "(solver_time_limit_seconds), pin specs, or derive the plan from pins (mode 'propagate')."
        ) from None
    except MemoryError as error:
        raise SolverError(
            f"Planning ran out of memory. It may take {limits.nbytes} bytes; allow less (solver_memory_limit_bytes), "
            "so that the graph is planned by coarser means."
        ) from error


def warn_of_limit(limits: Limits, gap: float) -> None:
    """Issue a SearchLimitWarning at the caller's caller if the time limit was reached; ``gap`` is the plan's."""
    if limits.time_reached:
        warnings.warn(
            f"Planning reached its time limit of {limits.given_seconds} s. The plan is the best one until then, the "
            f"gap to the lower bound is {gap:.2%}, and another run may find another plan.",
            SearchLimitWarning,
            stacklevel=3,
        )
