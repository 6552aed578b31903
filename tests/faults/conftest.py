"""Artifacts to serve, ranks under remote control to serve them, and a look at what is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
from tests.forked import ForkedProcess, Forks

import hidet_dist
from hidet_dist.launch import free_port
from hidet_dist.runtime.store import StoreClient

INTERPRETER = [sys.executable]
"""The program of a rank that is not forked."""

READ_LATE = {"HIDET_DIST_SECRET", "HIDET_DIST_TRANSPORT", "WORLD_SIZE"}
"""The variables that are read when a rank loads a partition. Libraries read others when they are imported."""

MARK = "HIDET_DIST_FAULT_TEST"
PATIENCE_SECONDS = 120.0
"""The longest time, in seconds, that a test waits for a rank's answer, also on a busy machine."""

TIMEOUT_SECONDS = 100.0
"""The ranks' time-out, in seconds, in tests where something else ends the wait."""

SHORT_SECONDS = 5.0
"""The same, where it is to pass: long enough for what comes before."""

_HELD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HIDET_DIST_SECRET")

X = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)


def weights(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Those of the model with this seed."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((8, 16), (16, 8)))  # type: ignore


def whole(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """The outputs of the unsharded model."""
    first, second = weights(seed)
    return np.maximum(x @ first, 0) @ second + np.arange(8, dtype=np.float32)


def build(folder: Path, ranks: int, seed: int = 0, batch: int | str = 4) -> Path:
    """A model of two layers, split by its hidden dim: its ranks add up what they have at the end."""
    x = hidet.symbol([batch, 8], "float32", "cpu")
    first, second = map(hidet.asarray, weights(seed))
    bias = hidet.asarray(np.arange(8, dtype=np.float32))
    y = hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(x, first)), second) + bias
    config: dict[str, Any] = {"pins": {"w0": "(R, S0)", "w1": "(S0, R)", "w2": "(R)"}} if ranks > 1 else {}
    if isinstance(batch, str):
        config["symbols"] = {batch: 4}
    result = hidet_dist.auto_parallel(hidet.trace_from(y, [x]), {"mesh_shape": [ranks]}, config, folder)
    assert bool(result.communications) == (ranks > 1)
    return folder


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For two ranks. Not to be changed: copy them."""
    return build(tmp_path_factory.mktemp("faults") / "artifacts", 2)


@pytest.fixture(scope="session")
def symbolic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For two ranks, and batches of any size."""
    return build(tmp_path_factory.mktemp("faults") / "symbolic", 2, batch="batch")


