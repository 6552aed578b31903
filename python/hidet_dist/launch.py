"""Start a program as several ranks on this machine: ``python -m hidet_dist.launch -n 2 script.py [arguments]``.

Each process gets torchrun's variables: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and
a new HIDET_DIST_SECRET, unless there is one, so that only the processes of this run can meet there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

GRACE_SECONDS = 10.0
"""How long ranks may go on, by default, once another has failed: to find out and say so themselves."""

TERMINATE_SECONDS = 5.0
"""How long a rank that was told to end may take before it is killed."""

TIMED_OUT = 124
"""The exit status of a run that passed its time limit, as that of timeout(1)."""

_POLL_SECONDS = 0.05
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _parse(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, required=True, help="how many processes to start")
    parser.add_argument("--master-port", type=int, help="the port that the ranks meet at (default: a free one)")
    parser.add_argument("--timeout", type=float, metavar="S", help="end the run after S seconds, with status 124")
    parser.add_argument(
        "--grace",
        type=float,
        metavar="S",
        default=GRACE_SECONDS,
        help="how long the other ranks may go on once one has failed (default: %(default)g)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as for python -m")
    parser.add_argument("program", help="a Python script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program gets")
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"-n must be positive, not {options.ranks}")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        parser.error(f"--master-port must be from 1 to 65535, not {options.master_port}")
    for name in ("timeout", "grace"):
        value = getattr(options, name)
        if value is not None and not value >= 0:
            parser.error(f"--{name} must not be negative, but is {value:g}")
    return options


def free_port() -> int:
    """A TCP port on loopback that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Ranks:
    """The processes of a run. Each leads a process group, so that what it starts can be ended with it."""

    def __init__(self, command: list[str], count: int, port: int):
        self.processes: list[subprocess.Popen[bytes]] = []
        self.received: int | None = None
        secret = secrets.token_hex(32)
        threads = str(max(1, (os.cpu_count() or 1) // count))
        for rank in range(count):
            env = dict(os.environ)
            env.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(count),
                LOCAL_WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            # From a run under torchrun, this would send the ranks to the agent's store.
            env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            env.setdefault("OMP_NUM_THREADS", threads)
            env["HIDET_DIST_SECRET"] = env.get("HIDET_DIST_SECRET") or secret
            self.processes.append(subprocess.Popen(command, env=env, start_new_session=True))

    def forward(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        self.send(number)

    def send(self, number: int) -> None:
        """Sends a signal to the ranks that are still running."""
        for process in self.processes:
            if process.poll() is None:
                # It may end in between.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def failed(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll()]

    def end(self) -> None:
        """Ends those still running."""
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def _say(message: str) -> None:
    print(f"hidet_dist.launch: {message}", file=sys.stderr, flush=True)


def _status(returncode: int) -> int:
    """A process's exit status as a shell gives it."""
    return 128 - returncode if returncode < 0 else returncode


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"


def _wait(ranks: _Ranks, timeout: float | None, grace: float) -> int:
    """Waits for all ranks, and returns the run's exit status."""
    deadline = None if timeout is None else time.monotonic() + timeout
    status = 0
    reported: set[int] = set()
    while True:
        # Looked at before the failures, so that a rank that ends in between is not missed.
        running = ranks.running()
        for rank in ranks.failed():
            if rank in reported:
                continue
            reported.add(rank)
            returncode = ranks.processes[rank].returncode
            _say(f"rank {rank} {_describe(returncode)}")
            if status == 0:
                status = _status(returncode)
                deadline = _earlier(deadline, time.monotonic() + grace)
        if not running:
            return status
        if ranks.received is not None and status == 0:
            status = 128 + ranks.received
            deadline = _earlier(deadline, time.monotonic() + grace)
        if deadline is not None and time.monotonic() > deadline:
            if status == 0:
                status = TIMED_OUT
                _say(f"the time limit of {timeout:g} s is over")
            _say(f"ending rank{'s' if len(running) > 1 else ''} {', '.join(map(str, running))}")
            ranks.end()
            return status
        time.sleep(_POLL_SECONDS)


def _earlier(deadline: float | None, other: float) -> float:
    return other if deadline is None else min(deadline, other)


def main(arguments: Sequence[str] | None = None, prog: str = "python -m hidet_dist.launch") -> int:
    """Run a program as several ranks. ``prog`` is the command's name in its usage.

    Returns the exit status of the rank that failed first, as a shell gives it (128 + n for signal n); 124 where the
    time limit was passed; 0 where all went well.
    """
    options = _parse(sys.argv[1:] if arguments is None else arguments, prog)
    program = ["-m", options.program] if options.module else [options.program]
    command = [sys.executable, *program, *options.arguments]
    ranks = _Ranks(command, options.ranks, options.master_port or free_port())
    before = {number: signal.signal(number, ranks.forward) for number in _FORWARDED}
    try:
        return _wait(ranks, options.timeout, options.grace)
    finally:
        if ranks.running():
            ranks.end()
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
