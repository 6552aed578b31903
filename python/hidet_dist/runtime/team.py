"""The number of threads that run the kernels of steps: fewer than there may be, where other processes want the cores.

The threads of a team meet at the end of each kernel, hundreds of times in a step. Where one of them has to queue for a
core, the others wait for it each time. On two cores beside one busy process, two threads decode at a quarter of the
speed of a single one, which keeps a core for itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from hidet_dist.runtime.threads import most_threads, set_threads

# Of runs, after which the number is decided: what wants a core for a tenth of a second is over by then.
_WINDOW_SECONDS = 0.25
# The share of a run's time for which threads queue for a core, all together. Two threads on two cores queue for 0.05
# to 0.1 of it alone, and for 0.8 and more beside one busy process. They are worth it beside one that is busy at times.
_CROWDED = 0.5
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 1.0, 32.0  # until all threads are tried again


@dataclass(frozen=True)
class ProcessorUse:
    """What a process has had of the cores.

    Attributes
    ----------
    seconds: float
        The time for which its threads ran, all together.
    queued: mapping
        For how many seconds each thread could run and had no core, by the thread's number. It is empty where the system
        does not tell (Linux without ``CONFIG_SCHED_INFO``).
    """

    seconds: float
    queued: Mapping[int, float]

    @staticmethod
    def now() -> ProcessorUse:
        """Read that of this process."""
        queued: dict[int, float] = {}
        with suppress(OSError):
            for thread in os.listdir("/proc/self/task"):
                # A thread may end meanwhile.
                with suppress(OSError, ValueError, IndexError), open(f"/proc/self/task/{thread}/schedstat") as file:
                    queued[int(thread)] = int(file.read().split()[1]) / 1e9
        return ProcessorUse(time.process_time(), queued)

    def queued_since(self, before: ProcessorUse) -> float:
        """Return for how many seconds threads have queued since then, all together."""
        return sum(seconds - before.queued.get(thread, 0.0) for thread, seconds in self.queued.items())


class Team:
    """The threads that run kernels which one thread starts. Only that thread calls this object.

    After each quarter of a second of runs in which threads queued for more than half of the time, the team is cut to as
    many as the process had cores, and by one at least. All threads are tried again after a second, and after twice as
    long each time that the cores are still wanted, up to half a minute.

    Parameters
    ----------
    most: int
        The number of threads there may be.
    set_count: function
        Sets the number of threads of the runs to come.
    usage: function
        Returns what this process has had of the cores.
    clock: function
        Returns seconds.
    """

    def __init__(
        self,
        most: int,
        set_count: Callable[[int], None] = set_threads,
        usage: Callable[[], ProcessorUse] = ProcessorUse.now,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._most = self._count = most
        self._set_count, self._usage, self._clock = set_count, usage, clock
        self._pause = _FIRST_PAUSE_SECONDS
        self._until = 0.0
        self._ran = 0.0
        self._before: ProcessorUse | None = None

    @staticmethod
    def of_this_thread() -> Team:
        """Return the team of the calling thread, of as many threads as OpenMP has for it."""
        return Team(most_threads())

    @property
    def count(self) -> int:
        """The number of threads of the next run, unless it is time to try all."""
        return self._count

    def begin(self) -> float:
        """Return when a run begins, for :meth:`end`."""
        now = self._clock()
        if self._count < self._most and now >= self._until:
            self._change(self._most)
        if self._count > 1 and self._before is None:
            self._before = self._usage()
        return now

    def end(self, begin: float) -> None:
        """Note that a run has ended, and decide how many threads the next one has."""
        if self._count == 1 or self._before is None:
            return
        now = self._clock()
        self._ran += now - begin
        if self._ran < _WINDOW_SECONDS:
            return
        usage, before, ran = self._usage(), self._before, self._ran
        self._before, self._ran = usage, 0.0
        if usage.queued_since(before) > _CROWDED * ran:
            if self._count == self._most:
                self._until = now + self._pause
                self._pause = min(2 * self._pause, _LAST_PAUSE_SECONDS)
            cores = round((usage.seconds - before.seconds) / ran)
            self._change(max(1, min(self._count - 1, cores)))
        elif self._count == self._most:
            self._pause = _FIRST_PAUSE_SECONDS

    def _change(self, count: int) -> None:
        self._count, self._before, self._ran = count, None, 0.0
        self._set_count(count)
