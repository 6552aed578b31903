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


def encoder_block(batch: int | str, seq: int | str, hidden: int = 32, heads: int = 4, seed: int = 0) -> FlowGraph:
    """A pre-norm transformer block: attention with an additive mask, then an MLP. Sizes may be names of symbols.

    Inputs: x float32[batch, seq, hidden] and mask float32[batch, 1, 1, seq]; output: float32[batch, seq, hidden].
    """
    rng = np.random.default_rng(seed)

    def weight(rows: int, columns: int) -> hidet.Tensor:
        return hidet.asarray((rng.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32))

    x = hidet.symbol([batch, seq, hidden], "float32", "cpu")
    mask = hidet.symbol([batch, 1, 1, seq], "float32", "cpu")
    rows, columns = x.shape[0], x.shape[1]

    def split(y: hidet.Tensor) -> hidet.Tensor:
        return hidet.ops.transpose(hidet.ops.reshape(y, [rows, columns, heads, hidden // heads]), [0, 2, 1, 3])

    y = hidet.ops.layer_norm(x, num_last_dims=1)
    query, key, value = (split(hidet.ops.matmul(y, weight(hidden, hidden))) for _ in range(3))
    scores = hidet.ops.matmul(query, hidet.ops.transpose(key, [0, 1, 3, 2])) * (hidden // heads) ** -0.5 + mask
    mixed = hidet.ops.transpose(hidet.ops.matmul(hidet.ops.softmax(scores, axis=-1), value), [0, 2, 1, 3])
    x1 = x + hidet.ops.matmul(hidet.ops.reshape(mixed, [rows, columns, hidden]), weight(hidden, hidden))
    y = hidet.ops.matmul(hidet.ops.layer_norm(x1, num_last_dims=1), weight(hidden, 2 * hidden))
    bias = hidet.asarray((rng.standard_normal(2 * hidden) * 0.1).astype(np.float32))
    y = hidet.ops.matmul(hidet.ops.gelu(y + bias), weight(2 * hidden, hidden))
    return hidet.trace_from(x1 + y, [x, mask])


def encoder_inputs(batch: int, seq: int, hidden: int = 32, seed: int = 0) -> list[np.ndarray]:
    """Random inputs of an :func:`encoder_block`; a mask that hides some of the keys."""
    rng = np.random.default_rng(seed)
    mask = np.where(rng.random((batch, 1, 1, seq)) < 0.3, -1e4, 0.0)
    return [rng.standard_normal((batch, seq, hidden)).astype(np.float32), mask.astype(np.float32)]


def run_whole(graph: FlowGraph, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs of an unsharded graph, operator by operator with hidet's CPU kernels."""
    return [y.numpy() for y in graph.forward([hidet.asarray(x) for x in inputs])]
