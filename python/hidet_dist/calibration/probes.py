"""Probe programs, built as for serving; a device's rates are computed from their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hidet
from hidet.graph import FlowGraph

from hidet_dist.artifacts.manifest import MAIN
from hidet_dist.compile import compile_program
from hidet_dist.export.write import BuiltProgram, write_artifacts
from hidet_dist.machine.builtin import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh

_FAST_SIDE, _SLOW_SIDE = 1024, 128  # rows and columns of products: for OpenBLAS, and for hidet's generic kernels
_FAST_DTYPES = ("float32", "float16", "bfloat16")  # those that OpenBLAS multiplies; halves are converted to float32
_STREAM_ELEMENTS = 2**24  # 64 MiB in float32: larger than caches
_CHAIN = 128  # kernels in a chain, for the time between two of them


@dataclass(frozen=True)
class Probe:
    """A program, and the work of one run: scalar operations, bytes read and written, kernels launched."""

    name: str
    build: Callable[[], FlowGraph]
    operations: int = 0
    moved_bytes: int = 0
    launches: int = 1


def matmul(dtype: str) -> Probe:
    """Make the probe of arithmetic in a dtype: a product of square matrices."""
    side = _FAST_SIDE if dtype in _FAST_DTYPES else _SLOW_SIDE

    def build() -> FlowGraph:
        # NumPy has no bfloat16, so the probe casts its inputs and its output.
        outside = "float32" if dtype == "bfloat16" else dtype
        a, b = (hidet.symbol([side, side], outside, "cpu") for _ in range(2))
        product = hidet.ops.matmul(a.to(dtype), b.to(dtype)).to(outside)
        return hidet.trace_from(product, [a, b])

    return Probe(f"matmul_{dtype}", build, operations=2 * side**3, launches=3 if dtype == "bfloat16" else 1)


def stream() -> Probe:
    """Make the probe of memory bandwidth: an element-wise operator on a tensor larger than any cache."""

    def build() -> FlowGraph:
        x = hidet.symbol([_STREAM_ELEMENTS], "float32", "cpu")
        return hidet.trace_from(hidet.ops.relu(x), [x])

    return Probe("stream", build, moved_bytes=2 * 4 * _STREAM_ELEMENTS)


def chain() -> Probe:
    """Make the probe of launches: a chain of tiny kernels that do not fuse, cumulative sums of two rows."""

    def build() -> FlowGraph:
        x = y = hidet.symbol([2, 16], "float32", "cpu")
        for _ in range(_CHAIN):
            y = hidet.ops.cumsum(y, 0)
        return hidet.trace_from(y, [x])

    return Probe("chain", build, launches=_CHAIN)


def probes(dtypes: Sequence[str]) -> list[Probe]:
    """List all probes, with matrix products of ``dtypes``."""
    return [*(matmul(dtype) for dtype in dtypes), stream(), chain()]


def build_probe(probe: Probe, mesh: DeviceMesh, folder: Path) -> None:
    """Build artifacts of a probe that every rank of the mesh runs whole."""
    graph = normalize(probe.build())
    plan = search(graph, builtin("cpu", mesh), allow=lambda _, spec: all(s.is_replicated for s in spec.in_specs)).plan
    program = partition_graph(graph, plan.stages[0])
    folder.mkdir()
    write_artifacts(folder, {MAIN: BuiltProgram(plan, [(program, compile_program(program))])})
