"""The server over real ranks of a model that was built: a rank that fails or dies, and load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.llm.serving_command import ROOT, Served, serving
from tests.llm.test_load import SIZES, checkpoint
from tests.llm.test_serving import COMPLETE, wait_for

from hidet_dist.limits import MOST_BODY_BYTES
from hidet_dist.llm.loading import stored_model
from hidet_dist.llm.options import LoadOptions

pytestmark = pytest.mark.slow

SHARED = {"mem_budget": 460_000}  # of two ranks, neither of which has room for the whole model


def built(folder: Path, **optimization: Any) -> Path:
    checkpoint(folder / "model", "llama")
    options = LoadOptions(ranks=2, optimization=optimization, **SIZES)
    return stored_model(folder / "model", options, folder / "cache").folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose ranks exchange activations."""
    return built(tmp_path_factory.mktemp("shared"), **SHARED)


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which each rank computes all."""
    return built(tmp_path_factory.mktemp("repeated"))


@pytest.mark.parametrize("kind", ["shared", "repeated"])
@pytest.mark.parametrize(("what", "said"), [("refuse", "Rank 1|rank 1"), ("die", "rank 1")])
def test_a_rank_that_refuses_a_step_or_dies_ends_the_requests_of_all(
    kind: str, what: str, said: str, request: pytest.FixtureRequest
):
    """Ranks that compute all exchange the inputs of steps alone."""
    folder: Path = request.getfixturevalue(kind)
    command = [sys.executable, "-m", "hidet_dist.launch", "-n", "2", "--timeout", "100"]
    command += ["-m", "tests.llm.rank_built", str(folder), what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    begin = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert time.monotonic() - begin < 90  # none waits for the time-out
    assert done.returncode != 0
    lines = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line]
    told = {line["rank"]: line for line in lines}
    assert told.keys() == ({0} if what == "die" else {0, 1}), done.stderr
    for each in told.values():
        assert each["error"], each
    assert len(told[0]["errors"]) == 3
    for error in told[0]["errors"]:
        assert "model failed" in error
    assert any(name in told[0]["error"] for name in said.split("|")), told[0]["error"]
    assert min(told[0]["counts"]) > 0  # they had begun


def test_a_rank_that_dies_gives_each_open_request_an_error_and_ends_the_server(shared: Path):
    answers = []
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "stream": True, "ignore_eos": True}

    def ask(url: str) -> None:
        with httpx.stream("POST", url + COMPLETE, json=body, timeout=120) as answer:
            answers.append([line for line in answer.iter_lines() if line])

    with serving(shared, shared.parent) as served:
        body["model"] = httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"][0]["id"]
        os.kill(served.ranks()[0], signal.SIGSTOP)  # so that no request ends before the rank does
        threads = [threading.Thread(target=ask, args=(served.url,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: served.metrics()["running"] + served.metrics()["waiting"] == 4)
        os.kill(served.ranks()[0], signal.SIGKILL)
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert served.process.wait(60) == 1
    assert len(answers) == 4
    for lines in answers:
        last = lines[-1] if lines else ""
        assert '"error"' in last, lines


def test_ranks_that_are_stopped_under_load_go_on_with_the_same_answers(shared: Path):
    """Each alone for less than the time-out, and both at once for longer, as a machine that is suspended."""
    seconds = 5.0
    bodies: list[dict[str, Any]] = [
        {"prompt": [5, 6, number], "max_tokens": 100, "seed": number, "ignore_eos": True} for number in range(7, 11)
    ]

    def ask(url: str, body: dict[str, Any]) -> str:
        answer = httpx.post(url + COMPLETE, json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    with serving(shared, shared.parent, "--timeout", f"{seconds:g}") as served, ThreadPoolExecutor(4) as pool:
        name = httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"][0]["id"]
        for body in bodies:
            body["model"] = name
        alone = [ask(served.url, body) for body in bodies]
        ranks = [served.process.pid, *served.ranks()]
        for stopped in (ranks[:1], ranks[1:], ranks, ranks[::-1], ranks, ranks[::-1]):
            running = [pool.submit(ask, served.url, body) for body in bodies * 4]
            wait_for(lambda: served.metrics()["running"] > 1)
            for process in stopped:
                os.kill(process, signal.SIGSTOP)
            time.sleep(seconds / 2 if len(stopped) == 1 else 2 * seconds)
            for process in stopped:  # the first one may wait for the other one, which comes later
                os.kill(process, signal.SIGCONT)
                time.sleep(0.5)
            assert [each.result() for each in running] == alone * 4


KINDS = ("whole", "stream", "leaves", "slow", "malformed", "large", "long")


@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
def test_under_load_the_answers_are_those_of_each_request_alone(shared: Path, concurrency: int):
    """Beside clients that leave or read slowly, and bodies that are malformed, too large or too long."""
    chance = random.Random(7)
    begin = [chance.randrange(3, 330) for _ in range(30)]
    prompts = [begin[: chance.choice([0, 12, 30])] + [chance.randrange(3, 330) for _ in range(n)] for n in range(1, 25)]
    ended = dict.fromkeys(KINDS, 0)

    async def one(client: httpx.AsyncClient, name: str, number: int, alone: list[str]) -> None:
        kind = random.Random(number).choice(KINDS) if len(alone) == len(prompts) else "whole"
        body: dict[str, Any] = {"model": name, "prompt": prompts[number % len(prompts)], "max_tokens": 16}
        body |= {"seed": number % len(prompts), "ignore_eos": True}
        if kind in ("malformed", "large", "long"):
            content = {
                "malformed": b'{"model": "m", ',
                "large": b'"' + b"x" * MOST_BODY_BYTES + b'"',
                "long": json.dumps(body | {"prompt": [5] * 4000}).encode(),
            }[kind]
            try:
                answer = await client.post(COMPLETE, content=content, headers={"content-type": "application/json"})
                status = answer.status_code
            except (httpx.WriteError, httpx.ReadError):  # the server had answered, and read no more
                status = 413 if kind == "large" else 0
            assert status == (413 if kind == "large" else 400), (kind, status)
        elif kind == "whole":
            answer = await client.post(COMPLETE, json=body)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["text"]
            if len(alone) < len(prompts):
                alone.append(text)
            assert text == alone[number % len(prompts)]
        else:
            async with client.stream("POST", COMPLETE, json={**body, "stream": True}) as answer:
                assert answer.status_code == 200
                lines = []
                async for line in answer.aiter_lines():
                    lines += [line] if line else []
                    if kind == "leaves" and len(lines) > 3:
                        break
                    await asyncio.sleep(0.05 if kind == "slow" else 0)
            if kind != "leaves":
                assert lines[-1] == "data: [DONE]"
                parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
                text = "".join(part["choices"][0]["text"] for part in parts if part["choices"])
                assert text == alone[number % len(prompts)]
        ended[kind] += 1

    async def round_of(served: Served, name: str, first: int, count: int, alone: list[str]) -> None:
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as client:
            turn = asyncio.Semaphore(concurrency if len(alone) == len(prompts) else 1)

            async def call(number: int) -> None:
                async with turn:
                    await one(client, name, number, alone)

            await asyncio.gather(*(call(number) for number in range(first, first + count)))

    with serving(shared, shared.parent) as served:
        name = httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"][0]["id"]
        alone: list[str] = []
        asyncio.run(round_of(served, name, 0, len(prompts), alone))
        assert len(alone) == len(prompts)
        asyncio.run(round_of(served, name, 1000, 250, alone))  # it warms up
        before = served.resident_bytes()
        asyncio.run(round_of(served, name, 2000, 250, alone))
        wait_for(lambda: served.metrics()["running"] == 0)
        metrics = served.metrics()
        assert (metrics["waiting"], metrics["pages_used"]) == (0, 0)
        assert metrics["shared_tokens_total"] > 0
        assert served.resident_bytes() - before < 16 * 2**20
        assert sum(ended.values()) == len(prompts) + 500 and min(ended.values()) > 20
