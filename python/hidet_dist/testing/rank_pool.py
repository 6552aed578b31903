"""A pool of processes, one per rank, that load artifacts and run them on request, one request after the other.

To start two processes takes longer than most of what tests and benchmarks have them compute. The processes meet the
caller at a Unix socket in a temporary folder, over which requests and answers pass as lines of JSON; arrays pass as
files.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hidet_dist.files import parse_json
from hidet_dist.runtime.partition import load_partition

END_SECONDS = 12.0
"""Seconds that the processes have to end by themselves; ``hidet_dist.launch`` takes up to 5 to end its ranks."""

_POLL_SECONDS = 0.5  # between two looks at whether the processes still run while they start
_MOST_PRINTED = 600  # characters of what the processes printed, in an error's message


class RankPool:
    """Processes of all ranks, started at the first request and again after a failed one. Use it as a context manager.

    Parameters
    ----------
    size: int
        The number of ranks.
    seconds: float
        The time limit of a request, in seconds, the start of the processes included.
    """

    def __init__(self, size: int, seconds: float):
        self.size, self.seconds = size, seconds
        self._running: _Running | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, artifacts: Path, inputs: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Load artifacts on all ranks and run them once.

        Parameters
        ----------
        artifacts: Path
            The artifact folder.
        inputs: sequence of sequences of np.ndarray
            Each rank's shards of the inputs.

        Returns
        -------
        Each rank's shards of the outputs.

        Raises
        ------
        RuntimeError
            When a rank fails or ends, with its error; or the time limit is exceeded.
        """
        if self._running is None:
            self._running = _Running(self.size, self.seconds)
        try:
            return self._running.run(artifacts, inputs, self.seconds)
        except BaseException:
            self.close()  # the ranks may be anywhere in the request
            raise

    def close(self) -> None:
        """End the processes, if there are any."""
        running, self._running = self._running, None
        if running is not None:
            running.close()


class _Running:
    """The processes and the connections to them."""

    def __init__(self, size: int, seconds: float):
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            address = str(self._folder / "socket")
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            server.bind(address)
            server.listen(size)
            server.settimeout(_POLL_SECONDS)
            self._printed = stack.enter_context(tempfile.TemporaryFile())
            launch = [sys.executable, "-m", "hidet_dist.launch", "-n", str(size), "-m", __name__, address]
            self._process = subprocess.Popen(
                launch, stdin=subprocess.DEVNULL, stdout=self._printed, stderr=self._printed, start_new_session=True
            )
            stack.callback(self._end)
            self._ranks: dict[int, Any] = {}
            for _ in range(size):
                connection = stack.enter_context(self._accept(server, seconds))
                connection.settimeout(seconds)
                lines = stack.enter_context(connection.makefile("rw", encoding="utf-8"))
                self._ranks[int(lines.readline())] = lines
            self._stack = stack.pop_all()

    def _accept(self, server: socket.socket, seconds: float) -> socket.socket:
        """Accept the connection of a rank."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(TimeoutError):
                return server.accept()[0]
        raise RuntimeError(f"the ranks did not start in {seconds:g} s, or failed: {self._tail()}")

    def run(self, artifacts: Path, inputs: Sequence[Sequence[np.ndarray]], seconds: float) -> list[list[np.ndarray]]:
        for rank, lines in self._ranks.items():
            np.savez(self._folder / f"inputs{rank}.npz", *inputs[rank])
            with suppress(BrokenPipeError):  # told of on reading
                lines.write(json.dumps(str(artifacts)) + "\n")
                lines.flush()
        errors = {}
        for rank in sorted(self._ranks):
            try:
                line = self._ranks[rank].readline()
            except TimeoutError:
                raise RuntimeError(f"rank {rank} did not answer in {seconds:g} s: {self._tail()}") from None
            except ConnectionResetError:
                line = ""
            if not line:
                raise RuntimeError(f"rank {rank} ended: {self._tail()}")
            if error := parse_json(line):
                errors[rank] = error
        if errors:
            raise RuntimeError("; ".join(f"rank {rank}: {error}" for rank, error in errors.items()))
        return [_arrays(self._folder / f"outputs{rank}.npz") for rank in range(len(self._ranks))]

    def close(self) -> None:
        self._stack.close()

    def _end(self) -> None:
        """Wait for the processes, which end when their connections are closed; then end them."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
                return

    def _tail(self) -> str:
        """The end of what the processes printed."""
        self._printed.seek(0)
        return " ".join(self._printed.read().decode(errors="replace").split())[-_MOST_PRINTED:]


def _arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as arrays:
        return [arrays[f"arr_{number}"] for number in range(len(arrays.files))]


def _requests(lines: Any) -> Iterator[Path]:
    while line := lines.readline():
        yield Path(parse_json(line))


def serve(address: str) -> None:
    """Answer the requests of a pool at a Unix socket as the rank that the environment names, until it is closed."""
    rank = int(os.environ["RANK"])
    folder = Path(address).parent
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        with connection.makefile("rw", encoding="utf-8") as lines:
            print(rank, file=lines, flush=True)
            for artifacts in _requests(lines):
                error = ""
                try:
                    with load_partition(artifacts) as model:
                        outputs = model.run(_arrays(folder / f"inputs{rank}.npz"))
                        np.savez(folder / f"outputs{rank}.npz", *outputs)
                except Exception as caught:
                    error = f"{type(caught).__name__}: {caught}"
                print(json.dumps(error), file=lines, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
