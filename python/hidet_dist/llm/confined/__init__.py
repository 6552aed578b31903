"""Work on data from outside that may take any time or memory, or crash, in a process of its own with bounds of both.

Chat templates are programs, grammars may be too complex to compile, and a tokenizer may make texts of any length of a
short one. Neither Jinja nor llguidance nor tokenizers has bounds that hold for all of them; the operating system has.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from hidet_dist.limits import MOST_CONFINED_BYTES, MOST_CONFINED_SECONDS

MOST_SAID = 1000
"""Characters of an error that a process hands on."""

_LENGTH_BYTES = 8


class ExceededError(Exception):
    """The process ended: what it was given takes more time or memory than it may, or crashed it."""


class Confined:
    """A process that answers one request at a time. It is started by the first request, and again after it ended.

    Parameters
    ----------
    module: str
        What the process runs: a module that calls :func:`answer_requests`.
    """

    def __init__(self, module: str):
        self._module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: a fork of that one must not use its pipes
        self._ending: weakref.finalize[Any, Any] | None = None

    def call(self, request: Mapping[str, Any], seconds: float = MOST_CONFINED_SECONDS, apart: str | None = None) -> Any:
        """Return the answer to a request, both of them values of JSON.

        Parameters
        ----------
        request: mapping
            The request.
        seconds: float
            The processor time that it may take.
        apart: str, optional
            The key of a long text of the request, which is sent as it is: JSON would escape it, which takes longer.

        Raises
        ------
        ExceededError
            When the process ends before it has answered.
        """
        rest = {key: value for key, value in request.items() if key != apart}
        data = json.dumps({"seconds": seconds, "request": rest, "apart": apart}).encode()
        text = b"" if apart is None else request[apart].encode("utf-8", "surrogatepass")
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                _write(process.stdin, data)
                _write(process.stdin, text)
                answer = _read(process.stdout)
            except OSError:
                answer = None
            if answer is None:
                process.kill()
                status = process.wait()
                self._forget()
                raise ExceededError(_why(status, seconds))
        return json.loads(answer)  # noqa: TID251 - written by this package, from a request with bounds

    def start(self) -> None:
        """Start the process, if it does not run, without waiting for it: a first request then waits for less."""
        with self._lock:
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._forget()
            command = [sys.executable, "-m", self._module]
            # In a session of its own, so that a signal of the terminal does not reach it: it ends with its input.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._owner = os.getpid()
            self._ending = weakref.finalize(self, _end, self._process, self._owner)
        return self._process

    def _forget(self) -> None:
        """Let go of a process that ended, or that is another process's, with its pipes."""
        process, self._process = self._process, None
        if self._ending is not None:
            self._ending.detach()
        if process is not None:
            _close(process)


def answer_requests(handle: Callable[[Any], Any]) -> None:
    """Answer requests of the process that started this one, until it closes the pipe, within the bounds.

    The bound of time is one of processor time, and each request has its own. A thread with a stack a fourth of the main
    one's handles them: what is handled here will not overflow the stack there.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MOST_CONFINED_BYTES, MOST_CONFINED_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    threading.stack_size(2**21)
    thread = threading.Thread(target=_answer, args=(handle, sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


def _answer(handle: Callable[[Any], Any], requests: IO[bytes], answers: IO[bytes]) -> None:
    while (request := _read(requests)) is not None and (text := _read(requests)) is not None:
        call = json.loads(request)  # noqa: TID251 - of a caller that has bounds
        if call["apart"] is not None:
            call["request"][call["apart"]] = text.decode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, call["seconds"])  # the process ends when it is over
        answer = json.dumps(handle(call["request"]), ensure_ascii=False).encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, answer)


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    file.write(data)
    file.flush()


def _read(file: IO[bytes]) -> bytes | None:
    """Read what :func:`_write` wrote; None at the end of the file."""
    head = file.read(_LENGTH_BYTES)
    size = int.from_bytes(head, "little")
    data = file.read(size) if len(head) == _LENGTH_BYTES else b""
    return data if len(head) == _LENGTH_BYTES and len(data) == size else None


def _why(status: int, seconds: float) -> str:
    if status == -signal.SIGPROF:
        return f"it takes more than {seconds:g} s of processor time"
    return f"it takes more than {MOST_CONFINED_BYTES} bytes of memory, or is too deeply nested (status {status})"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process. It has nothing to lose, and would take longer to end by itself."""
    if os.getpid() != owner:
        return
    process.kill()
    _close(process)
    process.wait()


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written yet is for a process that is no more
                pipe.close()
