"""Fixtures that run scenarios of ranks.py in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hidet_dist.launch import free_port

Answers = list[dict[str, Any]]
RunRanks = Callable[..., Answers]

LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "HIDET_DIST_SECRET",
)


@pytest.fixture(scope="session")
def rank_server() -> Iterator[subprocess.Popen[str]]:
    env = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ranks.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture
def run_ranks(rank_server: subprocess.Popen[str]) -> RunRanks:
    """``run_ranks(scenario, world_size, ...)``: an answer for each process, in the order of ``ranks``."""

    def run(
        scenario: str,
        world_size: int,
        ranks: Sequence[int] | None = None,
        port: int | None = None,
        timeout: float = 20.0,
        environment: Sequence[dict[str, str]] | None = None,
        **arguments: Any,
    ) -> Answers:
        ranks = range(world_size) if ranks is None else ranks
        base = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port or free_port()),
            "TEST_TIMEOUT": str(timeout),
        }
        environments = [{**base, "RANK": str(rank)} for rank in ranks]
        for own, extra in zip(environments, environment or [{}] * len(environments), strict=True):
            own.update(extra)
        assert rank_server.stdin is not None
        assert rank_server.stdout is not None
        request = {"scenario": scenario, "arguments": arguments, "environments": environments}
        rank_server.stdin.write(json.dumps(request) + "\n")
        rank_server.stdin.flush()
        answers: Answers = json.loads(rank_server.stdout.readline())
        return answers

    return run


@pytest.fixture
def no_launch_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
