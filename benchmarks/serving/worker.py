"""One long-lived process that runs one variant of one model: started and driven by :mod:`variants`.

Reads commands from stdin and answers on stdout, a line of JSON each. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def load(settings: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]:
    """A call of the model on its inputs, and one that profiles so many calls."""
    with np.load(settings["inputs"]) as arrays:
        inputs = [arrays[name] for name in arrays.files]
    if settings["how"] == "hidet":
        from hidet_dist.runtime.partition import load_partition

        model = load_partition(Path(settings["artifacts"]))
        return lambda: model(*inputs), lambda calls: profile(model, inputs, calls)
    import torch

    from benchmarks.serving import peers

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tensors = [torch.from_numpy(x) for x in inputs]
    run = peers.make(settings["model"], Path(settings["weights"]), settings["how"], tensors)
    return lambda: run(*tensors), lambda _: {}


def main(load: Callable[..., tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]] = load) -> None:
    """Load what the first line says, and do as the others say."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    call, profiled = load(json.loads(sys.stdin.readline()))
    begin = time.perf_counter()
    call()
    answers.write(json.dumps({"first_seconds": time.perf_counter() - begin}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        reply: dict[str, Any] = {}
        if command["do"] == "answer":
            y = call()
            np.save(command["file"], np.asarray(y.cpu() if hasattr(y, "cpu") else y))
        elif command["do"] == "profile":
            reply = profiled(command["calls"])
        else:
            reply["seconds"] = burst(call, command["calls"], command["warm_up"])
        answers.write(json.dumps(reply) + "\n")


def burst(call: Callable[[], Any], calls: int, warm_up: int) -> list[float]:
    """The seconds of each of some calls, after some that do not count."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def profile(model: Any, inputs: list[np.ndarray], calls: int) -> dict[str, Any]:
    """The time around the kernels over theirs (the median of some calls), and the kernels of the call in the middle."""
    profiles = sorted((model.profile(*inputs) for _ in range(calls)), key=lambda own: own.call_seconds)
    middle = profiles[len(profiles) // 2]
    overheads = [own.overhead_seconds / (own.compute_seconds + own.communication_seconds) for own in profiles]
    kernels: dict[tuple[str, str], list[float]] = {}
    for operator in middle.operators:
        kernels.setdefault((operator.name, operator.output), []).append(operator.seconds)
    return {
        "overhead": statistics.median(overheads),
        "communication_seconds": middle.communication_seconds,
        "kernels": [
            {"name": name, "writes": output, "count": len(own), "seconds": sum(own)}
            for (name, output), own in sorted(kernels.items(), key=lambda item: -sum(item[1]))
        ],
    }


if __name__ == "__main__":
    main()
