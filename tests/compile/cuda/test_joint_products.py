"""Products of one left operand as one launch: the numbers and bits of separate products, on the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import hidet
import numpy as np
import pytest
import torch
from hidet import ops
from hidet.graph import FlowGraph, Tensor
from tests.emulator.emulated import Emulator, run

import hidet_dist
from hidet_dist.compile import CompiledProgram, compile_program, optimize_program
from hidet_dist.compile.cuda import joined
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.normalize.precision import in_precision
from hidet_dist.normalize.storage import with_storages
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.spec.extents import evaluate, extents_of
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.testing import models, shapes
from hidet_dist.testing.rounding import rounded_weight
from hidet_dist.weights.packing import packed
from hidet_dist.weights.panels import StoredPrecision

H100 = CudaTarget(GPUS["H100-SXM5-80GB"])
ROWS, DEPTH = 40, 96


@pytest.fixture
def emulated(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A call after which products are launched one by one, with the same operators fused behind them."""
    yield lambda: monkeypatch.setattr(joined, "joint_products", lambda graph: graph)


def array(*shape: int, dtype: str, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).integers(-8, 9, shape) / 8).astype(dtype)


def constant(*shape: int, dtype: str, seed: int = 0) -> Tensor:
    return hidet.asarray(array(*shape, dtype=dtype, seed=seed))


def built(graph: FlowGraph, sizes: Mapping[str, int] | None = None) -> tuple[CompiledProgram, dict[Tensor, np.ndarray]]:
    """A compiled program of one rank, and the values of its weights."""
    normal = normalize(graph)
    symbols = {name: SymbolSize(size) for name, size in (sizes or {}).items()}
    plan = search(normal, builtin("dgx-h100", DeviceMesh((1,))), symbols=symbols).plan
    program = partition_graph(normal, plan.stages[0], target=H100)
    compiled = compile_program(program, H100)
    data = program.data_of(0)
    return compiled, {x: data[name].numpy() for name, x in program.weight_placeholders.items()}


def outputs(
    program: tuple[CompiledProgram, dict[Tensor, np.ndarray]],
    inputs: Sequence[np.ndarray],
    sizes: Mapping[str, int] | None = None,
) -> list[np.ndarray]:
    """The results of a program's kernels, in order, for any sizes of symbolic dims."""
    compiled, weights = program
    values = {**weights, **dict(zip(compiled.graph.inputs, inputs, strict=False))}
    for node, number in zip(compiled.graph.nodes, compiled.kernel_of_node, strict=True):
        given = [values[x] for x in node.inputs]
        shapes = [[evaluate(extent, sizes or {}) for extent in extents_of(y)] for y in node.outputs]
        results = [np.full(shape, -7, y.dtype.name) for shape, y in zip(shapes, node.outputs, strict=True)]
        if node.share_map:
            found = [given[0].reshape(shapes[0])]
        else:
            found = list(run(compiled.kernels[number], *given, *results, sizes=sizes))[len(given) :]
        values.update(zip(node.outputs, found, strict=True))
    return [values[y] for y in compiled.graph.outputs]


def attention_operands(rows: int | str, dtype: str) -> FlowGraph:
    """Queries of more columns than keys and values, with biases; keys are transposed, values cast."""
    x = hidet.symbol([rows, DEPTH], dtype, "cpu")

    def projected(columns: int, seed: int) -> Tensor:
        weight, bias = constant(DEPTH, columns, dtype=dtype, seed=seed), constant(columns, dtype=dtype, seed=seed)
        return ops.matmul(x, weight) + bias

    q, k, v = projected(136, 0), projected(64, 1), projected(64, 2)
    return hidet.trace_from([q * 0.5, ops.permute_dims(k, [1, 0]), ops.cast(v, "float32")], [x])


def gated(rows: int | str, dtype: str) -> FlowGraph:
    """An operator behind one product that reads the result of another."""
    x = hidet.symbol([rows, DEPTH], dtype, "cpu")
    gate, up = (ops.matmul(x, constant(DEPTH, 64, dtype=dtype, seed=seed)) for seed in (0, 1))
    return hidet.trace_from([ops.silu(gate) * up + 1.0], [x])


