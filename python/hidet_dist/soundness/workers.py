"""Processes that share the units of work: one that ends without a result is a failure of its unit, not of the run."""

from __future__ import annotations

import faulthandler
import multiprocessing
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from hidet_dist.soundness.work import CheckResult

Unit = tuple[Callable[..., CheckResult], str | int, int]
"""A check, the name or number of what it checks, and how many instances or plans."""

_MOST_BYTES = 2**31
"""The memory after which a process is replaced: rules and proofs of the graphs so far stay in caches."""
_KIB = 1024  # in which Linux counts the peak of a process


def results(work: Sequence[Unit], seed: int, jobs: int) -> Iterator[CheckResult]:
    """Do the work in ``jobs`` processes, and yield the results in order.

    One job is this process itself, where a debugger reaches the checks; the run ends with it.
    """
    if jobs == 1:
        yield from (_result(unit, seed) for unit in work)
        return
    local = threading.local()
    started: list[_Worker] = []

    def do(unit: Unit) -> CheckResult:
        worker = getattr(local, "worker", None)
        if worker is None:
            local.worker = worker = _Worker()
            started.append(worker)
        return worker.do(unit, seed)

    with ThreadPoolExecutor(jobs) as threads:
        futures: list[Future[CheckResult]] = [threads.submit(do, unit) for unit in work]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
            for worker in started:
                worker.end()


class _Worker:
    """A process that does units of work, one after the other; another one takes its place when it ends or is large."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def do(self, unit: Unit, seed: int) -> CheckResult:
        """Do a unit. The result of one at which the process ends is a failure that says how it did."""
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((unit, seed))
            result, nbytes = self._pipe.recv()
        except (EOFError, OSError):
            process = self._process
            self.end()
            return _without_result(unit, f"the process ended {_ending(process.exitcode)}")
        if nbytes > _MOST_BYTES:
            self.end()
        assert isinstance(result, CheckResult)
        return result

    def end(self) -> None:
        """End the process; another one is started for the next unit."""
        if self._pipe is not None:
            self._pipe.close()
            self._process.join()
        self._pipe = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=False)
        self._process.start()
        other.close()


def _serve(pipe: Connection) -> None:
    """Do units until the other end is closed. A crash is shown with the stack of each thread."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends, and closes the other end
    while True:
        try:
            unit, seed = pipe.recv()
        except EOFError:
            return
        pipe.send((_result(unit, seed), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB))


def _result(unit: Unit, seed: int) -> CheckResult:
    """Do a unit in this process. The result of a check that raises is a failure with its traceback."""
    check, what, count = unit
    try:
        return check(what, count, seed)
    except Exception:
        return _without_result(unit, f"the check failed.\n{traceback.format_exc()}")


def _without_result(unit: Unit, reason: str) -> CheckResult:
    check, what, _ = unit
    name = f"{getattr(check, 'func', check).__name__}({what!r})"  # of a partial, the function
    return CheckResult(f"{name}: no result", failures=[f"{name}: {reason}"])


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"by {signal.Signals(-status).name}"
    return f"with the exit status {status}"
