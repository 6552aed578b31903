"""Graphs whose weights are names and shapes: planned and partitioned with nothing on disk, then bound to files."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
import torch
from hidet.graph import FlowGraph
from safetensors.torch import save_file

from hidet_dist.errors import ConfigError, WeightsError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.rules.declared import definition_of
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import search
from hidet_dist.soundness.oracle import evaluate, numpy_dtype
from hidet_dist.soundness.plans import evaluate_program, graph_inputs, random_stage
from hidet_dist.spec import DeviceMesh, TensorShardSpec
from hidet_dist.spec.plan import TensorPlan
from hidet_dist.testing import shapes
from hidet_dist.view import GraphView
from hidet_dist.weights import SafetensorsFiles, names_of, read_shard, shard_blocks, source_of
from hidet_dist.weights.named import weight_as

dist = hidet.distributed
TINY_LLAMA = shapes.LlamaConfig(
    layers=1, hidden=16, heads=4, kv_heads=2, inner=24, vocabulary=20, batch=2, sequence=4, dtype="float32"
)
TINY_GPT = shapes.GPTConfig(layers=1, hidden=16, heads=4, vocabulary=20, batch=2, sequence=4, dtype="float32")


def linear(x: hidet.Tensor) -> hidet.Tensor:
    """The weight is stored as PyTorch does: [out, in]."""
    return hidet.ops.matmul(x, hidet.ops.transpose(dist.weight("w", [6, 8]), [1, 0])) + dist.weight("b", [6])


def traced() -> FlowGraph:
    x = hidet.symbol([4, 8], "float32", "cpu")
    return normalize(hidet.trace_from(linear(x), [x]))


def save_weights(graph: FlowGraph, path: Path, seed: int = 0) -> dict[hidet.Tensor, np.ndarray]:
    """Random data for a graph's named weights, in a file, and by weight."""
    view, rng = GraphView(graph), np.random.default_rng(seed)
    names = names_of(view.tensors.values())
    values = {x: rng.uniform(-1, 1, tuple(x.shape)).astype(np.float32) for x in names.values()}
    save_file({name: torch.from_numpy(values[x]) for name, x in names.items()}, path)
    return values


def test_weights_are_no_inputs_and_what_is_computed_from_them_is_in_the_graph() -> None:
    graph = traced()
    view = GraphView(graph)
    assert len(graph.inputs) == 1
    assert names_of(map(view.tensors.get, view.weights)) == {"w": view.tensors["w0"], "b": view.tensors["w1"]}
    assert len(view.operators) == 3  # the transposition is one of them
    assert len(hidet.trace_from(linear(graph.inputs[0])).inputs) == 1  # the only free variable
    # Weights listed among the inputs are weights all the same.
    x, w = hidet.symbol([4, 8], "float32", "cpu"), hidet.symbol([8, 6], "float32", "cpu")
    listed = normalize(hidet.trace_from(hidet.ops.matmul(x, w), [w, x]))
    assert GraphView(listed).inputs == ["x0", "x1"]
    dist.as_weight(w, "proj")
    assert (GraphView(listed).inputs, GraphView(listed).weights) == (["x0"], ["w0"])


@pytest.mark.parametrize(
    "build", [lambda: normalize(shapes.gpt(TINY_GPT)), lambda: normalize(shapes.llama(TINY_LLAMA)), traced]
)
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_weights_from_a_file_compute_what_the_whole_graph_does(build: Any, mesh: Any, tmp_path: Path) -> None:
    graph, path, rng = build(), tmp_path / "model.safetensors", np.random.default_rng(3)
    values = save_weights(graph, path)
    inputs = graph_inputs(graph, rng)
    whole = {**dict(zip(graph.inputs, inputs, strict=True)), **values}
    for op in GraphView(graph).operators:
        arguments = [whole[x].astype(numpy_dtype(x.dtype)) for x in op.inputs]
        whole.update(zip(op.outputs, evaluate(definition_of(op), arguments), strict=True))
    view, mesh = GraphView(graph), DeviceMesh(mesh)
    table = RuleTable(mesh)
    for stage in (random_stage(view, mesh, table, rng) for _ in range(2)):
        program = partition_graph(graph, stage, SafetensorsFiles.open(path))
        (output,) = stage.outputs
        for rank, (result,) in enumerate(evaluate_program(program, inputs)):
            own = output.spec.slices(output.shape, mesh, mesh.coordinate(rank))
            np.testing.assert_allclose(result, whole[graph.outputs[0]][own], rtol=1e-6, atol=1e-7)


