"""The server of language models beside llama.cpp's on this machine.

    python -m benchmarks.llm_server [--model smollm2] [--precision int4] [--clients 1 16] [--rounds 3] [--busy 1]

SmolLM2-135M, or a LLaMA of random weights of ``--parameters``: one file for both servers, on as many threads. A client
sends a request to ``/v1/completions``, and the next one when its answer has ended: prompts of ``--prompt`` tokens, no
two alike, and ``--new`` tokens of the highest probability, streamed. Servers take turns. Of each are told the tokens a
second of all clients together, and the median time from a request to its first token, and between two tokens of an
answer. Medians of rounds are shown, and their ratios to llama.cpp's. llama.cpp is that of the package xllamacpp, whose
wheels are compiled for AVX2. So ours is measured once as it is compiled for this processor, and once for AVX2 as well
(x86-64-v3). The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from benchmarks.llm import MODELS, Variant, file_of, publish
from benchmarks.serving.host import describe
from hidet_dist.llm.loading import stored_model
from hidet_dist.llm.options import LoadOptions

NAME = "model"  # in requests
OURS = {"ours": "native", "ours, x86-64-v3": "x86-64-v3"}  # the level that it is compiled for
PEER = "llama.cpp"
MOST_CLIENTS = 16
FIGURES = {
    "tokens_per_second": "tokens/s",
    "first_token_ms": "first token, ms",
    "between_tokens_ms": "between tokens, ms",
}


@dataclass
class Server:
    """A server that runs, and what was measured of it by the number of clients."""

    process: subprocess.Popen[str]
    address: str
    facts: dict[str, Any]
    measured: dict[int, list[dict[str, float]]] = field(default_factory=dict)

    @staticmethod
    def start(command: list[str], env: dict[str, str] | None = None) -> Server:
        """Start a server, whose first line out has its address, and wait until it is ready."""
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{' '.join(command)} ended with status {process.wait()}.")
        facts = json.loads(line) if line.startswith("{") else {"address": line.removeprefix("Listening on ")}
        server = Server(process, facts.pop("address"), facts)
        while not server.is_ready():
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}.")
            time.sleep(0.1)
        return server

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Answer:
    """When the tokens of an answer came, in seconds from its request."""

    times: tuple[float, ...]


async def ask(address: str, prompt: list[int], count: int) -> Answer:
    """Send a request, and note when each event of its stream comes. Raises SystemExit where it is refused."""
    where = urlsplit(address)
    body = {"model": NAME, "prompt": prompt, "max_tokens": count, "temperature": 0}
    data = json.dumps({**body, "stream": True, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(head.encode() + data)
    times: list[float] = []
    said = status = await reader.readline()
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - begin)
            said = line
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    if b" 200 " not in status or b'"error"' in said or not times:
        raise SystemExit(f"{address} answered {status!r}, {said[:500]!r}.")
    return Answer(tuple(times))


async def load(address: str, clients: int, requests: int, length: int, count: int, first: int) -> dict[str, float]:
    """Send requests of several clients, and return what their users see."""
    left = list(range(first, first + requests))
    answers: list[Answer] = []

    async def client() -> None:
        while left:
            number = left.pop()
            prompt = [1000 + (7919 * number + 104729 * place) % 40000 for place in range(length)]
            answers.append(await ask(address, prompt, count))

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - begin
    return {
        "tokens_per_second": requests * count / seconds,
        "first_token_ms": 1e3 * statistics.median(answer.times[0] for answer in answers),
        "between_tokens_ms": 1e3
        * statistics.median((answer.times[-1] - answer.times[0]) / max(1, count - 1) for answer in answers),
    }


def servers(given: argparse.Namespace) -> dict[str, list[str]]:
    """The commands of the servers, by name. Models of ours are built."""
    file = file_of(given.model, Variant("ours", given.threads), given.precision, given.parameters)
    context = given.prompt + given.new
    commands: dict[str, list[str]] = {}
    for name, level in OURS.items():
        options = LoadOptions(
            context=context,
            sequences=MOST_CLIENTS,
            step_tokens=given.step_tokens,
            cached_tokens=MOST_CLIENTS * (context + 32),
            optimization={"arch": level},
        )
        folder = stored_model(file, options).folder
        commands[name] = ["-m", "hidet_dist.cli", "serve", str(folder), "--port", "0", "--name", NAME]
    if importlib.util.find_spec("xllamacpp") is not None:
        peer = ["-m", "benchmarks.generation.llama_server", str(file), "--threads", str(given.threads)]
        commands[PEER] = [*peer, "--sequences", str(MOST_CLIENTS), "--context", str(context)]
    return commands


def measure(given: argparse.Namespace) -> dict[str, Server]:
    """Start the servers, and load them in turns."""
    env = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
    running: dict[str, Server] = {}
    busy: list[subprocess.Popen[bytes]] = []
    number = 0
    try:
        for name, command in servers(given).items():
            running[name] = Server.start(command, env)
        busy += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.busy)]
        for turn in range(-1, given.rounds):
            for clients in given.clients:
                requests = clients * given.requests
                for server in running.values():
                    sizes = (clients, requests, given.prompt, given.new, number)
                    found = asyncio.run(load(server.address, *sizes))
                    if turn >= 0:  # the first turn warms up
                        server.measured.setdefault(clients, []).append(found)
                number += requests
    finally:
        for process in busy:
            process.kill()
            process.wait()
        for server in running.values():
            server.end()
    return running


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--parameters", type=float, default=5e8, help="of the random model")
    parser.add_argument("--precision", choices=("int4", "float32"), default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, nargs="+", choices=range(1, MOST_CLIENTS + 1), default=[1, MOST_CLIENTS])
    parser.add_argument("--requests", type=int, default=3, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens that are generated for each request")
    parser.add_argument("--step-tokens", type=int, default=256, help="of ours")
    parser.add_argument("--busy", type=int, default=0, help="processes beside the servers that never wait")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    console = Console(width=130)
    result: dict[str, Any] = {
        "machine": describe(),
        **{key: value for key, value in vars(given).items() if key != "out"},
    }
    running = measure(given)
    if PEER not in running:
        console.print(f"{PEER}: not measured: xllamacpp is not installed: pip install 'hidet_dist[bench-llm-server]'")
    medians = {
        name: {
            clients: {key: statistics.median(of[key] for of in rounds) for key in FIGURES}
            for clients, rounds in server.measured.items()
        }
        for name, server in running.items()
    }
    table = Table("", "clients", *FIGURES.values(), title=f"{given.model}, {given.precision}, {given.threads} threads")
    for clients in given.clients:
        for name, of in medians.items():
            table.add_row(name, str(clients), *(f"{of[clients][key]:.1f}" for key in FIGURES))
        for name in OURS if PEER in medians else ():
            ratios = {key: medians[name][clients][key] / medians[PEER][clients][key] for key in FIGURES}
            table.add_row(f"{name}: over {PEER}", str(clients), *(f"{ratios[key]:.2f}" for key in FIGURES))
            result.setdefault("over_llama_cpp", {}).setdefault(name, {})[clients] = ratios
    console.print(table)
    result["servers"] = {name: {**running[name].facts, "medians": of} for name, of in medians.items()}
    publish(result, given.out)


if __name__ == "__main__":
    main()
