"""Kernels of the CPU target beside PyTorch's, one thread each, in turns in one run: all but products of matrices.

    python -m benchmarks.kernels [name ...] [--out benchmarks/results/kernels.json]

Each kernel runs on tensors that a core's caches hold, and on larger ones, of up to 128 MiB; both sides write to memory
that is there. Times are of the processor, which others on the machine cannot take from it, and medians. The last line
is JSON: for each kernel and size the microseconds of both and their ratio, and how many are above the goal.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything starts threads

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hidet
import torch
from hidet import ops
from rich.console import Console
from rich.table import Table

from benchmarks.serving.host import describe
from hidet_dist.compile import compile_program
from hidet_dist.files import write_text
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.runtime.libraries import load_needed
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh

GOAL = 2.0  # times PyTorch's
ROUNDS = 9
SAMPLE_SECONDS = 0.02  # at least, of one measurement
aten = torch.ops.aten
Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Case:
    """An operator: ours on hidet's tensors, and PyTorch's into ``y``; the inputs' shapes in cache and beyond."""

    name: str
    ours: Callable[..., hidet.Tensor]
    theirs: Callable[..., Any]
    small: Shapes
    large: Shapes
    dtype: torch.dtype = torch.float32


FLAT: tuple[Shapes, Shapes] = ([[64, 1024]], [[16384, 1024]])
TWO_FLAT: tuple[Shapes, Shapes] = ([[64, 1024]] * 2, [[16384, 1024]] * 2)
# Outputs of no more than 32 MiB where PyTorch cannot be told where to write: so much it takes again from the heap.
ROWS: tuple[Shapes, Shapes] = ([[96, 768]], [[10240, 768]])
HEADS: tuple[Shapes, Shapes] = ([[1, 128, 12, 64]], [[64, 128, 12, 64]])
IMAGES: tuple[Shapes, Shapes] = ([[1, 64, 28, 28]], [[8, 64, 112, 112]])


def _cast(dtype: str) -> Callable[[hidet.Tensor], hidet.Tensor]:
    return lambda x: ops.cast(x, dtype)


