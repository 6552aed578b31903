"""Small programs whose time tells what a device does: built as any program is, so that serving has the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hidet
from hidet import ops
from hidet.graph import FlowGraph, Operator, Tensor

from hidet_dist.artifacts.write import write_artifacts
from hidet_dist.compile import compile_program
from hidet_dist.machine.builtin import builtin
from hidet_dist.machine.kernels import Work
from hidet_dist.partition import partition_graph
from hidet_dist.rules.rule import Choice, RuleTable
from hidet_dist.search import find
from hidet_dist.search.cost import PredictedCost, compute_seconds
from hidet_dist.search.work import work_of
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView

_FAST_SIDE, _SLOW_SIDE = 1024, 128  # rows and columns: OpenBLAS's, and those of hidet's generic kernels
_STREAM_ELEMENTS = 2**24  # 64 MiB in float32: more than a cache holds
_CHAIN = 128  # kernels in a row, for the time between two


@dataclass(frozen=True)
class Probe:
    """A program and what one run of it does: scalar operations, bytes read and written, kernels launched.

    ``kernel`` is the class of its kernels, where it is there to tell what those cost.
    """

    name: str
    build: Callable[[], FlowGraph]
    operations: int = 0
    moved_bytes: int = 0
    launches: int = 1
    kernel: str = ""


def matmul(dtype: str) -> Probe:
    """A product of square matrices of ``dtype``, whose operations are multiplications and additions."""
    side = _FAST_SIDE if dtype == "float32" else _SLOW_SIDE

    def build() -> FlowGraph:
        # NumPy has no bfloat16: what it cannot feed is cast on the way in and out.
        outside = "float32" if dtype == "bfloat16" else dtype
        a, b = (hidet.symbol([side, side], outside, "cpu") for _ in range(2))
        product = ops.matmul(a.to(dtype), b.to(dtype)).to(outside)
        return hidet.trace_from(product, [a, b])

    return Probe(f"matmul_{dtype}", build, operations=2 * side**3)


def stream() -> Probe:
    """An element-wise operator on more than a cache holds."""

    def build() -> FlowGraph:
        x = hidet.symbol([_STREAM_ELEMENTS], "float32", "cpu")
        return hidet.trace_from(ops.relu(x), [x])

    return Probe("stream", build, moved_bytes=2 * 4 * _STREAM_ELEMENTS)


def chain() -> Probe:
    """Kernels with next to nothing to do, which no fusion makes one: each reduces what the one before gave.

    Each takes a mean of two rows: a mean of one would be no kernel at all.
    """

    def build() -> FlowGraph:
        x = hidet.symbol([2, 16], "float32", "cpu")
        y = ops.mean(x, [0], keep_dim=True)
        for _ in range(_CHAIN - 1):
            y = ops.mean(y + x, [0], keep_dim=True)
        return hidet.trace_from(y, [x])

    return Probe("chain", build, launches=_CHAIN)


def _of(kernel: str, name: str, shapes: Sequence[Sequence[int]], call: Callable[..., Tensor]) -> Probe:
    """A probe of a class of kernels: ``call`` on float32 inputs of ``shapes``."""

    def build() -> FlowGraph:
        inputs = [hidet.symbol(list(shape), "float32", "cpu") for shape in shapes]
        return hidet.trace_from(call(*inputs), inputs)

    return Probe(f"{kernel}_{name}", build, kernel=kernel)


def _through(*widths: int) -> Callable[[Tensor], Tensor]:
    """Products with one weight after the other: more of them than a cache holds."""

    def call(x: Tensor) -> Tensor:
        for rows, columns in zip(widths, widths[1:], strict=False):
            x = ops.matmul(x, hidet.zeros([rows, columns], device="cpu"))
        return x

    return call


def _lookup() -> Probe:
    def build() -> FlowGraph:
        ids = hidet.symbol([1024], "int32", "cpu")
        return hidet.trace_from(ops.take(hidet.zeros([30000, 384], device="cpu"), ids), [ids])

    return Probe("lookup_rows", build, kernel="lookup")


def kernel_probes() -> list[Probe]:
    """Of each class of kernels some, of sizes that the layers of transformers and convolutional networks have."""
    return [
        _of("matmul", "square", [[1024, 1024]] * 2, ops.matmul),
        _of("matmul", "tall", [[1024, 384], [384, 1536]], ops.matmul),
        _of("matmul", "stack", [[96, 128, 32], [96, 32, 128]], ops.matmul),
        _of("matmul", "deep_stack", [[96, 128, 128], [96, 128, 64]], ops.matmul),
        _of("matmul", "weights", [[128, 768]], _through(*[768, 3072] * 4)),
        _of("convolution", "wide", [[1, 64, 56, 56], [64, 64, 3, 3]], lambda x, w: ops.conv2d(x, w, padding=1)),
        _of("convolution", "deep", [[1, 256, 14, 14], [256, 256, 3, 3]], lambda x, w: ops.conv2d(x, w, padding=1)),
        _of("convolution", "point", [[1, 256, 56, 56], [64, 256, 1, 1]], ops.conv2d),
        _of("convolution", "points", [[8, 1024, 14, 14], [256, 1024, 1, 1]], ops.conv2d),
        _of(
            "convolution", "strided", [[1, 128, 56, 56], [128, 128, 3, 3]], lambda x, w: ops.conv2d(x, w, 2, padding=1)
        ),
        _of("normalization", "rows", [[1024, 384]], ops.layer_norm),
        _of("normalization", "few", [[128, 768]], ops.layer_norm),
        _of("reduction", "rows", [[1024, 768]], lambda x: ops.sum(x, dims=-1)),
        _of("reduction", "columns", [[8, 128, 384]], lambda x: ops.sum(x, dims=1)),
        _of("pooling", "windows", [[1, 64, 112, 112]], lambda x: ops.max_pool2d(x, 3, 2, 1)),
        _lookup(),
        _of("copy", "heads", [[8, 128, 12, 32]], lambda x: ops.transpose(x, [0, 2, 1, 3])),
        _of("copy", "few_heads", [[1, 128, 12, 64]], lambda x: ops.transpose(x, [0, 2, 1, 3])),
        _of("elementwise", "sum", [[1024, 1536]] * 2, ops.add),
        _of("elementwise", "few", [[128, 768]] * 2, ops.add),
        _of("elementwise", "long", [[1024, 1536]], lambda x: ((x * 2.0 + 1.0) * x - 3.0) * x + 0.5),
        _of("function", "erf", [[1024, 1536]], ops.gelu),
        _of("function", "exp", [[1024, 1536]], ops.silu),
    ]


def probes(dtypes: Sequence[str]) -> list[Probe]:
    """All probes; of the square products those of ``dtypes``."""
    return [*(matmul(dtype) for dtype in dtypes), stream(), chain(), *kernel_probes()]


def build_probe(probe: Probe, mesh: DeviceMesh, folder: Path) -> None:
    """Build artifacts of a probe, in which every rank of the mesh runs the whole of it."""
    graph = probe.build()
    plan = find(graph, builtin("cpu", mesh), allow=lambda _, spec: all(s.is_replicated for s in spec.in_specs)).plan
    program = partition_graph(graph, plan)
    folder.mkdir()
    write_artifacts(folder, plan, program, compile_program(program, "cpu"), "cpu")


class _Counting(PredictedCost):
    """Notes the work of kernels as the search counts it."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__(builtin("cpu", mesh))
        self.work: list[Work] = []

    def operator(self, op: Operator, choice: Choice) -> float:
        return self._note(op, choice, None)

    def absorbed(self, op: Operator, choice: Choice, nbytes: int) -> float:
        return self._note(op, choice, nbytes)

    def _note(self, op: Operator, choice: Choice, nbytes: int | None) -> float:
        if choice.read_bytes + choice.written_bytes:
            self.work.append(work_of(op, choice, self.cluster.mesh, nbytes))
        return 0.0


def work_in(probe: Probe) -> tuple[list[Work], int]:
    """The work of a probe's kernels as the search counts it, and how many of them are launched."""
    view, mesh = GraphView(probe.build()), DeviceMesh((1,))
    table, counting = RuleTable(mesh), _Counting(mesh)
    fused = counting.fused(view)
    launches = 0
    for number, op in enumerate(view.operators):
        (choice,) = _whole(table(op)[1])
        before = len(counting.work)
        compute_seconds(counting, view, number, choice, fused.get(number), mesh)
        launches += len(counting.work) > before and number not in fused
    return counting.work, launches


def _whole(choices: Sequence[Choice]) -> Iterator[Any]:
    return (choice for choice in choices if all(spec.is_replicated for spec in choice.spec.in_specs))