def test_a_fused_projection_reads_its_parts_from_the_whole_weight(tmp_path: Path) -> None:
    """Planning takes the product apart; the file still has it in one piece."""
    rng = np.random.default_rng(5)
    w, b, x = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((8, 12), (12,), (4, 8)))
    save_file({"qkv": torch.from_numpy(w), "bias": torch.from_numpy(b)}, tmp_path / "model.safetensors")
    placeholder = hidet.symbol([4, 8], "float32", "cpu")
    fused = hidet.ops.matmul(placeholder, dist.weight("qkv", [8, 12])) + dist.weight("bias", [12])
    parts = hidet.ops.split(fused, 3, axis=1)
    graph = normalize(hidet.trace_from([hidet.ops.exp(part) for part in parts], [placeholder]))
    names = names_of(GraphView(graph).tensors.values())
    assert {name for name in names if "qkv" in name} == {"qkv[:, 0:4]", "qkv[:, 4:8]", "qkv[:, 8:12]"}
    pins = {"qkv[:, 4:8]": "(R, S0)", "bias[8:12]": "(S0)"}
    plan = search(graph, builtin("cpu", DeviceMesh((2,))), pins=pins).plan
    program = partition_graph(graph, plan.stages[0], SafetensorsFiles.open(tmp_path))
    expected = np.exp(x @ w + b)
    for results in evaluate_program(program, [x]):
        np.testing.assert_allclose(np.concatenate(results, 1), expected, rtol=1e-5)


def test_weights_made_from_files_need_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.full((8, 6), 2.0), "half": torch.ones(3, dtype=torch.bfloat16)}, path)
    weights = dist.weights_from_safetensors(path)
    assert {name: (x.dtype.name, tuple(x.shape)) for name, x in weights.items()} == {
        "w": ("float32", (8, 6)),
        "half": ("bfloat16", (3,)),
    }
    x = hidet.symbol([4, 8], "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.matmul(x, weights["w"]), [x]))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((2,)))).plan.stages[0])
    assert all((data == 2).all() for name, data in program.data_of(1).items() if name == "w0")


FLOATS = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def test_stored_floats_are_cast_to_one_another_and_integers_are_not(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -0.1, torch.inf, -torch.inf, torch.nan, 2.0**-14], dtype=torch.float64)
    stored = {name: torch.cat([values, torch.tensor([torch.finfo(dtype).max])]) for name, dtype in FLOATS.items()}
    whole = torch.ones(7, dtype=torch.int8)
    save_file({**{name: x.to(FLOATS[name]) for name, x in stored.items()}, "whole": whole}, tmp_path / "w.safetensors")
    weights = dist.weights_from_safetensors(tmp_path)
    for name, dtype in itertools.product(FLOATS, FLOATS):
        read = source_of(weight_as(weights[name], dtype)).read([slice(0, 7)])
        expected = stored[name].to(FLOATS[name]).to(FLOATS[dtype])
        # The largest number stays finite.
        expected[6] = min(torch.finfo(FLOATS[name]).max, torch.finfo(FLOATS[dtype]).max)
        assert read.dtype == FLOATS[dtype]
        assert torch.equal(read.nan_to_num(nan=0.25), expected.nan_to_num(nan=0.25)), (name, dtype)
    for name, dtype in (("whole", "float32"), ("float32", "int8"), ("whole", "int32")):
        with pytest.raises(WeightsError, match=f"'{name}' is stored as .*, and the model has it as {dtype}"):
            weight_as(weights[name], dtype)


