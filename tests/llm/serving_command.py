"""The command that serves a checkpoint, as a process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


@dataclass
class Served:
    """A process that serves, and its address."""

    process: subprocess.Popen[str]
    url: str

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("hidet_dist_"): float(value) for name, value in lines}

    def ranks(self) -> list[int]:
        """The processes of the other ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [int(child) for child in children]
        return [pid for pid in found if b"hidet_dist.llm.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def resident_bytes(self) -> int:
        """The memory of all ranks."""
        return sum(_resident_bytes(pid) for pid in (self.process.pid, *self.ranks()))


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))  # without files, which are shared
    return int(line.split()[1]) * 1024


@contextmanager
def serving(folder: Path, cache: Path, *options: str) -> Iterator[Served]:
    """Serve a checkpoint until the block ends; it begins when the server is ready."""
    command = [sys.executable, "-m", "hidet_dist.cli", "serve", str(folder), "--port", "0", "--cache", str(cache)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        end = time.monotonic() + 900
        while httpx.get(f"{url}/health", timeout=60).status_code != 200:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.2)
        yield Served(process, url)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
