"""Pipelines that the search finds, built by ``auto_parallel`` and served by one process per stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.pipeline import PipelineOptions
from hidet_dist.spec import DeviceMesh, Plan

from .conftest import budget, launch, made, serve

# Messages take so long that one between stages is better than several collectives within each layer.
CLUSTER = Cluster(DeviceMesh((2,)), (Link(2e-5, 1e8),), Device("slow", {"default": 1e9}, 1e9, 2**30, 1e-9))


def _mlp() -> tuple[hidet.FlowGraph, list[np.ndarray], list[np.ndarray]]:
    """Four products of a row, each with a tanh behind it; the inputs, and the outputs by NumPy."""
    rng = np.random.default_rng(0)
    data = rng.uniform(-1, 1, (1, 128)).astype(np.float32)
    layers = [rng.uniform(-1, 1, (128, 128)).astype(np.float32) / 8 for _ in range(4)]
    x = y = hidet.symbol([1, 128], "float32", "cpu")
    want = data
    for layer in layers:
        y = hidet.ops.tanh(hidet.ops.matmul(y, hidet.asarray(layer)))
        want = np.tanh(want @ layer)
    return hidet.trace_from(y, [x]), [data], [want]


def _towers() -> tuple[hidet.FlowGraph, list[np.ndarray], list[np.ndarray]]:
    """The sum of two towers of products; the inputs, and the outputs by NumPy."""
    rng = np.random.default_rng(0)
    data = [rng.uniform(-1, 1, (1, 128)).astype(np.float32) for _ in range(2)]
    inputs = [hidet.symbol([1, 128], "float32", "cpu") for _ in data]
    results, wanted = list(inputs), list(data)
    for tower in range(2):
        for _ in range(3):
            layer = rng.uniform(-1, 1, (128, 128)).astype(np.float32) / 8
            results[tower] = hidet.ops.tanh(hidet.ops.matmul(results[tower], hidet.asarray(layer)))
            wanted[tower] = np.tanh(wanted[tower] @ layer)
    return hidet.trace_from(results[0] + results[1], inputs), data, [wanted[0] + wanted[1]]


@pytest.mark.slow
def test_two_towers_are_served_side_by_side(tmp_path: Path) -> None:
    graph, inputs, expected = _towers()
    out = tmp_path / "artifacts"
    cluster = replace(CLUSTER, mesh=DeviceMesh((3,)), links=(Link(1e-4, 1e8),))
    result = hidet_dist.auto_parallel(
        graph, {"mesh_shape": [3], "machine": cluster}, {"objective": "latency", "outputs": "last"}, out
    )
    assert result.plan.pipeline is not None
    ends = [(one.source.stage, one.readers[0].stage) for one in result.plan.pipeline.boundaries]
    assert ends == [(0, 2), (1, 2)]
    *others, outputs = serve(3, out, inputs, tmp_path)
    assert others == [[], []]
    np.testing.assert_allclose(outputs[0], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mlp", pytest.param("minilm", marks=pytest.mark.slow)])
def test_a_searched_pipeline_is_built_and_served(name: str, tmp_path: Path) -> None:
    """Cuts, slices, specs and micro-batches are searched; of MiniLM, one stage would be better."""
    graph, inputs, expected = _mlp() if name == "mlp" else made(name)[1:]
    out = tmp_path / "artifacts"
    config: dict[str, Any] = {"objective": "throughput", "solver_gap": 1e-2}
    config |= {"mem_budget": budget(graph, 2)} if name == "mlp" else {"stages": 2}
    result = hidet_dist.auto_parallel(graph, {"mesh_shape": [2], "machine": CLUSTER}, config, out)
    pipeline = result.plan.pipeline
    assert pipeline is not None
    assert [stage.ranks for stage in pipeline.stages] == [(0,), (1,)]
    products = [sum("Matmul" in op.operator for op in stage.operators) for stage in result.plan.stages]
    assert products == [2, 2] if name == "mlp" else all(products)
    assert Plan.load(out / "plan.json") == result.plan
    assert Manifest.load(out).program().pipeline == pipeline
    for outputs in serve(2, out, inputs, tmp_path):
        assert len(outputs) == len(expected)
        for got, want in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_prefill_and_decode_are_served_with_one_cut(tmp_path: Path) -> None:
    """Both pipelines are loaded by the same processes; each weight is on one rank, in one layout."""
    rng = np.random.default_rng(0)
    layers = [rng.uniform(-1, 1, (64, 64)).astype(np.float32) / 8 for _ in range(2)]
    weights = {f"layers.{number}": hidet.asarray(layer) for number, layer in enumerate(layers)}

    def graph(rows: int) -> hidet.FlowGraph:
        x = y = hidet.symbol([rows, 64], "float32", "cpu")
        for layer in weights.values():
            y = hidet.ops.matmul(y, layer)
            y = hidet.ops.tanh(y) if rows == 1 else hidet.ops.relu(y)
        return hidet.trace_from(y, [x])

    graphs = {"prefill": graph(8), "decode": graph(1)}
    options = PipelineOptions("throughput", 1, stages=2)
    family = hidet_dist.search_family(
        list(graphs.values()), CLUSTER, [1, 8], names=weights, mem_budget=64 * 64 * 4 + 10_000, pipeline=options
    )
    for (name, traced), plan in zip(graphs.items(), family.plans, strict=True):
        assert [[weight.label for weight in stage.weights] for stage in plan.stages] == [["layers.0"], ["layers.1"]]
        config = {"mesh_shape": [2], "machine": CLUSTER}
        hidet_dist.auto_parallel(traced, config, {"names": weights}, tmp_path / name, plan=plan)
        np.savez(tmp_path / f"{name}.inputs.npz", rng.uniform(-1, 1, (8 if name == "prefill" else 1, 64)).astype("f4"))
    done = launch(2, Path(__file__).with_name("serve_many.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    for name, activation in (("prefill", lambda y: np.maximum(y, 0)), ("decode", np.tanh)):
        with np.load(tmp_path / f"{name}.inputs.npz") as data:
            want = data["arr_0"]
        for layer in layers:
            want = activation(want @ layer)
        for rank in range(2):
            with np.load(tmp_path / f"{name}.rank{rank}.npz") as results:
                np.testing.assert_allclose(results["arr_0"], want, rtol=1e-5, atol=1e-6)
