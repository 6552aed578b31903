"""Pipelines that the search finds, built by ``auto_parallel`` and served by one process per stage."""

from __future__ import annotations

from pathlib import Path

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.spec import DeviceMesh, Plan

from .conftest import budget, made, serve

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


@pytest.mark.parametrize("name", ["mlp", pytest.param("minilm", marks=pytest.mark.slow)])
def test_a_searched_pipeline_is_built_and_served(name: str, tmp_path: Path) -> None:
    """Only the objective is given: cuts, slices, specs and micro-batches are searched."""
    graph, inputs, expected = _mlp() if name == "mlp" else made(name)[1:]
    out = tmp_path / "artifacts"
    config = {"objective": "throughput", "mem_budget": budget(graph, 2), "solver_gap": 1e-2}
    result = hidet_dist.auto_parallel(graph, {"mesh_shape": [2], "machine": CLUSTER}, config, out)
    pipeline = result.plan.pipeline
    assert pipeline is not None
    assert [stage.ranks for stage in pipeline.stages] == [(0,), (1,)]
    shares = [stage.seconds / result.plan.seconds for stage in result.plan.stages]
    assert max(shares) < 0.6  # the cut is near the middle
    assert Plan.load(out / "plan.json") == result.plan
    assert Manifest.load(out).pipeline == pipeline
    for outputs in serve(2, out, inputs, tmp_path):
        assert len(outputs) == len(expected)
        for got, want in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
