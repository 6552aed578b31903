"""Ranks on several hosts: they meet, answer, and say which one is gone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.machine.cluster import Link
from hidet_dist.machine.file import load_machine, save_machine
from hidet_dist.spec import DeviceMesh

from . import hosts as hosts_module
from .conftest import X, build, whole
from .hosts import Host

PROGRAM = str(Path(__file__).with_name("host_rank.py"))
PATIENCE_SECONDS = 120.0
"""The longest time, in seconds, that a test waits for an event, also on a busy machine."""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two of them."""
    try:
        context = hosts_module.connected(2)
        pair = context.__enter__()
    except hosts_module.NoHostsError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield pair
    finally:
        context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts for four ranks."""
    return build(tmp_path_factory.mktemp("hosts") / "artifacts", 4)


def _await(ready: Callable[[], bool], processes: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, ended[0].communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _read(file: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(file.read_text())
    return said


def _serving(
    hosts: Sequence[Host], artifacts: Path, out: Path, ranks: int, timeout: float
) -> list[subprocess.Popen[str]]:
    """Ranks that call without end, once all have answered for the first time."""
    processes = [host.launch(hosts, ranks, PROGRAM, str(artifacts), str(out), "0", str(timeout)) for host in hosts]
    _await(lambda: len(list(out.glob("*.first"))) == ranks * len(hosts), processes)
    return processes


def test_a_host_that_is_gone_is_named(hosts: list[Host], artifacts: Path, tmp_path: Path) -> None:
    processes = _serving(hosts, artifacts, tmp_path, 1, timeout=60.0)
    for rank in range(2):
        first = _read(tmp_path / f"rank{rank}.first")
        np.testing.assert_allclose(first["answer"], whole(X), atol=1e-4)
        assert first["shared"] == []  # nothing but the network joins them
    hosts[1].kill()
    output, _ = processes[0].communicate(timeout=PATIENCE_SECONDS)
    said = _read(tmp_path / "rank0.last")
    assert said["error"] == "CommunicationError", output
    assert said["ranks"] == [1], said
    assert "rank 1" in said["message"], said
    assert "rank 0 exited with status 3" in output


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 1])  # host 0 has the store
@pytest.mark.parametrize("how", ["cut off", "killed"])
def test_the_remaining_of_four_ranks_name_the_lost_host(
    hosts: list[Host], four: Path, tmp_path: Path, gone: int, how: str
) -> None:
    """Two ranks on each host, which share memory there."""
    processes = _serving(hosts, four, tmp_path, 2, timeout=6.0)
    if how == "killed":
        hosts[gone].kill()
    else:
        hosts[gone].cut_off()
    output, _ = processes[1 - gone].communicate(timeout=PATIENCE_SECONDS)
    lost, left = ([0, 1], [2, 3]) if gone == 0 else ([2, 3], [0, 1])
    for rank in left:
        said = _read(tmp_path / f"rank{rank}.last")
        assert said["error"] == "CommunicationError", output
        assert said["ranks"], said
        assert set(said["ranks"]) <= set(lost), said
        assert f"rank {said['ranks'][0]}" in said["message"] or "ranks " in said["message"], said


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["launch", "torchrun"])
def test_four_ranks_on_two_hosts_answer(hosts: list[Host], four: Path, tmp_path: Path, launcher: str) -> None:
    arguments = (PROGRAM, str(four), str(tmp_path), "20", "60")
    processes = [getattr(host, launcher)(hosts, 2, *arguments) for host in hosts]
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for rank in range(4):
        assert _read(tmp_path / f"rank{rank}.last") == {}
        np.testing.assert_allclose(_read(tmp_path / f"rank{rank}.first")["answer"], whole(X), atol=1e-4)


_SLOW_BYTES_PER_SECOND = 2.5e6


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("discipline", ["tbf rate 20mbit burst 32kb latency 1s", "netem delay 20ms rate 20mbit"])
def test_a_slow_link_is_measured_and_planned_for(hosts: list[Host], tmp_path: Path, discipline: str) -> None:
    for host in hosts:
        try:
            host.slow_down(*discipline.split())
        except hosts_module.NoHostsError as error:
            pytest.skip(f"the kernel has no such queueing discipline: {error}")
    program = str(Path(__file__).with_name("calibrate_host.py"))
    meeting_point = f"{hosts[0].address}:{hosts_module.PORT}"
    outs = [tmp_path / f"{host.number}.json" for host in hosts]
    processes = [
        host.start(sys.executable, program, str(out), str(host.number), meeting_point)
        for host, out in zip(hosts, outs, strict=True)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    measured, other = (load_machine(out, DeviceMesh((2,))) for out in outs)
    assert measured.links == other.links  # both hosts know what all ranks measured
    (link,) = measured.links
    assert link.bandwidth_bytes_per_second < 2 * _SLOW_BYTES_PER_SECOND
    if discipline.startswith("netem"):
        assert link.latency_seconds > 0.01

    fast = tmp_path / "fast.json"
    save_machine(replace(measured, links=(Link(1e-6, 1e11),)), fast)
    # Sharing this work out saves milliseconds; adding up the parts takes a tenth of a second over the slow link.
    x = hidet.symbol([128, 512], "float32", "cpu")
    first, second = (hidet.zeros(shape, device="cpu") for shape in ([512, 1024], [1024, 512]))
    graph = hidet.trace_from(hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(x, first)), second), [x])
    slow_plan, fast_plan = (
        hidet_dist.auto_parallel(graph, {"mesh_shape": [2], "machine": str(out)}, {}, tmp_path / out.stem)
        for out in (outs[0], fast)
    )
    assert not slow_plan.communications
    assert fast_plan.communications
