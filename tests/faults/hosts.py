"""Hosts for tests: network namespaces joined by a bridge in another one, each with a process table of its own.

Nothing goes through the network of the machine itself, and everything goes with the tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PORT = 29500
SECRET = "of these tests only"


class NoHostsError(Exception):
    """The system does not let a test make namespaces; says why."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHostsError(f"{' '.join(command)}: {done.stderr.strip()}")


class Host:
    """A network namespace, and what runs in it."""

    def __init__(self, name: str, number: int):
        self.name = name
        self.number = number
        self.address = f"10.77.0.{number + 1}"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Run a command there, in a process table of its own: with the command, all that it started ends."""
        held = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        base = {name: value for name, value in os.environ.items() if name not in held}
        base |= {"HIDET_DIST_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        isolated = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *isolated, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**base, **(environment or {})},
        )
        self.processes.append(process)
        return process

    def launch(self, hosts: Sequence[Host], ranks: int, *program: str) -> subprocess.Popen[str]:
        """Start its ranks with the project's launcher; they meet on the first host."""
        where = ["--nnodes", str(len(hosts)), "--node-rank", str(self.number), "--rdzv", f"{hosts[0].address}:{PORT}"]
        return self.start(sys.executable, "-m", "hidet_dist.launch", "-n", str(ranks), *where, *program)

    def torchrun(self, hosts: Sequence[Host], ranks: int, *program: str) -> subprocess.Popen[str]:
        """Start its ranks with torchrun."""
        where = ["--nnodes", str(len(hosts)), "--node-rank", str(self.number), "--nproc-per-node", str(ranks)]
        where += ["--master-addr", hosts[0].address, "--master-port", str(PORT)]
        # Gloo and torchrun's agents look for the host by its name otherwise, which nobody knows.
        extra = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_ADDR2LINE": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", *where, "--local-addr", self.address, *program]
        return self.start(*command, environment=extra)

    def cut_off(self) -> None:
        """Take its link down: packets are lost, and no connection is closed."""
        _run("ip", "-n", self.name, "link", "set", "eth0", "down")

    def slow_down(self, *discipline: str) -> None:
        """Give its link a queueing discipline of tc(8)."""
        _run("ip", "netns", "exec", self.name, "tc", "qdisc", "replace", "dev", "eth0", "root", *discipline)

    def kill(self) -> None:
        """End everything that runs there, at once."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)


@contextmanager
def connected(count: int) -> Iterator[list[Host]]:
    """So many hosts that reach each other. Raises ``NoHostsError`` where namespaces are not permitted."""
    run = uuid.uuid4().hex[:8]
    switch = f"hidet-{run}-switch"
    hosts = [Host(f"hidet-{run}-{number}", number) for number in range(count)]
    if sys.platform != "linux" or not Path("/proc/self/ns/net").exists():
        raise NoHostsError("there are no network namespaces")
    with ExitStack() as undo:
        for name in (switch, *(host.name for host in hosts)):
            try:
                _run("ip", "netns", "add", name)
            except FileNotFoundError as error:
                raise NoHostsError("the ip command of iproute2 is missing") from error
            undo.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True, check=False)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for host in hosts:
            port = f"port{host.number}"
            pair = ["link", "add", "eth0", "netns", host.name, "type", "veth", "peer", "name", port, "netns", switch]
            _run("ip", *pair)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _run("ip", "-n", host.name, "link", "set", "eth0", "up")
        _run("ip", "netns", "exec", hosts[0].name, "unshare", "--pid", "--fork", "--mount-proc", "true")
        try:
            yield hosts
        finally:
            for host in hosts:
                host.kill()
            for process in (process for host in hosts for process in host.processes):
                process.communicate()
