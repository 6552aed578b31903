"""The models in PyTorch answer what the graphs do."""

from __future__ import annotations

import sys
from pathlib import Path

import hidet
import numpy as np
import pytest
import torch
from hidet.testing.models.resnet import BasicBlock, ResNet
from safetensors.numpy import save_file

from hidet_dist.testing import shapes, torch_models
from hidet_dist.weights import as_weights

BATCH, SEQUENCE = 2, 8
GPT = shapes.GPTConfig(1, 32, 4, 48, BATCH, SEQUENCE, "float32")
LLAMA = shapes.LlamaConfig(1, 32, 4, 2, 48, 40, BATCH, SEQUENCE, "float32")


def whole(graph: hidet.FlowGraph, file: Path, inputs: list[np.ndarray]) -> np.ndarray:
    """The outputs of a graph with the weights of a file."""
    hidet.distributed.auto_parallel(graph, {"mesh_shape": [1]}, {"weights": file}, file.with_suffix(""))
    with hidet.distributed.load_partition(file.with_suffix(""), 0) as model:
        return np.asarray(model(*inputs))


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.slow), "llama"])
def test_language_models(name: str, tmp_path: Path) -> None:
    config, graph, model = {
        "gpt": (GPT, shapes.gpt(GPT), torch_models.GPT(GPT)),
        "llama": (LLAMA, shapes.llama(LLAMA), torch_models.Llama(LLAMA)),
    }[name]
    file = tmp_path / "weights.safetensors"
    save_file(shapes.random_weights(graph), file)
    ids = np.random.default_rng(1).integers(0, config.vocabulary, (BATCH, SEQUENCE)).astype(np.int32)
    mask = np.triu(np.full((1, 1, SEQUENCE, SEQUENCE), -1e9, np.float32), 1)
    with torch.inference_mode():
        expected = model.load(file).eval()(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    assert 0.1 < expected.std() < 10
    np.testing.assert_allclose(whole(graph, file, [ids, mask]), expected, atol=1e-4)


@pytest.mark.slow
def test_resnet18(tmp_path: Path) -> None:
    module = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=10)
    as_weights(module)
    x = hidet.symbol([1, 3, 32, 32], "float32", "cpu")
    graph = hidet.trace_from(module(x), [x])
    file = tmp_path / "weights.safetensors"
    save_file(shapes.random_weights(graph), file)
    image = np.random.default_rng(1).standard_normal((1, 3, 32, 32), np.float32)
    with torch.inference_mode():
        expected = torch_models.resnet18(10).load(file).eval()(torch.from_numpy(image)).numpy()
    np.testing.assert_allclose(whole(graph, file, [image]), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_weights_are_the_same_for_the_same_seed() -> None:
    first, again, other = (shapes.random_weights(shapes.llama(LLAMA), seed) for seed in (0, 0, 1))
    assert list(first) == list(again) == list(other)
    assert all((first[name] == again[name]).all() for name in first)
    assert (first["words"] != other["words"]).all()
    assert first["cosine"] ** 2 + first["sine"] ** 2 == pytest.approx(1)


def test_pytorchs_models_come_without_hidet() -> None:
    import subprocess

    code = "import sys, hidet_dist.testing.torch_models; assert 'hidet' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
