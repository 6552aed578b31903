"""All-reduce between the processes of one host, through shared memory and through Gloo, in turns in one run.

    python -m benchmarks.collectives [ranks]

The last line is JSON: by bytes, the median seconds of both and their ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from hidet_dist import native
from hidet_dist.runtime import session
from hidet_dist.runtime.communicator import Communicator

SIZES = (4 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024, 8 * 1024 * 1024)
ROUNDS = 15
CALLS = 10


def seconds(comm: Communicator, buffer: np.ndarray, group: int) -> float:
    """Of one all-reduce, in the middle of a few."""
    address = int(buffer.ctypes.data)
    comm.bind()
    begin = time.perf_counter()
    for _ in range(CALLS):
        native.all_reduce(address, address, buffer.size, 0, 0, group)
    end = time.perf_counter()
    comm.check()
    return (end - begin) / CALLS


def measure() -> None:
    """Run the benchmark on one rank; rank 0 prints."""
    session.init()
    settings = session.current()
    assert settings is not None
    comms = {}
    for transport in ("auto", "gloo"):
        os.environ["HIDET_DIST_TRANSPORT"] = transport
        comms[transport] = session.communicator_for((settings.world_size,))
    results = {}
    for nbytes in SIZES:
        buffer = np.zeros(nbytes // 4, dtype=np.float32)
        times: dict[str, list[float]] = {"auto": [], "gloo": []}
        for transport in times:
            seconds(comms[transport], buffer, 1)
        for _ in range(ROUNDS):
            for transport, own in times.items():
                own.append(seconds(comms[transport], buffer, 1))
        shared, gloo = statistics.median(times["auto"]), statistics.median(times["gloo"])
        results[str(nbytes)] = {"shared_memory_seconds": shared, "gloo_seconds": gloo, "ratio": gloo / shared}
    assert comms["auto"].shared_groups
    if settings.rank == 0:
        print(json.dumps(results))
    session.shutdown()


def main(ranks: int) -> None:
    command = [sys.executable, "-m", "hidet_dist.launch", "-n", str(ranks), __file__, "--rank"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if child.returncode:
        sys.exit(f"the ranks failed:\n{child.stdout}{child.stderr}")
    line = next(line for line in reversed(child.stdout.splitlines()) if "{" in line)
    results = json.loads(line[line.index("{") :])
    table = Table(title=f"All-reduce between {ranks} processes of one host [µs]")
    for column in ("bytes", "shared memory", "Gloo", "ratio"):
        table.add_column(column, justify="right")
    for nbytes, own in results.items():
        shared, gloo = own["shared_memory_seconds"] * 1e6, own["gloo_seconds"] * 1e6
        table.add_row(nbytes, f"{shared:.0f}", f"{gloo:.0f}", f"{own['ratio']:.1f}")
    Console(width=100).print(table)
    print(json.dumps({"ranks": ranks, "all_reduce": results}))


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        measure()
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 2)
