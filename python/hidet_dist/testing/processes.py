"""Running of programs with a time limit, each in a process group that is killed when the program ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

TERMINATE_SECONDS = 12.0
"""Seconds between asking a program to end and killing it, in which ``hidet_dist.launch`` ends its ranks."""


@dataclass(frozen=True)
class Completed:
    """The outcome of a program.

    Attributes
    ----------
    status: the exit status, below 0 for a signal; None if the program was ended at its time limit.
    output, errors: the text on stdout and stderr.
    seconds: the elapsed time.
    """

    status: int | None
    output: str
    errors: str
    seconds: float


class Programs:
    """Programs that several threads run at the same time, each program in a separate process group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._ended = False

    def run(
        self, command: Sequence[str], seconds: float, niceness: int = 0, environment: Mapping[str, str] | None = None
    ) -> Completed:
        """Run a program for at most ``seconds``; the rest of its process group is killed when it ends.

        ``niceness`` is added to that of this process; ``environment`` replaces its environment. At the time limit the
        program gets SIGTERM, and has :data:`TERMINATE_SECONDS` to end programs that it started in other groups. After
        :meth:`end` no program is started.
        """
        # Files are used, because a pipe stays open as long as any descendant has it open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            begin = time.monotonic()
            with self._lock:
                if self._ended:
                    return Completed(None, "", "not started", 0.0)
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=environment,
                    start_new_session=True,
                )
                self._running.add(process.pid)
                if niceness:
                    with suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
            status: int | None = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(max(0.0, seconds))
            finally:
                if status is None:  # at the time limit, or where this thread is interrupted
                    _signal(process.pid, signal.SIGCONT, signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(TERMINATE_SECONDS)
                _signal(process.pid, signal.SIGKILL)
                process.wait()
                with self._lock:
                    self._running.discard(process.pid)
            took = time.monotonic() - begin
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return Completed(status, texts[0], texts[1], took)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend all programs while the block runs, and start none."""
        with self._lock:
            try:
                for group in self._running:
                    _signal(group, signal.SIGSTOP)
                yield
            finally:
                for group in self._running:
                    _signal(group, signal.SIGCONT)

    def end(self) -> None:
        """Kill all programs, and start none from now on."""
        self._ended = True
        for group in list(self._running):
            _signal(group, signal.SIGCONT, signal.SIGTERM)


def exit_on_sigterm() -> None:
    """Have SIGTERM raise SystemExit in the main thread, so that ``finally`` clauses end the programs in progress."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _signal(group: int, *numbers: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        for number in numbers:
            os.killpg(group, number)
