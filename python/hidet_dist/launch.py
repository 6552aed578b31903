"""Start a program as several ranks on this host: ``python -m hidet_dist.launch -n 2 script.py [arguments]``.

Each process gets torchrun's variables: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and
a new HIDET_DIST_SECRET, unless there is one, so that only the processes of this run can meet there.

For ranks on several hosts, start it on each host, with the same HIDET_DIST_SECRET in the environment and the number of
the host as --node-rank; --rdzv is an address of host 0 that the others can reach, and a free port there:
``python -m hidet_dist.launch -n 2 --nnodes 2 --node-rank 1 --rdzv 10.0.0.1:29500 script.py``.
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
from dataclasses import dataclass, replace
from types import FrameType

from hidet_dist.runtime.rendezvous import LEAST_SECRET_BYTES, SECRET_VARIABLE

GRACE_SECONDS = 10.0
"""The default seconds that other ranks may run after one has failed, to detect and report it themselves."""

TERMINATE_SECONDS = 5.0
"""Seconds between asking a rank to end and killing it."""

TIMED_OUT = 124
"""The exit status of a run that passed its time limit, as that of timeout(1)."""

_POLL_SECONDS = 0.05
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _parse(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, required=True, help="the number of processes on this host")
    parser.add_argument("--master-port", type=int, help="the port at which the ranks meet (default: a free one)")
    parser.add_argument("--nnodes", type=int, metavar="N", default=1, help="the number of hosts (default: 1)")
    parser.add_argument("--node-rank", type=int, metavar="R", help="the number of this host, from 0 to N - 1")
    parser.add_argument(
        "--rdzv", metavar="ADDRESS:PORT", help="the address and port of host 0 at which the ranks of several hosts meet"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="end the run after S seconds, with status 124")
    parser.add_argument(
        "--grace",
        type=float,
        metavar="S",
        default=GRACE_SECONDS,
        help="the seconds that other ranks may run after one has failed (default: %(default)g)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as for python -m")
    parser.add_argument("program", help="a Python script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's arguments")
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"-n must be positive, not {options.ranks}")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        parser.error(f"--master-port must be from 1 to 65535, not {options.master_port}")
    problem = hosts_problem(options.nnodes, options.node_rank, options.rdzv)
    if options.nnodes > 1 and options.master_port is not None:
        problem = "--master-port is for one host; several meet at the address and port of --rdzv"
    if problem:
        parser.error(problem)
    for name in ("timeout", "grace"):
        value = getattr(options, name)
        if value is not None and not value >= 0:
            parser.error(f"--{name} must not be negative, but is {value:g}")
    return options


def hosts_problem(nnodes: int, node_rank: int | None, rdzv: str | None) -> str:
    """Describe an error in the options of several hosts; empty if there is none."""
    if nnodes < 1:
        return f"--nnodes must be positive, not {nnodes}"
    if nnodes == 1:
        if node_rank not in (None, 0):
            return f"--node-rank is {node_rank}, but there is one host: give --nnodes, too"
        return "" if rdzv is None else "--rdzv is for several hosts: give --nnodes and --node-rank, too"
    if node_rank is None or not 0 <= node_rank < nnodes:
        given = "is missing" if node_rank is None else f"is {node_rank}"
        return f"--node-rank {given}: give each of the {nnodes} hosts another one, from 0 to {nnodes - 1}"
    if rdzv is None:
        return "--rdzv is missing: give all hosts the same address and port of host 0, such as 10.0.0.1:29500"
    address, _, port = rdzv.rpartition(":")
    if not address or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        return f"--rdzv must be an address and a port from 1 to 65535, such as 10.0.0.1:29500, not {rdzv!r}"
    if len(os.environ.get(SECRET_VARIABLE, "").encode()) < LEAST_SECRET_BYTES:
        return (
            f"ranks on several hosts must share a secret: set {SECRET_VARIABLE} on all of them to the same "
            f"{LEAST_SECRET_BYTES} random characters or more"
        )
    return ""


@dataclass(frozen=True)
class HostPlace:
    """The range of this host's ranks, and the address at which all ranks meet."""

    count: int  # the number of ranks on this host
    first: int  # the first rank on this host
    world_size: int
    address: str
    port: int