def test_the_parameters_of_a_module_become_weights(tmp_path: Path) -> None:
    class Block(hidet.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = hidet.nn.Linear(8, 4)
            self.scale = hidet.full([4], 3.0)

        def forward(self, x: hidet.Tensor) -> hidet.Tensor:
            return self.first(x) * self.scale

    block = Block().cpu()
    shapes_before = {name: list(x.shape) for name, x in block.named_parameters()}
    dist.as_weights(block, "model.")
    x = hidet.symbol([2, 8], "float32", "cpu")
    view = GraphView(normalize(hidet.trace_from(block(x), [x])))
    names = {name: list(x.shape) for name, x in names_of(view.tensors.values()).items()}
    assert names == {f"model.{name}": shape for name, shape in shapes_before.items()}
    assert set(names) == {"model.first.weight", "model.first.bias", "model.scale"}


def test_tensors_that_cannot_be_weights_are_refused() -> None:
    x = hidet.symbol([4, 8], "float32", "cpu")
    for wrong in (hidet.ops.relu(x), hidet.zeros([2], device="cpu"), "w"):
        with pytest.raises(ConfigError, match="the weight 'w'"):
            dist.as_weight(wrong, "w")
    with pytest.raises(ConfigError, match="name must be"):
        dist.as_weight(x, "")
    for shape in ([0], [-1, 2], ["n"], [2.0]):
        with pytest.raises(ConfigError, match="positive whole numbers"):
            dist.weight("w", shape)
    with pytest.raises(ConfigError, match="'float12'"):
        dist.weight("w", [2], "float12")


def refused(graph: FlowGraph, weights: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by auto_parallel before anything is planned or written."""
    monkeypatch.setattr("hidet_dist.phases.values.find_plans", lambda *_, **__: pytest.fail("planned"))
    config = {} if weights is None else {"weights": weights}
    with pytest.raises((WeightsError, ConfigError), match=says):
        dist.auto_parallel(graph, {"mesh_shape": [2]}, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_do_not_fit_are_refused_before_planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(6, 8)}, path)
    refused(traced(), None, r"'w' has no data: set optimization_config\['weights'\]", tmp_path, monkeypatch)
    refused(traced(), path, r"no tensor 'b' in .*model.safetensors", tmp_path, monkeypatch)
    save_file({"w": torch.ones(8, 6), "b": torch.ones(6)}, path)
    refused(traced(), str(path), r"'w' of .*model.safetensors is float32\[8, 6\]", tmp_path, monkeypatch)
    save_file({"w": torch.ones(6, 8).half(), "b": torch.ones(6)}, path)
    refused(traced(), [path], r"'w' of .*model.safetensors is float16\[6, 8\]", tmp_path, monkeypatch)
    refused(traced(), tmp_path / "gone", "gone cannot be read", tmp_path, monkeypatch)
    refused(traced(), 3, r"\['weights'\] must be the path .* got 3", tmp_path, monkeypatch)
    refused(traced(), [], r"\['weights'\] must be the path", tmp_path, monkeypatch)
    x = hidet.symbol([4, 8], "float32", "cpu")
    constant = hidet.trace_from(x + hidet.ones([8], device="cpu"), [x])
    refused(constant, path, "has none by name", tmp_path, monkeypatch)


def test_a_program_without_data_names_the_missing_weights() -> None:
    graph = traced()
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((2,)))).plan.stages[0])
    with pytest.raises(WeightsError, match="'w' has no data"):
        program.data_of(0)


@dataclasses.dataclass
class Whole:
    """A source in memory that keeps what it was asked for."""

    tensor: torch.Tensor
    largest: int = 0

    def read(self, region: Any) -> torch.Tensor:
        part = self.tensor[tuple(region)]
        self.largest = max(self.largest, part.nbytes)
        return part.contiguous()


@pytest.mark.parametrize("block_bytes", [1, 64, 200, 2**20])
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((), "()"),
        ((12,), "(S0)"),
        ((8, 6), "(S0, S1)"),
        ((8, 6), "(R, S01)"),
        ((4, 2, 10), "(S1, R, S0)"),
        ((7, 6), "(S0, R)"),  # the last shards end in padding
        ((5, 11), "(R, S01)"),
    ],
)
def test_blocks_are_the_shard_row_by_row(shape: Any, spec: str, block_bytes: int) -> None:
    mesh = DeviceMesh((2, 2)) if "01" not in spec else DeviceMesh((2, 3))
    tensor = torch.randn(shape, dtype=torch.float64)
    weight = TensorPlan("w0", tuple(shape), "float64", tensor.nbytes, TensorShardSpec.parse(spec))
    for rank in range(mesh.size):
        source = Whole(tensor)
        coordinate = mesh.coordinate(rank)
        own = read_shard(Whole(tensor), weight, mesh, coordinate)
        elements = tensor[weight.spec.slices(shape, mesh, coordinate)]
        assert own.shape == weight.spec.local_shape(shape, mesh)
        assert torch.equal(own[tuple(map(slice, elements.shape))], elements)
        assert int((own != 0).sum()) == int((elements != 0).sum())  # what is beyond is zero
        blocks = list(shard_blocks(source, weight, mesh, coordinate, block_bytes))
        assert torch.equal(torch.cat([block.reshape(-1) for block in blocks]), own.reshape(-1))
        assert source.largest <= max(block_bytes, tensor.element_size())
