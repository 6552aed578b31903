"""One rank of a calibration: ``python -m hidet_dist.calibration.ranks settings.json``, under the launcher.

``settings.json`` has the mesh, the measurements and their repeats, and the folder of the probes. The samples of each
rank are written to ``rank<r>.json`` in that folder, on every host.
"""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hidet_dist import native
from hidet_dist.calibration.samples import (
    PASS_BYTES,
    ROWS,
    CollectiveSample,
    KernelCalls,
    ProbeSample,
    dump_samples,
    load_kernels,
    pass_name,
)
from hidet_dist.files import parse_json, write_text
from hidet_dist.runtime import openblas, session
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.partition import LoadedPartition, load_partition
from hidet_dist.spec.collectives import COLLECTIVES

_FLOAT32, _SUM = native.dtype_code("float32"), native.reduce_op_code("sum")
_ITEM_BYTES = 4
_SHORT_SECONDS = 2e-4  # shorter runs are timed in batches
_KERNEL = "hidet_launch_0"  # the symbol that hidet exports from a kernel's library
_PRIME = 7919  # a stride that shares no factor with the rows of a table
_SHORT_BYTES, _BATCH = 2**16, 8  # collectives up to this size are timed in batches, since the clock has a cost

# Parameters of mallopt (malloc.h).
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1


def main(settings_file: str) -> None:
    """Measure this rank, and save the samples of all ranks."""
    settings = parse_json(Path(settings_file).read_text(encoding="utf-8"))
    folder = Path(settings["folder"])
    keep_memory()
    session.init(timeout_seconds=settings["timeout_seconds"])  # hosts may need different times to compile the probes
    communicator = session.communicator_for(tuple(settings["mesh_shape"]))
    collectives = [
        CollectiveSample(kind, tuple(axes), nbytes, seconds)
        for axes in settings["groups"]
        for kind in settings["kinds"]
        for nbytes, seconds in _collective(communicator, kind, axes, settings["sizes"], settings["repeats"])
    ]
    probes = []
    for name in settings["probes"]:
        with load_partition(folder / name) as model:
            probes.append(ProbeSample(name, _probe(communicator, model, settings["repeats"])))
    probes += [
        ProbeSample(pass_name(nbytes), _pass(communicator, nbytes, settings["repeats"])) for nbytes in PASS_BYTES
    ]
    openblas.load_openblas()
    probes += [
        ProbeSample(probe.title, _kernels(communicator, probe, settings["repeats"]))
        for probe in load_kernels(folder / "kernels.json")
    ]
    samples = _gather(communicator, dump_samples(collectives, probes).encode())
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the first rank of each host
        for rank, text in enumerate(samples):
            write_text(folder / f"rank{rank}.json", text.decode())


def _gather(communicator: Communicator, data: bytes) -> list[bytes]:
    """Gather the bytes of all ranks, in order of the ranks."""
    whole_mesh = (1 << len(communicator.mesh_shape)) - 1
    communicator.bind()

    def gather(values: np.ndarray) -> np.ndarray:
        rows = np.empty((communicator.world_size, values.size), values.dtype)
        code = native.dtype_code(values.dtype.name)
        native.all_gather(values.ctypes.data, rows.ctypes.data, values.size, code, whole_mesh)
        communicator.check()
        return rows

    lengths = gather(np.array([len(data)], np.int64))[:, 0]
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return [bytes(row[:length]) for row, length in zip(gather(padded), lengths, strict=True)]


def keep_memory() -> None:
    """Keep freed memory in the heap, as programs do, since new pages would cost as much as the work."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _collective(
    communicator: Communicator, kind: str, axes: list[int], sizes: list[int], repeats: int
) -> list[tuple[int, float]]:
    """Measure a collective at each size; return the bytes, rounded up to whole blocks, and the median seconds."""
    group = native.group_code(axes)
    ranks = 1
    for axis in axes:
        ranks *= communicator.mesh_shape[axis]
    times = []
    for size in sizes:
        count = -(-size // (_ITEM_BYTES * ranks**2)) * ranks**2
        call = _call(kind, count, ranks, group)
        batch = _BATCH if size <= _SHORT_BYTES else 1

        def run(call: Callable[[], int] = call, batch: int = batch) -> None:
            for _ in range(batch):
                call()

        times.append((count * _ITEM_BYTES, _median(communicator, run, repeats) / batch))
    return times


def _call(kind: str, count: int, ranks: int, group: int) -> Callable[[], int]:
    """Make a call of a collective over ``ranks`` ranks on a float32 tensor of ``count`` elements per group."""
    collective = COLLECTIVES[kind]
    send = np.ones(collective.sent(count, ranks), np.float32)
    receive = np.ones(collective.received(count, ranks), np.float32)
    block = collective.block(count, ranks)

    def call() -> int:
        return native.run(collective, send.ctypes.data, receive.ctypes.data, block, _FLOAT32, _SUM, group)

    return call


def _probe(communicator: Communicator, model: LoadedPartition, repeats: int) -> float:
    """Measure the seconds of one run of a probe program."""
    inputs = [np.ones([int(extent) for extent in x.shape], x.dtype) for x in model.stage.inputs]
    return _median(communicator, lambda: model.run(inputs), repeats)


def _pass(communicator: Communicator, nbytes: int, repeats: int) -> float:
    """Measure the seconds of a pass that reads and writes ``nbytes`` in total."""
    x = np.ones(nbytes // (2 * _ITEM_BYTES), np.float32)
    y = np.empty_like(x)
    return _median(communicator, lambda: np.negative(x, out=y), repeats)


def _kernels(communicator: Communicator, probe: KernelCalls, repeats: int) -> float:
    """Measure the seconds of a probe's kernels, in batches if they are short."""
    buffers = [_filled(nbytes, dtype) for nbytes, dtype in probe.buffers]
    calls = []
    for file, numbers in probe.calls:
        kernel = getattr(ctypes.CDLL(file), _KERNEL)
        calls.append((kernel, [ctypes.c_void_p(buffers[number].ctypes.data) for number in numbers]))

    def run() -> None:
        for kernel, pointers in calls:
            kernel(*pointers)

    once = _median(communicator, run, 1)
    batch = max(1, math.ceil(_SHORT_SECONDS / once))

    def several() -> None:
        for _ in range(batch):
            run()

    return _median(communicator, several, repeats) / batch


def _filled(nbytes: int, dtype: str) -> np.ndarray:
    """Make a buffer of ones, or of indices spread over the table of the lookup probe if it has integers."""
    if dtype.startswith("int"):
        count = nbytes // np.dtype(dtype).itemsize
        return (np.arange(count) * _PRIME % ROWS).astype(dtype)
    return np.ones(nbytes // _ITEM_BYTES, np.float32)


def _median(communicator: Communicator, run: Callable[[], Any], repeats: int) -> float:
    """Measure the median seconds of ``run``, which all ranks start together, after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        _barrier(communicator)
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
        communicator.check()
    return statistics.median(times[1:])


def _barrier(communicator: Communicator) -> None:
    """Wait for all ranks."""
    communicator.bind()
    everyone = (1 << len(communicator.mesh_shape)) - 1
    word = np.ones(1, np.float32)
    native.all_reduce(word.ctypes.data, word.ctypes.data, 1, _FLOAT32, _SUM, everyone)
    communicator.check()


if __name__ == "__main__":
    main(sys.argv[1])
