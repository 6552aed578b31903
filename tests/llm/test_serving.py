"""The server as a process: the openai client, signals, clients that leave or do not read, and load."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMPLETE = "/v1/completions"


class Server:
    """A server's process, and its address."""

    def __init__(self, process: subprocess.Popen, port: int):
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("hidet_dist_"): float(value) for name, value in lines}

    def resident_bytes(self) -> int:
        (line,) = (
            x for x in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if x.startswith("VmRSS")
        )
        return int(line.split()[1]) * 1024


@contextmanager
def server(ready: bool = True, **given: Any) -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.llm.serving_process", json.dumps(given)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        made = Server(process, int(process.stdout.readline()))
        if ready:
            wait_for(lambda: health(made) == "ready")
        yield made
    finally:
        process.kill()
        process.wait(60)


def health(server: Server) -> str:
    try:
        return str(httpx.get(f"{server.url}/health", timeout=60).json()["status"])
    except httpx.ConnectError:
        return "not listening"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_openai_client_completes_chats_streams_and_sees_errors():
    import openai  # a second, which processes that collect this test need not take

    with server(options={"api_key": "secret"}) as made:
        client = openai.OpenAI(base_url=f"{made.url}/v1", api_key="secret", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.completions.create(
            model="tiny",
            prompt="abc",
            max_tokens=20,
            temperature=0,
            logprobs=2,
            echo=True,
            extra_body={"ignore_eos": True},
        )
        assert whole.choices[0].text.startswith("abc")
        assert whole.usage is not None and whole.usage.completion_tokens == 20
        parts = client.completions.create(
            model="tiny", prompt="abc", max_tokens=20, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        assert "abc" + "".join(part.choices[0].text for part in parts) == whole.choices[0].text

        messages: list[Any] = [{"role": "user", "content": "hi"}]
        chat = client.chat.completions.create(
            model="tiny", messages=messages, seed=1, max_completion_tokens=30, logprobs=True, top_logprobs=2, n=2
        )
        assert [choice.index for choice in chat.choices] == [0, 1]
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None and len(logprobs.content[0].top_logprobs) == 2
        stream = client.chat.completions.create(
            model="tiny",
            messages=messages,
            seed=1,
            max_completion_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == chat.choices[0].message.content
        assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == len("<s>user:hi;") - 2

        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="tiny", prompt="a", max_tokens=10**6)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{made.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_a_signal_drains():
    with server(step_seconds=0.02) as made:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 100, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", made.url + COMPLETE, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            made.process.send_signal(signal.SIGTERM)
            wait_for(lambda: health(made) == "draining")
            refused = httpx.post(made.url + COMPLETE, json={"model": "tiny", "prompt": "a"}, timeout=60)
            assert refused.status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) > 50
        assert made.process.wait(60) == 0


def test_what_does_not_end_in_time_gets_an_error_when_the_server_drains():
    with server(step_seconds=0.05, options={"drain_seconds": 0.5}) as made:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", made.url + COMPLETE, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            made.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "not complete in time" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        assert made.process.wait(60) == 0


def test_a_server_listens_while_the_model_loads():
    with server(ready=False, load_seconds=2) as made:
        wait_for(lambda: health(made) == "loading")
        refused = httpx.post(made.url + COMPLETE, json={"model": "tiny", "prompt": "a"}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        wait_for(lambda: health(made) == "ready")


def test_a_model_that_fails_ends_the_process_with_an_error():
    with server(fails_at=5) as made:
        answer = httpx.post(
            made.url + COMPLETE, json={"model": "tiny", "prompt": "a", "max_tokens": 50, "ignore_eos": True}, timeout=60
        )
        assert answer.status_code == 503
        assert "rank 1 died" in answer.json()["error"]["message"]
        assert made.process.wait(60) == 1


def test_a_client_that_leaves_or_does_not_read_cancels_its_request():
    with server(step_seconds=0.001, options={"send_seconds": 1}) as made:
        for stream in (True, False):
            body = {"model": "tiny", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
            with socket.create_connection(("127.0.0.1", made.port)) as peer:
                peer.sendall(_http(body))
                wait_for(lambda: made.metrics()["running"] == 1)
            wait_for(lambda: made.metrics()["running"] == 0)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 128}
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect(("127.0.0.1", made.port))
            peer.sendall(_http(body))
            wait_for(lambda: made.metrics()["running"] == 1)
            wait_for(lambda: made.metrics()["running"] == 0, 120)
            assert made.metrics()["generated_tokens_total"] < 3 * 4000
        assert made.metrics()["pages_used"] == 0


def _http(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
def test_under_load_nothing_is_lost_and_memory_is_flat(concurrency: int):
    """Good requests beside cancelled, slow, malformed and oversized ones, in rounds of which the first warms up."""

    async def one(client: httpx.AsyncClient, number: int) -> str:
        chance = random.Random(number)
        kind = chance.choice(["whole", "stream", "leaves", "slow", "malformed", "large"])
        prompt = [7] * chance.choice([3, 20, 40]) + [chance.randrange(256) for _ in range(chance.randrange(1, 60))]
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "seed": number, "ignore_eos": True}
        if kind == "malformed":
            answer = await client.post(COMPLETE, json={**body, "top_p": "much"})
            assert answer.status_code == 400
        elif kind == "large":
            answer = await client.post(COMPLETE, json={**body, "prompt": [1] * 5000})
            assert answer.status_code == 400
        elif kind == "whole":
            answer = await client.post(COMPLETE, json=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 20
        else:
            async with client.stream("POST", COMPLETE, json={**body, "stream": True}) as answer:
                assert answer.status_code == 200
                lines = []
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if kind == "leaves" and len(lines) > 5:
                        break
                    await asyncio.sleep(0.02 if kind == "slow" else 0)
                assert kind == "leaves" or [line for line in lines if line][-1] == "data: [DONE]"
        return kind

    async def round_of(made: Server, begin: int, count: int) -> None:
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=made.url, timeout=120, limits=limits) as client:
            turn = asyncio.Semaphore(concurrency)

            async def call(number: int) -> str:
                async with turn:
                    return await one(client, number)

            await asyncio.gather(*(call(number) for number in range(begin, begin + count)))

    with server(queue=256) as made:
        asyncio.run(round_of(made, 0, 300))
        before = made.resident_bytes()
        for turn in range(1, 4):
            asyncio.run(round_of(made, 1000 * turn, 300))
        wait_for(lambda: made.metrics()["running"] == 0)
        metrics = made.metrics()
        assert (metrics["waiting"], metrics["pages_used"]) == (0, 0)
        assert metrics["shared_tokens_total"] > 0
        assert made.resident_bytes() - before < 16 * 2**20
