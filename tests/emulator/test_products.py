"""Matrix products on tensor cores as they are built, with what is fused behind them: the numbers, on the emulator."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hidet import ops
from hidet.graph import FlowGraph, Tensor
from tests.emulator.emulated import Emulator, run

from hidet_dist.compile import CompiledProgram, compile_program
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import models

H100 = CudaTarget(GPUS["H100-SXM5-80GB"])


@pytest.fixture(autouse=True)
def emulated(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))


def array(*shape: int, dtype: str = "float16") -> np.ndarray:
    return (np.random.default_rng(sum(shape)).integers(-4, 5, shape) / 4).astype(dtype)


def constant(*shape: int, dtype: str = "float16") -> Tensor:
    return hidet.asarray(array(*shape, dtype=dtype))


def built(
    graph: FlowGraph, inputs: list[np.ndarray], target: CudaTarget = H100
) -> tuple[CompiledProgram, dict[Tensor, np.ndarray]]:
    """A compiled program, and the values of its inputs and weights."""
    normal = normalize(graph)
    plan = search(normal, builtin("dgx-h100", DeviceMesh((1,)))).plan
    program = partition_graph(normal, plan.stages[0], target=target)
    compiled = compile_program(program, target)
    data = program.data_of(0)
    values = dict(zip(compiled.graph.inputs, inputs, strict=False))
    values |= {placeholder: data[name].numpy() for name, placeholder in program.weight_placeholders.items()}
    return compiled, values


def run_kernels(graph: FlowGraph, inputs: list[np.ndarray]) -> np.ndarray:
    """The results of a program's kernels, in order. Kernels are identified by their operators' names."""
    compiled, values = built(graph, inputs)
    for node, number in zip(compiled.graph.nodes, compiled.kernel_of_node, strict=True):
        given = [values[x] for x in node.inputs]
        results = [np.full([int(size) for size in y.shape], -7, y.dtype.name) for y in node.outputs]
        if node.share_map:
            found = [given[0].reshape(results[0].shape)]
        else:
            found = list(run(compiled.kernels[number], *given, *results))[len(given) :]
        values.update(zip(node.outputs, found, strict=True))
    return np.asarray(values[compiled.graph.outputs[0]])


M, K = 48, 96
X = array(M, K)


def biased(x: Tensor) -> Tensor:
    """Columns in two tiles, the second of which is not full."""
    return ops.matmul(x, constant(K, 200)) + constant(200)


def activated(x: Tensor) -> Tensor:
    return ops.silu(ops.matmul(x, constant(K, 136)) + constant(136)) * 0.5


def residual(x: Tensor) -> Tensor:
    return ops.matmul(x, constant(K, 128)) + constant(128) + constant(M, 128)


def residual_in_float32(x: Tensor) -> Tensor:
    return ops.cast(ops.matmul(x, constant(K, 64)) + constant(64), "float32") + constant(M, 64, dtype="float32")


def by_rows(x: Tensor) -> Tensor:
    """A vector that is broadcast along the columns."""
    return ops.matmul(x, constant(K, 72)) * constant(M, 1)


def heads(x: Tensor) -> Tensor:
    """As queries are: split into heads, which become the outer dim."""
    y = ops.matmul(x, constant(K, 4 * 40)) + constant(4 * 40)
    return ops.permute_dims(ops.reshape(y, [2, M // 2, 4, 40]), [0, 2, 1, 3])


def heads_transposed(x: Tensor) -> Tensor:
    """As keys are."""
    y = ops.matmul(x, constant(K, 4 * 40)) + constant(4 * 40)
    return ops.permute_dims(ops.reshape(y, [2, M // 2, 4, 40]), [0, 2, 3, 1])


def of_odd_rows(x: Tensor) -> Tensor:
    """Rows whose places are not aligned to more than four bytes."""
    return ops.matmul(x, constant(K, 50)) + constant(50)


def by_odd_columns(x: Tensor) -> Tensor:
    """A head whose weight is that of the embeddings."""
    return ops.matmul(x, ops.permute_dims(constant(101, K), [1, 0])) + constant(101)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_all_candidates_are_right(dtype: str) -> None:
    """Those that hidet builds for one product, of which a GPU takes the fastest."""
    x = hidet.symbol([M, K], dtype, "cpu")
    graph = hidet.trace_from(ops.matmul(x, constant(K, 128, dtype=dtype)) + constant(128, dtype=dtype), [x])
    target = CudaTarget(GPUS["H100-SXM5-80GB"], space=1)
    compiled, values = built(graph, [array(M, K, dtype=dtype)], target)
    (node,) = (node for node in compiled.graph.nodes if not node.share_map)
    (count,) = compiled.candidates
    assert count > 1
    (expected,) = models.run_whole(graph, [array(M, K, dtype=dtype)])
    result = np.full([int(size) for size in node.outputs[0].shape], -7, dtype)
    for candidate in range(count):
        *_, found = run(compiled.kernels[0], *(values[x] for x in node.inputs), result, candidate=candidate)
        np.testing.assert_allclose(
            found.reshape(expected.shape).astype(np.float32),
            expected.astype(np.float32),
            rtol=4e-3,
            atol=4e-2,
            err_msg=f"candidate {candidate} of {count}",
        )


QUICK = [by_odd_columns]
SLOW = [residual_in_float32, by_rows, heads_transposed, biased, activated, residual, heads, of_odd_rows]


@pytest.mark.parametrize("make", [*QUICK, *(pytest.param(own, marks=pytest.mark.slow) for own in SLOW)])
def test_operators_fused_after_a_product_are_right(make, capfd):  # type: ignore[no-untyped-def]
    x = hidet.symbol([M, K], "float16", "cpu")
    graph = hidet.trace_from(make(x), [x])
    found = run_kernels(graph, [X])
    assert "fallback" not in "".join(capfd.readouterr())
    (expected,) = models.run_whole(graph, [X])
    np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), rtol=4e-3, atol=4e-2)
