"""One rank of a program that is measured: streams the same batch, and writes how long it took and what came out.

    python serve.py ARTIFACTS INPUTS OUT WARM_UP BATCHES

``INPUTS`` is an ``.npz`` file. Each rank writes ``OUT.<rank>.json``, and those that have results ``OUT.<rank>.npz``.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np

import hidet_dist


def main(artifacts: str, inputs: str, out: str, warm_up: str, batches: str) -> None:
    with np.load(inputs) as arrays:
        batch = [arrays[name] for name in arrays.files]
    with hidet_dist.load_partition(artifacts, timeout_seconds=300) as model:
        model.warm_up()
        for _ in model.stream(itertools.repeat(batch, int(warm_up))):
            pass
        # From the first result to the last: the pipeline is full all the while.
        times, y = [], None
        for result in model.stream(itertools.repeat(batch, int(batches))):
            times.append(time.perf_counter())
            y = result
        profile = model.profile(*batch)
    figures = {
        "seconds_per_batch": (times[-1] - times[0]) / (len(times) - 1),
        "busy_share": profile.busy_share,
        "call_seconds": profile.call_seconds,
    }
    Path(f"{out}.{model.rank}.json").write_text(json.dumps(figures), encoding="utf-8")
    if y is not None:
        np.savez(f"{out}.{model.rank}.npz", *([y] if isinstance(y, np.ndarray) else y))


if __name__ == "__main__":
    main(*sys.argv[1:])
