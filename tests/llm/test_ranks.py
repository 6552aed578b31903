"""Several ranks step one model: all compute the same steps, or all fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.llm.models import History, Letters, sizes_for

from hidet_dist.llm.engine import Engine, Request, Sampling

ROOT = Path(__file__).parents[2]


def run(ranks: int, what: str = "nothing", where: str = "all") -> dict[int, dict]:
    command = [sys.executable, "-m", "hidet_dist.launch", "-n", str(ranks), "--timeout", "100"]
    command += ["-m", "tests.llm.rank_model", what, where]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line]
    assert lines, done.stderr
    return {line["rank"]: line for line in lines}


def answers() -> list[list[int]]:
    letters = Letters()
    request = Request((7, 8, 9), max_tokens=8, choices=2, ignore_end=True, sampling=Sampling(seed=3))
    with Engine(History(sizes_for(letters)), letters) as engine:
        return [answer.ids for answer in engine.submit(request).answers()]


def check_all_computed_the_same(told: dict[int, dict]) -> None:
    assert len({each["pool"] for each in told.values()}) == 1
    assert len({each["steps"] for each in told.values()}) == 1
    assert all(each["closed"] for each in told.values())


def test_all_ranks_compute_the_steps_that_rank_0_schedules():
    told = run(2)
    assert told.keys() == {0, 1}
    check_all_computed_the_same(told)
    assert told[0]["answers"] == told[0]["later"] == answers()


@pytest.mark.slow
def test_ranks_wait_for_a_request_longer_than_for_one_another():
    told = run(2, "idle")
    check_all_computed_the_same(told)
    assert told[0]["answers"] == answers()


@pytest.mark.slow
def test_a_step_that_all_ranks_refuse_ends_its_requests_and_others_go_on():
    told = run(3, "refuse")
    check_all_computed_the_same(told)
    assert "as all ranks did: no memory" in told[0]["error"]
    assert told[0]["later"] == answers()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "said"), [("refuse", "Rank 1 refused a step that others"), ("fail", "Rank 1 failed")])
def test_a_rank_that_fails_fails_all(what: str, said: str):
    told = run(3, what, "1")
    assert told.keys() == {0, 1, 2}
    for each in told.values():
        assert said in each["error"]
        assert each["closed"]
    assert told[0]["answers"] == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["0", "1"])
def test_a_rank_that_dies_gives_the_others_an_error(where: str):
    told = run(2, "die", where)
    (each,) = told.values()
    assert f"rank {where}" in each["error"]
    assert each["closed"]
