"""Programs that are run with a time limit and end with all that they started, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

TERMINATE_SECONDS = 12.0
"""How long a program that was told to end may take before it is killed: ``hidet_dist.launch`` ends its ranks in it."""


@dataclass(frozen=True)
class Done:
    """What became of a program.

    Attributes
    ----------
    status: its exit status, below 0 for a signal; None where it was ended because its time was over.
    output, errors: what it printed.
    seconds: how long it ran.
    """

    status: int | None
    output: str
    errors: str
    seconds: float


class Programs:
    """Programs that run at the same time, each in a process group of its own, on behalf of several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._ended = False

    def run(self, command: Sequence[str], seconds: float, niceness: int = 0) -> Done:
        """Run a program for at most so long; what is left of its group is killed when it ends.

        ``niceness`` is added to that of this process. After :meth:`end` nothing is started.
        """
        # Files, since a pipe stays open for as long as any process that was started has it.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            begin = time.monotonic()
            with self._lock:
                if self._ended:
                    return Done(None, "", "not started", 0.0)
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
                )
                self._running.add(process.pid)
                if niceness:
                    with suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
            status: int | None = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(max(0.0, seconds))
                if status is None:
                    _signal(process.pid, signal.SIGCONT, signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(TERMINATE_SECONDS)
            finally:
                _signal(process.pid, signal.SIGKILL)
                process.wait()
                with self._lock:
                    self._running.discard(process.pid)
            took = time.monotonic() - begin
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return Done(status, texts[0], texts[1], took)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have all of them stand still while the block runs, and none begin."""
        with self._lock:
            try:
                for group in self._running:
                    _signal(group, signal.SIGSTOP)
                yield
            finally:
                for group in self._running:
                    _signal(group, signal.SIGCONT)

    def end(self) -> None:
        """Kill all of them, and start none from now on."""
        self._ended = True
        for group in list(self._running):
            _signal(group, signal.SIGCONT, signal.SIGTERM)


def _signal(group: int, *numbers: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        for number in numbers:
            os.killpg(group, number)