class Rank:
    """A process that serves, told what to do."""

    def __init__(self, environment: dict[str, str], forks: Forks | None = None):
        self._buffer = b""
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if forks is not None:
            self.process = forks.fork(environment)
        else:
            self.process = subprocess.Popen(
                [*INTERPRETER, str(Path(__file__).with_name("rank.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )

    def send(self, command: str, **arguments: Any) -> None:
        """Give a command, and do not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def go_on(self) -> None:
        """Let a command go on that waits for a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def answer(self, within: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """The answer to the oldest command that has none yet; fails the test where there is none in time."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + within
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer within {within} s"
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            assert piece, "the process has ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, command: str, **arguments: Any) -> Any:
        """Give a command, and return what it returns."""
        self.send(command, **arguments)
        answer = self.answer()
        assert "error" not in answer, answer
        return answer["result"]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def dismiss(self) -> None:
        """Let it end on its own."""
        assert self.process.stdin is not None
        self.process.stdin.close()


Start = Callable[..., list[Rank]]


def marked(mark: str, sessions: set[int]) -> list[int]:
    """The processes that were started with this mark, or are in these sessions, and what they started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
                session = os.getsid(int(entry.name))
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment.split(b"\0") or session in sessions:
                found.append(int(entry.name))
    return found


def _without_ranks() -> dict[str, str]:
    """The environment of a process that is no rank."""
    return {name: value for name, value in os.environ.items() if name not in _HELD} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """The process that ranks are forked from."""
    process = Forks(Path(__file__).with_name("rank.py"), _without_ranks())
    yield process
    process.end()


def _named_memory() -> set[str]:
    """Shared memory and semaphores that outlive processes: those of POSIX, which are files, and those of System V."""
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    for kind in ("shm", "sem"):
        lines = Path(f"/proc/sysvipc/{kind}").read_text(encoding="ascii").splitlines()[1:]
        found |= {f"{kind} {line.split()[1]}" for line in lines}
    return found


@pytest.fixture
def start(tmp_path: Path, forks: Forks) -> Iterator[Start]:
    """Start ranks, and see to it that nothing is left of them at the end: no process, no memory, no file."""
    mark = uuid.uuid4().hex
    scratch = tmp_path / "scratch"  # for their temporary files
    scratch.mkdir()
    before = _named_memory()
    started: list[Rank] = []

    def run(count: int, port: int | None = None, environment: Sequence[dict[str, str]] | None = None) -> list[Rank]:
        base = _without_ranks() | {
            MARK: mark,
            "TMPDIR": str(scratch),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port or free_port()),
        }
        more = environment or [{}] * count
        alike = all(own.keys() <= READ_LATE for own in more) and len(INTERPRETER) == 1
        ranks = [
            Rank({**base, "RANK": str(rank), **own}, forks if alike else None)
            for rank, own in zip(range(count), more, strict=True)
        ]
        started.extend(ranks)
        for rank in ranks:
            rank.do("shared")  # once it answers, all that takes time is imported
        return ranks

    yield run
    for rank in started:
        rank.kill(signal.SIGCONT)
        rank.dismiss()
    try:
        for rank in started:
            rank.process.wait(PATIENCE_SECONDS)
    finally:
        for rank in started:
            rank.kill()
            rank.process.wait()
            if rank.process.stdout is not None:
                rank.process.stdout.close()
    # What has no name, such as the memory that ranks share, goes with the last process that has it open.
    assert not marked(mark, {rank.process.pid for rank in started}), "processes are left"
    assert not list(scratch.iterdir()), "temporary files are left"
    deadline = time.monotonic() + PATIENCE_SECONDS  # other programs use these too, for a moment
    while left := _named_memory() - before:
        assert time.monotonic() < deadline, f"shared memory or semaphores are left: {left}"
        time.sleep(0.1)


def load_all(ranks: Sequence[Rank], folder: Path | Sequence[Path], timeout: float = TIMEOUT_SECONDS) -> None:
    """Load artifacts on all ranks, with success."""
    folders = [folder] * len(ranks) if isinstance(folder, Path) else folder
    for rank, own in zip(ranks, folders, strict=True):
        rank.send("load", folder=str(own), timeout_seconds=timeout)
    for number, rank in enumerate(ranks):
        answer = rank.answer()
        assert answer.get("result") == number, answer


def await_loaded(port: int, rank: int) -> None:
    """Return once a rank has loaded its part, and says so in the store, when all load for the first time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            store = StoreClient("127.0.0.1", port, timeout_seconds=PATIENCE_SECONDS)
            break
        except OSError:  # it is not there yet
            assert time.monotonic() < deadline
            time.sleep(0.05)
    store.wait([f"loading0/{rank}"])
    store.close()


def call_all(ranks: Sequence[Rank], x: np.ndarray = X, seed: int = 0) -> None:
    """Call the partition on all ranks, which must answer as the whole model does."""
    for rank in ranks:
        rank.send("call", inputs=[x.tolist()])
    for rank in ranks:
        answer = rank.answer()
        assert "error" not in answer, answer
        np.testing.assert_allclose(answer["result"], whole(x, seed), atol=1e-4)


def assert_blames(answer: dict[str, Any], rank: int, kind: str, *says: str) -> None:
    """The error names the rank and the cause, and did not take the whole time-out of the ranks."""
    assert answer.get("error") == kind, answer
    assert f"rank {rank}" in answer["message"] or f"ranks {rank}" in answer["message"], answer
    for text in says:
        assert text in answer["message"], answer
    if kind == "CommunicationError":
        assert answer["ranks"] == [rank], answer
    assert answer["seconds"] < TIMEOUT_SECONDS, answer


@pytest.fixture
def next_run_works(start: Start, artifacts: Path) -> Iterator[None]:
    """After the test, two ranks load and answer as if nothing had happened."""
    yield
    ranks = start(2)
    load_all(ranks, artifacts)
    call_all(ranks)
    for rank in ranks:
        rank.dismiss()
    assert [rank.process.wait(PATIENCE_SECONDS) for rank in ranks] == [0, 0]
