"""Ranks that are forked from a process which has imported what they import: that takes half a second of CPU time each.

A rank forked so is a child of the process that asked for it, as one started by ``subprocess`` is. Its environment is
its own, except for what libraries read when they are imported. The programs of such ranks are files that, given the
number of a socket as their only argument, call :func:`await_fork` behind their imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
POLL_SECONDS = 0.005


class ForkedProcess:
    """A child of this process, as far as tests need what ``subprocess.Popen`` offers."""

    def __init__(self, pid: int, stdin: BinaryIO, stdout: BinaryIO):
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None

    def _ended(self, options: int) -> bool:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode is not None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code; raises ``subprocess.TimeoutExpired``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended(0 if deadline is None else os.WNOHANG):
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it is known to have ended."""
        if not self._ended(os.WNOHANG):
            os.kill(self.pid, number)


class Forks:
    """A process that has imported what a program does, and forks ranks from there on."""

    def __init__(self, program: Path, environment: dict[str, str]):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(program), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self._socket = ours

    def fork(
        self, environment: dict[str, str], arguments: Sequence[str] = (), errors: int | None = None
    ) -> ForkedProcess:
        """Fork a rank with this environment and these arguments.

        Its standard input and output are pipes to this process; what it says of errors goes to a file by its number.
        """
        their_input, our_input = os.pipe()
        our_output, their_output = os.pipe()
        given = [their_input, their_output] if errors is None else [their_input, their_output, errors]
        with _reaping_orphans():
            socket.send_fds(self._socket, [json.dumps([environment, list(arguments)]).encode()], given)
            pid = int(self._socket.recv(64))
        os.close(their_input)
        os.close(their_output)
        return ForkedProcess(pid, os.fdopen(our_input, "wb"), os.fdopen(our_output, "rb"))

    def end(self) -> None:
        """End it; ranks go on."""
        self._socket.close()
        self._process.wait()


@contextlib.contextmanager
def _reaping_orphans() -> Iterator[None]:
    """Meanwhile, make children of this process of those whose parents end among its descendants."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        prctl(CHILD_SUBREAPER, 0, 0, 0, 0)


def await_fork(descriptor: int) -> None:
    """In the process that imports: fork ranks for whoever is at the other end; returns in each rank, set up as one.

    The process ends with its last user. A rank leads a session of its own, by which it and what it forks are found.
    """
    requests = socket.socket(fileno=descriptor)
    gc.freeze()  # what a collection does not look at stays shared
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        if not request:
            sys.exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            rank = os.fork()
            if rank == 0:
                break
            os.write(writer, str(rank).encode())
            os._exit(0)
        for each in (writer, *descriptors):
            os.close(each)
        os.waitpid(between, 0)  # the rank has its other parent from now on
        requests.send(os.read(reader, 64))
        os.close(reader)
    for each in (reader, writer, requests.detach()):
        os.close(each)
    os.setsid()
    for target, source in enumerate(descriptors):
        os.dup2(source, target)
        os.close(source)
    environment, sys.argv[1:] = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
