"""The cases: models as hidet graphs, with the same weights and inputs as PyTorch's models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hidet
import numpy as np
from hidet.graph import FlowGraph
from hidet.testing.models.resnet import Bottleneck, ResNet
from safetensors.numpy import save_file

import hidet_dist
from hidet_dist.normalize import normalize
from hidet_dist.testing import bert, minilm, shapes
from hidet_dist.view import GraphView
from hidet_dist.weights import as_weights
from hidet_dist.weights.named import mark_of

SEQUENCE, PIXELS, SEED = 128, 224, 0
_MASKED = -1e9  # its exp is 0 in float32


@dataclass(frozen=True)
class Case:
    """A model at a batch size.

    Attributes
    ----------
    title: what a person calls it.
    model: its name among :data:`peers.PEERS`.
    batch: items a call.
    weights: writes a file with the weights to a folder, unless it is there, and returns it (or the folder they are in).
    graph: the graph, from what ``weights`` returned.
    inputs: what it is called with.
    most_of_eager: how much of PyTorch eager's time one rank may take at most.
    parallel: what PyTorch does with two processes; None where no plan of DTensor's splits such a model.
    tolerance: of answers, relative to the largest.
    precision: the one in which weights of products are stored, by all but PyTorch; None for float32.
    named_weights: the graph has its weights by name only, and what ``weights`` returned holds them.
    """

    title: str
    model: str
    batch: int
    weights: Callable[[Path], Path]
    graph: Callable[[Path], FlowGraph]
    inputs: Callable[[], list[np.ndarray]]
    most_of_eager: float
    parallel: str | None
    named_weights: bool = False
    tolerance: float = 1e-4
    precision: str | None = None


def _minilm(batch: int) -> Case:
    def graph(_folder: Path) -> FlowGraph:
        return bert.trace(bert.load_minilm()[0], batch, SEQUENCE)

    def inputs() -> list[np.ndarray]:
        rng = np.random.default_rng(SEED)
        lengths = rng.integers(SEQUENCE // 2, SEQUENCE + 1, batch)
        ids = rng.integers(1000, 30000, (batch, SEQUENCE)).astype(np.int32)
        return [ids, (np.arange(SEQUENCE) < lengths[:, None]).astype(np.float32)]

    return Case(
        f"MiniLM, batch {batch}", "minilm", batch, lambda _: minilm.minilm_dir(), graph, inputs, 1.2, "tensor parallel"
    )


def _gpt2(batch: int) -> Case:
    config = replace(shapes.GPT2, batch=batch, sequence=SEQUENCE)

    def weights(folder: Path) -> Path:
        file = folder / "gpt2.safetensors"
        if not file.exists():
            rng = np.random.default_rng(SEED)
            view = GraphView(normalize(shapes.gpt(config)))
            arrays = {}
            for name in view.weights:
                array = 0.02 * rng.standard_normal(view.shape(name), np.float32)
                mark = mark_of(view.tensors[name])
                assert mark is not None  # all weights of the shapes have names
                label = mark.name
                arrays[label] = array + 1 if "norm" in label and label.endswith("weight") else array
            save_file(arrays, file)
        return file

    def graph(_file: Path) -> FlowGraph:
        return shapes.gpt(config)

    def inputs() -> list[np.ndarray]:
        ids = np.random.default_rng(SEED).integers(0, config.vocabulary, (batch, SEQUENCE)).astype(np.int32)
        mask = np.triu(np.full((SEQUENCE, SEQUENCE), _MASKED, np.float32), 1)
        return [ids, mask[None, None]]

    return Case(
        f"GPT-2 124M, batch {batch}", "gpt2", batch, weights, graph, inputs, 1.2, "tensor parallel", named_weights=True
    )


def _resnet50(batch: int) -> Case:
    def model() -> ResNet:
        return ResNet(Bottleneck, [3, 4, 6, 3])

    def weights(folder: Path) -> Path:
        file = folder / "resnet50.safetensors"
        if not file.exists():
            rng = np.random.default_rng(SEED)
            arrays = {}
            for name, parameter in model().named_parameters():
                shape = [int(extent) for extent in parameter.shape]
                if name.endswith("running_var"):
                    array = rng.uniform(0.5, 1.5, shape)
                elif len(shape) > 1:
                    array = rng.standard_normal(shape) * (2 / np.prod(shape[1:])) ** 0.5
                elif name.endswith("weight"):
                    array = rng.uniform(0.2, 0.6, shape)
                else:
                    array = rng.standard_normal(shape) * 0.1
                arrays[name] = np.asarray(array, np.float32)
            save_file(arrays, file)
        return file

    def graph(_file: Path) -> FlowGraph:
        own = model()
        as_weights(own)
        x = hidet.symbol([batch, 3, PIXELS, PIXELS], "float32", "cpu")
        return hidet.trace_from(own(x), [x])

    def inputs() -> list[np.ndarray]:
        return [np.random.default_rng(SEED).standard_normal((batch, 3, PIXELS, PIXELS), np.float32)]

    # DTensor splits linear layers; a convolutional network of batch 1 has one, of a thousandth of the work.
    parallel = "data parallel: half the batch each" if batch > 1 else None
    return Case(
        f"ResNet-50, batch {batch}", "resnet50", batch, weights, graph, inputs, 2.0, parallel, named_weights=True
    )


def _module(title: str, model: str, inputs: Callable[[], list[np.ndarray]], **options: Any) -> Case:
    """A model of :mod:`modules`, at batch 1."""

    def graph(_folder: Path) -> FlowGraph:
        import torch

        from benchmarks.serving import modules

        return hidet_dist.from_torch(modules.make(model), tuple(torch.from_numpy(x) for x in inputs()))

    return Case(title, model, 1, lambda folder: folder, graph, inputs, 1.2, None, **options)


def _images() -> list[np.ndarray]:
    return [np.random.default_rng(SEED).standard_normal((1, 3, PIXELS, PIXELS), np.float32)]


def _spectrogram() -> list[np.ndarray]:
    return [np.random.default_rng(SEED).standard_normal((1, 80, 3000), np.float32)]


def _tokens() -> list[np.ndarray]:
    ids = np.random.default_rng(SEED).integers(1000, 30000, (1, SEQUENCE))
    return [ids, np.ones_like(ids)]


CASES = {
    "minilm_8": _minilm(8),
    "gpt2_1": _gpt2(1),
    "gpt2_8": _gpt2(8),
    "resnet50_1": _resnet50(1),
    "resnet50_8": _resnet50(8),
    "efficientnet_b0_1": _module("EfficientNet-B0, batch 1", "efficientnet_b0", _images),
    "convnext_tiny_1": _module("ConvNeXt-T, batch 1", "convnext_tiny", _images),
    "vit_base_1": _module("ViT-B, batch 1", "vit_base", _images),
    "whisper_tiny_1": _module("Whisper-tiny's encoder, batch 1", "whisper_tiny", _spectrogram),
    "bert_base_int8_1": _module("BERT-base in 8 bits, batch 1", "bert_base", _tokens, tolerance=0.1, precision="int8"),
}
