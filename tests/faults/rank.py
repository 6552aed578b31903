"""A rank under remote control: reads one command a line, in JSON, and answers each with a line.

It imports what a serving process would: neither hidet nor PyTorch.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import numpy as np

import hidet_dist
from hidet_dist.artifacts import opened
from hidet_dist.errors import HidetDistError

LIMITS = {"file_bytes": resource.RLIMIT_FSIZE, "open_files": resource.RLIMIT_NOFILE}

model: hidet_dist.LoadedPartition | None = None


def load(folder: str, timeout_seconds: float) -> int:
    """Load a partition; returns its rank."""
    global model  # noqa: PLW0603 - one process is one rank
    model = hidet_dist.load_partition(folder, timeout_seconds=timeout_seconds)
    return model.rank


def call(inputs: list[Any]) -> list[Any]:
    """Call it, on float32 inputs."""
    assert model is not None
    return model.run([np.array(x, np.float32) for x in inputs])[0].tolist()


def serve(inputs: list[Any]) -> str:
    """Call it again and again, until that fails or there is another answer."""
    first = call(inputs)
    while call(inputs) == first:
        pass
    return "another answer"


def close() -> None:
    """Close it."""
    assert model is not None
    model.close()


def limit(**limits: int) -> None:
    """Limit what this process may take of the system."""
    for name, value in limits.items():
        resource.setrlimit(LIMITS[name], (value, value))


def stall() -> None:
    """From now on, loading does not get beyond meeting the others."""
    opened.OpenedArtifacts.verify = lambda *_: time.sleep(1000)  # type: ignore[method-assign,assignment]


def shared() -> list[Any]:
    """The groups that share memory."""
    return [] if model is None else [list(ranks) for ranks in model._communicator.shared_groups]


COMMANDS = {function.__name__: function for function in (load, call, serve, close, limit, stall, shared)}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        answer = {"result": COMMANDS[request.pop("do")](**request)}
    except HidetDistError as error:
        answer = {"error": type(error).__name__, "message": str(error), "ranks": list(getattr(error, "ranks", ()))}
    return {**answer, "seconds": time.monotonic() - begin}


def main() -> None:
    """Obey until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


main()
