"""Exchanges of wanted rows on GPUs: the kernels around them, on the emulator, and what a program becomes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph import FlowGraph
from tests.emulator import emulated
from tests.emulator.emulated import Emulator

import hidet_dist
from hidet_dist.compile import compile_program
from hidet_dist.compile.cuda.row_exchange import PackedRowExchangeOp, RowKernelOp, pack_row_exchanges
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import Program, partition_graph
from hidet_dist.partitioning.operators import SplitOrder
from hidet_dist.partitioning.row_exchange import RowExchangeOp, wanted_rows
from hidet_dist.toolchain.cuda import Toolkit

RANKS, ROWS, HIDDEN = 3, 21, 40  # more rows than a block has

_LAUNCH = """
#include "hidet_dist/kernels/cuda/row_exchange.h"
#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace hidet_dist::cuda::row_exchange;
static Wanted of(void *mask, void *own, bool of_others) {{
  return {{ (const uint8_t *)mask, {ranks}, {rows}, *(const int64_t *)own, of_others }};
}}
EXPORT void hidet_launch_0(void *mask, void *own, void *rows, void *packed) {{
  pack<uint4>(of(mask, own, false), (const uint4 *)rows, (uint4 *)packed, {hidden} / 4);
}}
EXPORT void hidet_launch_1(void *mask, void *own, void *rows, void *packed) {{
  pack<uint2>(of(mask, own, true), (const uint2 *)rows, (uint2 *)packed, {hidden} / 2);
}}
EXPORT void hidet_launch_2(void *mask, void *own, void *rows, void *packed,
                             void *result) {{
  unpack<uint32_t>(of(mask, own, true), (const uint32_t *)rows, (const uint32_t *)packed, (uint32_t *)result, {hidden});
}}
EXPORT void hidet_launch_3(void *mask, void *own, void *rows, void *packed,
                             void *result) {{
  add<float, float>(of(mask, own, false), (const float *)rows, (const float *)packed, (float *)result, {hidden});
}}
EXPORT void hidet_launch_4(void *mask, void *own, void *rows, void *packed,
                             void *result) {{
  add<__half, float>(of(mask, own, false), (const __half *)rows, (const __half *)packed, (__half *)result, {hidden});
}}
"""
PACK_OWN, PACK_OTHERS, UNPACK, ADD, ADD_HALVES = range(5)


@pytest.fixture(scope="module")
def kernels(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    source = folder / "rows.cu"
    source.write_text(_LAUNCH.format(ranks=RANKS, rows=ROWS, hidden=HIDDEN))
    return emulator.compile(source, folder / "rows.so")


def launch(kernels: Path, function: int, wanted: np.ndarray, rank: int, *arrays: np.ndarray) -> np.ndarray:
    """What a kernel leaves in its last argument."""
    own = np.array([rank], np.int64)
    result: np.ndarray = emulated.run(kernels, wanted, own, *arrays, candidate=function)[-1]
    return result


def exchanged(graph: FlowGraph, packed: Sequence[np.ndarray], wanted: np.ndarray, rank: int) -> np.ndarray:
    (op,) = [node for node in graph.nodes if isinstance(node, PackedRowExchangeOp)]
    return op.result([(one, wanted) for one in packed], rank, lambda parts: np.sum(parts, axis=0))


def graphs(kind: str, dtype: str = "float32") -> tuple[RowExchangeOp, FlowGraph]:
    """An exchange, and the program that it becomes."""
    first, extent = (ROWS, RANKS * ROWS) if kind == "gather_rows" else (RANKS * ROWS, ROWS)
    x = hidet.symbol([first, HIDDEN], dtype, "cpu")
    wanted = hidet.symbol([RANKS, RANKS * ROWS], "uint8", "cpu")
    op = RowExchangeOp(x, wanted, kind, [0], RANKS, extent)
    return op, pack_row_exchanges(FlowGraph(op.outputs, [x, wanted]))


def masks() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shape = (RANKS, RANKS * ROWS)
    return [np.zeros(shape, np.uint8), (random.random(shape) < 0.4).astype(np.uint8), np.ones(shape, np.uint8)]


def test_rows_are_packed_for_an_exchange_and_unpacked(kernels: Path) -> None:
    op, graph = graphs("gather_rows")
    assert [node.name for node in graph.nodes] == ["PackRows", "GatherRows", "UnpackRows"]
    random = np.random.default_rng(1)
    for wanted in masks():
        shards = [random.standard_normal((ROWS, HIDDEN), np.float32) for _ in range(RANKS)]
        room = np.full(((RANKS - 1) * ROWS, HIDDEN), np.nan, np.float32)
        packed = [launch(kernels, PACK_OWN, wanted, rank, shard, room) for rank, shard in enumerate(shards)]
        for rank in range(RANKS):
            received = exchanged(graph, packed, wanted, rank)
            whole = np.full((RANKS * ROWS, HIDDEN), np.nan, np.float32)
            got = launch(kernels, UNPACK, wanted, rank, shards[rank], received, whole)
            expected = op.result([(shard, wanted) for shard in shards], rank, lambda parts: np.sum(parts, axis=0))
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_packed_for_an_exchange_and_added_up(kernels: Path, dtype: str) -> None:
    op, graph = graphs("reduce_scatter_rows", dtype)
    assert [node.name for node in graph.nodes] == ["PackRows", "ReduceScatterRows", "AddRows"]
    random = np.random.default_rng(2)
    for wanted in masks():
        results = [random.integers(-9, 9, (RANKS * ROWS, HIDDEN)).astype(np.float32) for _ in range(RANKS)]
        for rank, result in enumerate(results):  # what is not wanted is not read
            result[wanted[rank] == 0] = np.nan
        room = np.full(((RANKS - 1) * ROWS, HIDDEN), np.nan, np.float32)
        packed = [launch(kernels, PACK_OTHERS, wanted, rank, result, room) for rank, result in enumerate(results)]
        for rank in range(RANKS):
            received = exchanged(graph, packed, wanted, rank)
            given = [one.astype(dtype) for one in (results[rank], received, np.full((ROWS, HIDDEN), np.nan))]
            got = launch(kernels, ADD if dtype == "float32" else ADD_HALVES, wanted, rank, *given)
            expected = op.result([(one, wanted) for one in results], rank, lambda parts: np.sum(parts, axis=0))
            np.testing.assert_array_equal(got, expected.astype(dtype))


def test_widths_of_copies_follow_rows() -> None:
    statements = []
    for hidden, dtype in ((8, "float32"), (6, "float32"), (3, "bfloat16"), (5, "int8")):
        x, wanted = hidet.symbol([2, hidden], dtype, "cpu"), hidet.symbol([2, 4], "uint8", "cpu")
        op = RowKernelOp(x, wanted, function="pack", group=([0], 2), of_others=False, shape=[2, hidden])
        statements.append(op.task.call.statement.partition("pack<")[2].partition(">")[0])
    assert statements == ["uint4", "uint2", "uint16_t", "uint8_t"]


def program_of(dtype: str, target: CudaTarget) -> Program:
    """Rows that go to experts of two ranks and back, in the place of a sum that was planned."""
    x, chosen = hidet.symbol([6, 8], dtype, "cpu"), hidet.symbol([6, 2], "int32", "cpu")
    dense = hidet.trace_from(x + ops.cast(ops.sum(chosen, [1], keep_dim=True), dtype), [x, chosen])
    pins = {"x0": "(S0, R)", "x1": "(R, R)", "y0": "(S0, R)"}
    plan = hidet_dist.make_plan(dense, {"mesh_shape": [2]}, {"pins": pins})
    program = partition_graph(normalize(dense), plan.stages[0], target=target)
    local, choices, *_ = program.graph.inputs
    mask = wanted_rows(choices, 2, SplitOrder((0,), (2,)))
    (dispatched,) = RowExchangeOp(local, mask, "gather_rows", [0], 2, 6).outputs
    (combined,) = RowExchangeOp(dispatched + dispatched, mask, "reduce_scatter_rows", [0], 2, 3).outputs
    program.graph = FlowGraph([combined], program.graph.inputs)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_with_exchanges_compile_and_are_not_captured(nvcc: Toolkit, dtype: str) -> None:
    target = CudaTarget(GPUS["H100-SXM5-80GB"], cuda_graph=True)
    compiled = compile_program(program_of(dtype, target), target)
    assert [node.name for node in compiled.graph.nodes] == [
        *("WantedRows", "PackRows", "GatherRows", "UnpackRows"),
        *("Add", "PackRows", "ReduceScatterRows", "AddRows"),
    ]
    assert not compiled.stage.cuda_graph
    descriptions = [launch.communication for launch in compiled.stage.launches if launch.communication]
    assert [text.partition("(")[0] for text in descriptions] == ["gather_rows", "reduce_scatter_rows"]