def _copied(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    return lambda x, y: y.copy_(view(x))


CASES = (
    Case("relu", ops.relu, lambda x, y: torch.clamp_min(x, 0, out=y), *FLAT),
    Case("add", ops.add, lambda a, b, y: torch.add(a, b, out=y), *TWO_FLAT),
    Case("exp", ops.exp, lambda x, y: torch.exp(x, out=y), *FLAT),
    Case("log", lambda x: ops.log(ops.abs(x)), lambda x, y: torch.log(x, out=y), *FLAT),
    Case("tanh", ops.tanh, lambda x, y: torch.tanh(x, out=y), *FLAT),
    Case("erf", ops.erf, lambda x, y: torch.erf(x, out=y), *FLAT),
    Case("sigmoid", ops.sigmoid, lambda x, y: torch.sigmoid(x, out=y), *FLAT),
    Case("silu", ops.silu, lambda x, y: aten.silu.out(x, out=y), *FLAT),
    Case("gelu", ops.gelu, lambda x, y: aten.gelu.out(x, out=y), *FLAT),
    Case(
        "gelu (tanh)",
        lambda x: ops.gelu(x, approximate=True),
        lambda x, y: aten.gelu.out(x, approximate="tanh", out=y),
        *FLAT,
    ),
    Case("float32 to float16", _cast("float16"), _copied(lambda x: x), *FLAT),
    Case("float32 to bfloat16", _cast("bfloat16"), _copied(lambda x: x), *FLAT),
    Case("float16 to float32", _cast("float32"), _copied(lambda x: x), *FLAT, torch.float16),
    Case("bfloat16 to float32", _cast("float32"), _copied(lambda x: x), *FLAT, torch.bfloat16),
    Case("gelu of float16", ops.gelu, lambda x, y: aten.gelu.out(x, out=y), *FLAT, torch.float16),
    Case("softmax", lambda x: ops.softmax(x, -1), lambda x, y: aten._softmax.out(x, -1, False, out=y), *ROWS),
    Case("layer norm", ops.layer_norm, lambda x, y: torch.nn.functional.layer_norm(x, (768,)), *ROWS),
    Case("sum of rows", lambda x: ops.sum(x, [-1]), lambda x, y: torch.sum(x, [-1], out=y), *ROWS),
    Case("sum of columns", lambda x: ops.sum(x, [0]), lambda x, y: torch.sum(x, [0], out=y), *ROWS),
    Case("max of rows", lambda x: ops.max(x, [-1]), lambda x, y: torch.amax(x, [-1], out=y), *ROWS),
    Case("heads first", lambda x: ops.transpose(x, [0, 2, 1, 3]), _copied(lambda x: x.permute(0, 2, 1, 3)), *HEADS),
    Case("keys last", lambda x: ops.transpose(x, [0, 2, 3, 1]), _copied(lambda x: x.permute(0, 2, 3, 1)), *HEADS),
    Case("transpose", lambda x: ops.transpose(x, [1, 0]), _copied(lambda x: x.t()), *FLAT),
    Case(
        "mean of 7 x 7",
        lambda x: ops.mean(x, [2, 3]),
        lambda x, y: torch.mean(x, [2, 3], out=y),
        [[1, 1024, 7, 7]],
        [[256, 2048, 7, 7]],
    ),
    Case("mean of images", lambda x: ops.mean(x, [2, 3]), lambda x, y: torch.mean(x, [2, 3], out=y), *IMAGES),
    Case(
        "max pooling",
        lambda x: ops.max_pool2d(x, 3, 2, 1),
        lambda x, y: torch.nn.functional.max_pool2d(x, 3, 2, 1),
        *IMAGES,
    ),
    Case(
        "average pooling",
        lambda x: ops.avg_pool2d(x, 2, 2, 0),
        lambda x, y: aten.avg_pool2d.out(x, 2, 2, out=y),
        *IMAGES,
    ),
    Case(
        "depthwise",
        lambda x, w: ops.conv2d(ops.conv_pad(x, 1), w, groups=64),
        lambda x, w, y: torch.conv2d(x, w, padding=1, groups=64),
        [IMAGES[0][0], [64, 1, 3, 3]],
        [IMAGES[1][0], [64, 1, 3, 3]],
    ),
    Case(
        "depthwise, stride 2",
        lambda x, w: ops.conv2d(ops.conv_pad(x, 1), w, stride=2, groups=64),
        lambda x, w, y: torch.conv2d(x, w, stride=2, padding=1, groups=64),
        [IMAGES[0][0], [64, 1, 3, 3]],
        [IMAGES[1][0], [64, 1, 3, 3]],
    ),
)


def kernel(case: Case, inputs: Sequence[torch.Tensor], like: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
    """A call of our kernel, with no launch path around it, and what it writes to."""
    symbols = [hidet.symbol(list(x.shape), str(x.dtype).removeprefix("torch."), "cpu") for x in inputs]
    graph = normalize(hidet.trace_from(case.ours(*symbols), symbols))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    compiled = compile_program(program)
    assert len(compiled.kernels) == 1, compiled.kernel_names
    load_needed(compiled.libraries, Path())
    function = ctypes.CDLL(str(compiled.kernels[0])).hidet_launch_0
    y = torch.empty_like(like)
    arguments = [ctypes.c_void_p(x.data_ptr()) for x in (*inputs, y)]

    def call() -> None:
        function(*arguments)

    return call, y


def seconds(call: Callable[[], Any], times: int) -> float:
    """Of one call, in the middle of some."""
    begin = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - begin) / times


def measure(case: Case, shapes: Shapes) -> dict[str, float]:
    """The median microseconds of both, and the ratio."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(list(shape), generator=generator).to(case.dtype) for shape in shapes]
    if case.name == "log":
        inputs[0].abs_()
    out = _output(case, inputs)
    ours, y = kernel(case, inputs, out)

    def theirs() -> None:
        case.theirs(*inputs, out)

    ours()
    expected = case.theirs(*inputs, out)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(y.float(), expected.float(), rtol=2e-3, atol=2e-3)
    times = [max(1, int(SAMPLE_SECONDS / max(seconds(call, 2), 1e-7))) for call in (ours, theirs)]
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for number, call in enumerate((ours, theirs)):
            samples[number].append(seconds(call, times[number]))
    own, other = (statistics.median(own) * 1e6 for own in samples)
    return {"ours_microseconds": own, "pytorch_microseconds": other, "ratio": own / other}


def _output(case: Case, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Room for the result."""
    symbols = [hidet.symbol(list(x.shape), str(x.dtype).removeprefix("torch."), "cpu") for x in inputs]
    y = case.ours(*symbols)
    return torch.empty([int(size) for size in y.shape], dtype=getattr(torch, y.dtype.name))


def main() -> None:
    """Measure all, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="what to measure; all by default")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe()
    results: dict[str, dict[str, dict[str, float]]] = {}
    table = Table(title="Kernels beside PyTorch, one thread [µs]")
    for column in ("", "cached", "PyTorch", "ratio", "large", "PyTorch", "ratio"):
        table.add_column(column, justify="right")
    for case in CASES:
        if arguments.names and case.name not in arguments.names:
            continue
        own = {"cached": measure(case, case.small), "large": measure(case, case.large)}
        results[case.name] = own
        cells = [(size["ours_microseconds"], size["pytorch_microseconds"], size["ratio"]) for size in own.values()]
        table.add_row(case.name, *(f"{a:.1f}" if n < 2 else f"{a:.2f}" for cell in cells for n, a in enumerate(cell)))
    Console(width=110).print(table)
    above = sum(size["ratio"] > GOAL for own in results.values() for size in own.values())
    summary = {"goal": GOAL, "above_goal": above, "kernels": results}
    if arguments.out is not None:
        write_text(arguments.out, json.dumps({"machine": machine, **summary}, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
