"""Graphs that are computed in bfloat16 on CPUs, against float32."""

from __future__ import annotations

from pathlib import Path

import hidet
import numpy as np
import pytest
import safetensors
import torch
from hidet import ops
from torch.nn import functional

import hidet_dist
from hidet_dist.artifacts import Manifest

WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) / np.sqrt(shape[1])
    for name, shape in {"filters": (48, 3, 4, 4), "wide": (48, 96), "narrow": (96, 40)}.items()
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half") / "artifacts"
    x = hidet.symbol(["images", 3, 16, 16], "float32", "cpu")
    weights = {name: hidet.from_torch(weight) for name, weight in WEIGHTS.items()}
    y = ops.transpose(ops.flatten(ops.conv2d(x, weights["filters"], stride=4), 2), [0, 2, 1])
    y = ops.matmul(ops.gelu(ops.matmul(ops.layer_norm(y, 1), weights["wide"])), weights["narrow"])
    graph = hidet.trace_from(ops.softmax(y, -1), [x])
    options = {"precision": "bfloat16", "symbols": {"images": 2}}
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, options, folder)
    return folder


def in_float32(x: torch.Tensor) -> torch.Tensor:
    y = torch.conv2d(x, WEIGHTS["filters"], stride=4).flatten(2).transpose(1, 2)
    y = functional.layer_norm(y, y.shape[-1:]) @ WEIGHTS["wide"]
    return (functional.gelu(y) @ WEIGHTS["narrow"]).softmax(-1)


def test_results_are_those_of_float32_within_the_precision(built: Path) -> None:
    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with hidet_dist.load_partition(built) as partition:
        result = partition(x)
        assert torch.equal(partition(x[1:2]), result[1:2])
    expected = in_float32(x)
    assert result.dtype == torch.float32
    assert 1e-5 < float((result - expected).norm() / expected.norm()) < 2e-2


def test_weights_are_stored_in_bfloat16(built: Path) -> None:
    (file,) = Manifest.load(built).weights_files
    with safetensors.safe_open(built / file, "pt") as stored:
        assert {stored.get_slice(name).get_dtype() for name in stored.keys()} == {"BF16"}  # noqa: SIM118
