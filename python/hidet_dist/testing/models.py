"""hidet's own GPT-2 and ResNet-18 with random weights on the CPU, small enough for tests, with inputs to feed them."""

from __future__ import annotations

import hidet
import numpy as np
from hidet.graph import FlowGraph
from hidet.testing.models.gpt2 import GPT2Config, GPT2LMHead
from hidet.testing.models.resnet import BasicBlock, ResNet


def randomize(module: hidet.nn.Module, seed: int) -> None:
    """Give a module random parameters: hidet leaves them uninitialised. Scaled so that activations keep their size."""
    rng = np.random.default_rng(seed)
    pending = [module]
    while pending:
        current = pending.pop(0)
        pending.extend(current._submodules.values())
        for name, parameter in current._parameters.items():
            shape = [int(size) for size in parameter.shape] if parameter is not None else []
            if not shape:
                continue
            if "var" in name:
                values = rng.uniform(0.5, 1.5, shape)  # a variance is positive
            elif len(shape) == 1:
                values = rng.standard_normal(shape) * 0.1
            else:
                values = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
            current._parameters[name] = hidet.asarray(values.astype(np.float32))


def gpt2(layers: int = 2, tokens: int = 8, past: int = 4, seed: int = 0) -> tuple[FlowGraph, list[np.ndarray]]:
    """A GPT-2 of hidden size 64, 4 heads and 96 words that decodes with a key-value cache, and inputs for it.

    Inputs: ids int32[tokens], positions int32[tokens], keys and values float32[layers, 4, past, 16].
    """
    config = GPT2Config()
    config.num_hidden_layers = layers
    config.vocab_size, config.hidden_size, config.intermediate_size = 96, 64, 256
    config.num_heads, config.max_position_embeddings = 4, 64
    model = GPT2LMHead(config)
    randomize(model, seed)
    ids, positions = (hidet.symbol([tokens], "int32", "cpu") for _ in range(2))
    keys, values = (hidet.symbol([layers, 4, past, 16], "float32", "cpu") for _ in range(2))
    graph = hidet.trace_from(list(model(ids, positions, keys, values)), [ids, positions, keys, values])
    rng = np.random.default_rng(seed)
    cache = [rng.standard_normal((layers, 4, past, 16)).astype(np.float32) for _ in range(2)]
    words = rng.integers(0, config.vocab_size, tokens).astype(np.int32)
    return graph, [words, np.arange(past, past + tokens, dtype=np.int32), *cache]


def resnet18(batch: int = 2, pixels: int = 32, seed: int = 0) -> tuple[FlowGraph, list[np.ndarray]]:
    """ResNet-18 with ten classes, and an input float32[batch, 3, pixels, pixels] for it."""
    model = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=10)
    randomize(model, seed)
    x = hidet.symbol([batch, 3, pixels, pixels], "float32", "cpu")
    graph = hidet.trace_from(model(x), [x])
    image = np.random.default_rng(seed).standard_normal((batch, 3, pixels, pixels)).astype(np.float32)
    return graph, [image]


def run_whole(graph: FlowGraph, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs of an unsharded graph, operator by operator with hidet's CPU kernels."""
    return [y.numpy() for y in graph.forward([hidet.asarray(x) for x in inputs])]