def joint_names(compiled: CompiledProgram) -> list[str]:
    return [node.name for node in compiled.graph.nodes if node.name.startswith("Joint")]


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("make", [attention_operands, gated])
def test_results_are_those_of_separate_products_bit_by_bit(
    make: Callable[[int | str, str], FlowGraph], dtype: str, apart: Callable[[], None]
) -> None:
    graph, x = make(ROWS, dtype), array(ROWS, DEPTH, dtype=dtype)
    together = built(graph)
    assert len(joint_names(together[0])) == 1
    found = outputs(together, [x])
    apart()
    separate = built(graph)
    assert not joint_names(separate[0])
    assert len(separate[0].graph.nodes) > len(together[0].graph.nodes)
    for one, other, expected in zip(found, outputs(separate, [x]), models.run_whole(graph, [x]), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one.astype(np.float32), expected.astype(np.float32), rtol=4e-3, atol=4e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_number_of_rows(dtype: str) -> None:
    graph = attention_operands("rows", dtype)
    program = built(graph, {"rows": ROWS})
    assert len(joint_names(program[0])) == 1
    for count in (1, 150):
        x = array(count, DEPTH, dtype=dtype)
        expected = models.run_whole(attention_operands(count, dtype), [x])
        for y, other in zip(outputs(program, [x], {"rows": count}), expected, strict=True):
            np.testing.assert_allclose(y.astype(np.float32), other.astype(np.float32), rtol=4e-3, atol=4e-2)


class Projections(torch.nn.Module):
    """Linear layers of one input, of different numbers of columns."""

    def __init__(self, columns: Sequence[int]):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(DEPTH, count, bias=False) for count in columns)
        for layer in self.layers:
            layer.weight.data = torch.randn(layer.weight.shape, generator=generator)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The result of each layer."""
        return [layer(x) for layer in self.layers]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int4", "float32"),
        pytest.param("int4", "float16", marks=pytest.mark.slow),
        pytest.param("int8", "float32", marks=pytest.mark.slow),
        pytest.param("int8", "float16", marks=pytest.mark.slow),
    ],
)
def test_products_by_weights_of_few_bits_are_those_of_the_rounded_weights(name: str, dtype: str) -> None:
    module, precision, columns = Projections((72, 40, 32)).eval(), StoredPrecision(name, 32), (72, 40, 32)
    rows = torch.export.Dim("rows", min=1)
    traced = hidet_dist.from_torch(module, (torch.zeros(3, DEPTH),), ({0: rows},))
    graph = normalize(traced if dtype == "float32" else in_precision(traced, dtype).graph)
    storage = partial(H100.storage, precision, 2)
    graph = with_storages(graph, H100.record.quantized_dtypes, lambda _, transposed: storage(transposed)).graph
    plan = search(graph, builtin("dgx-h100", DeviceMesh((1,))), symbols={"rows": SymbolSize(3)}).plan
    program = partition_graph(graph, plan.stages[0], target=H100)
    compiled = compile_program(program, H100)
    assert compiled.kernel_names.count("JointQuantizedMatmul") == 1
    assert "QuantizedMatmul" not in compiled.kernel_names
    assert sorted(panels.columns for panels in compiled.stage.panels.values()) == sorted(columns)
    whole = program.data_of(0)
    held = {name: packed(whole[name], panels).numpy() for name, panels in compiled.stage.panels.items()}
    wanted, tolerance = getattr(torch, dtype), {"float32": 1e-5, "float16": 2e-3}[dtype]
    for count in (1, 9, 130):
        x = torch.randn(count, DEPTH, generator=torch.Generator().manual_seed(count))
        found = outputs((compiled, weights_of(compiled, held)), [x.numpy()], {"rows": count})
        for y, layer in zip(found, module.layers, strict=True):
            weight = rounded_weight(layer.weight.data.to(wanted), name, 32)
            exact = x.to(wanted).double() @ weight.double().T
            assert np.abs(y - exact.numpy()).max() <= tolerance * exact.abs().max()


def weights_of(compiled: CompiledProgram, held: Mapping[str, np.ndarray]) -> dict[Tensor, np.ndarray]:
    """The values of the weights that kernels read, which are the program's data in the order of inputs."""
    given = set(compiled.graph.inputs[: len(compiled.stage.inputs)])
    read = {x for node in compiled.graph.nodes for x in node.inputs if x.op is None} - given
    weights = [x for x in compiled.graph.inputs if x in read]
    return dict(zip(weights, (held[name] for name in compiled.data), strict=True))


def test_blocks_of_one_tensor_are_not_taken_for_one_another(no_compiler: None) -> None:
    """They lie in the memory of one tensor, as what renames it does."""
    x = hidet.symbol([8, 32, DEPTH], "float32", "cpu")
    rows = [ops.reshape(ops.strided_slice(x, [n], [n + 1], [0]), [32, DEPTH]) for n in range(2)]
    products = [ops.matmul(y, constant(DEPTH, 64, dtype="float32", seed=n)) for n, y in enumerate(rows)]
    graph = hidet.trace_from(products, [x])
    normal = normalize(graph)
    plan = search(normal, builtin("dgx-h100", DeviceMesh((1,)))).plan
    nodes = optimize_program(partition_graph(normal, plan.stages[0], target=H100), H100).nodes
    assert sum("Matmul" in node.name for node in nodes) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_are_joined_and_weights_stay_apart(no_compiler: None, ranks: int) -> None:
    """Each rank's part of queries, keys and values is one launch, and nothing else of the program differs."""
    graph = shapes.llama(shapes.LlamaConfig(1, 256, 4, 2, 512, 512, 1, 64, "float32"))
    normal = H100.prepare(normalize(graph), ranks)[0]
    plan = search(normal, builtin("dgx-h100", DeviceMesh((ranks,)))).plan
    program = partition_graph(normal, plan.stages[0], target=H100)
    optimized = optimize_program(program, H100)
    joint = [node for node in optimized.nodes if node.name.startswith("Joint")]
    assert [len(node.outputs) for node in joint] == [3, 2]
    read = {x for node in joint for x in node.inputs}
    assert len(read & set(program.weight_placeholders.values())) == 5
    graph, packed_weights = H100.pack(optimized, program.weight_placeholders, (), {})
    assert not packed_weights