def place_on_host(ranks: int, nnodes: int, node_rank: int | None, rdzv: str | None) -> HostPlace:
    """Return the place of a host with this many ranks, for options without a :func:`hosts_problem`."""
    if nnodes == 1:
        return HostPlace(ranks, 0, ranks, "127.0.0.1", free_port())
    assert rdzv is not None and node_rank is not None
    address, _, port = rdzv.rpartition(":")
    return HostPlace(ranks, node_rank * ranks, nnodes * ranks, address.strip("[]"), int(port))


def _place(options: argparse.Namespace) -> HostPlace:
    place = place_on_host(options.ranks, options.nnodes, options.node_rank, options.rdzv)
    return place if options.master_port is None else replace(place, port=options.master_port)


def environment_of(place: HostPlace, local_rank: int, secret: str) -> dict[str, str]:
    """Return this process's environment with the variables of a rank of this host."""
    env = dict(os.environ)
    env.update(
        RANK=str(place.first + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_WORLD_SIZE=str(place.count),
        MASTER_ADDR=place.address,
        MASTER_PORT=str(place.port),
    )
    # Set under torchrun: ranks would connect to the agent's store.
    env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // place.count)))
    env[SECRET_VARIABLE] = secret
    return env


def free_port() -> int:
    """Find a free TCP port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _RankProcesses:
    """The processes of this host. Each leads a process group, so that its descendants end with it."""

    def __init__(self, command: list[str], place: HostPlace):
        self._first = place.first
        self.processes: list[subprocess.Popen[bytes]] = []
        self.received: int | None = None
        secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
        for local_rank in range(place.count):
            env = environment_of(place, local_rank, secret)
            self.processes.append(subprocess.Popen(command, env=env, start_new_session=True))

    def forward(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to the running ranks."""
        for process in self.processes:
            if process.poll() is None:
                # It may end in between.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes, self._first) if process.poll() is None]

    def failed(self) -> dict[int, int]:
        """Map the failed ranks to their Popen.returncode."""
        return {rank: code for rank, process in enumerate(self.processes, self._first) if (code := process.poll())}

    def end(self) -> None:
        """End the running ranks."""
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
    """Convert a process's return code to an exit status as a shell does."""
    return 128 - returncode if returncode < 0 else returncode


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"


def _wait(ranks: _RankProcesses, timeout: float | None, grace: float, told: int | None) -> int:
    """Wait for all ranks, and return the run's exit status. Ranks that exit with the status ``told`` are not named."""
    deadline = None if timeout is None else time.monotonic() + timeout
    status = 0
    reported: set[int] = set()
    while True:
        # Read before the failures, so that a rank that ends in between is not missed.
        running = ranks.running()
        for rank, returncode in ranks.failed().items():
            if rank in reported:
                continue
            reported.add(rank)
            if returncode != told:
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


def main(
    arguments: Sequence[str] | None = None, prog: str = "python -m hidet_dist.launch", told: int | None = None
) -> int:
    """Run a program as several ranks.

    ``prog`` is the command's name in its usage. ``told`` is an exit status of ranks that have told why they failed, of
    which nothing more is printed.

    Returns the exit status of this host's rank that failed first, as in a shell (128 + n for signal n); 124 if the
    time limit was exceeded; 0 if all ranks succeeded.
    """
    options = _parse(sys.argv[1:] if arguments is None else arguments, prog)
    program = ["-m", options.program] if options.module else [options.program]
    command = [sys.executable, *program, *options.arguments]
    ranks = _RankProcesses(command, _place(options))
    before = {number: signal.signal(number, ranks.forward) for number in _FORWARDED}
    try:
        return _wait(ranks, options.timeout, options.grace, told)
    finally:
        if ranks.running():
            ranks.end()
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
