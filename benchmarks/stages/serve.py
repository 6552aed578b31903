"""One rank of a program that is measured: streams the same batch, and writes how long it took and what came out.

    python serve.py ARTIFACTS INPUTS OUT WARM_UP BATCHES

``INPUTS`` is an ``.npz`` file. Each rank writes ``OUT.<rank>.json``, and those that have results ``OUT.<rank>.npz``.
With the environment variable ``SLOWED_RANK``, that rank runs for only ``SLOWED_FRACTION`` of each period of
``SLOWED_PERIOD`` seconds, as with a quota of the CPU's time: another process stops and continues it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import hidet_dist

# Stops and continues a process until it is told to end; the process runs when it does. It is stopped for as long as its
# work since the last time calls for. What counts is the time of its CPU, so that a wait for others costs it nothing, as
# it would not cost a device that is slow by itself. A stop that comes late lasts longer, and one that lasted too long
# shortens the next.
QUOTA = """
import os, signal, sys, time
process, fraction, period = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
clock = ~process << 3 | 2  # the clock of a process's CPU time: clock_getcpuclockid(3)
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
used, owed = time.clock_gettime(clock), 0.0  # seconds
try:
    while not ended and os.getppid() == process:
        worked = time.clock_gettime(clock) - used
        if worked < period * fraction:
            time.sleep(max(period * fraction - worked, period / 50))
            continue
        os.kill(process, signal.SIGSTOP)
        used, owed, stopped = used + worked, owed + worked * (1 - fraction) / fraction, time.perf_counter()
        time.sleep(max(owed, 0))
        os.kill(process, signal.SIGCONT)
        owed -= time.perf_counter() - stopped
finally:
    os.kill(process, signal.SIGCONT)
"""


@contextlib.contextmanager
def quota(fraction: float, period_seconds: float) -> Iterator[None]:
    """Let this process run for a fraction of each period only."""
    arguments = [sys.executable, "-c", QUOTA, os.getpid(), fraction, period_seconds]
    process = subprocess.Popen([str(argument) for argument in arguments])
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main(artifacts: str, inputs: str, out: str, warm_up: str, batches: str) -> None:
    with np.load(inputs) as arrays:
        batch = [arrays[name] for name in arrays.files]
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(hidet_dist.load_partition(artifacts, timeout_seconds=300))
        model.warm_up()
        if os.environ.get("SLOWED_RANK") == str(model.rank):
            stack.enter_context(quota(float(os.environ["SLOWED_FRACTION"]), float(os.environ["SLOWED_PERIOD"])))
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
