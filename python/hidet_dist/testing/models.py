"""hidet's models with random weights on the CPU, small enough for tests, with inputs for them.

hidet has no vision transformer: the one here follows PyTorch Image Models.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import hidet
import numpy as np
from hidet import ops
from hidet.graph import FlowGraph, Tensor
from hidet.testing.models.gemma import GemmaModel
from hidet.testing.models.gpt2 import GPT2Config, GPT2LMHead
from hidet.testing.models.llama import LlamaForCausalLM
from hidet.testing.models.resnet import BasicBlock, Bottleneck, ResNet

from hidet_dist.compat.scalars import scalar_tensors

NOT_LEARNED = "inv_freq"  # the frequencies of rotary positions, which are a parameter in hidet


def randomize(module: hidet.nn.Module, seed: int) -> None:
    """Set random parameters, which hidet leaves uninitialized; they are scaled so that activations keep their size."""
    rng = np.random.default_rng(seed)
    pending = [module]
    while pending:
        current = pending.pop(0)
        pending.extend(current._submodules.values())
        for name, parameter in current._parameters.items():
            shape = [int(size) for size in parameter.shape] if parameter is not None else []
            if not shape or name == NOT_LEARNED:
                continue
            if "var" in name:
                values = rng.uniform(0.5, 1.5, shape)  # a variance is positive
            elif len(shape) == 1:
                values = rng.standard_normal(shape) * 0.1
            else:
                values = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
            current._parameters[name] = hidet.asarray(values.astype(np.float32))


def gpt2(
    layers: int = 2, tokens: int = 8, past: int = 4, seed: int = 0, hidden: int = 64, words: int = 96
) -> tuple[FlowGraph, list[np.ndarray]]:
    """Make a GPT-2 of 4 heads that decodes with a key-value cache, and inputs for it.

    Inputs: ids int32[tokens], positions int32[tokens], keys and values float32[layers, 4, past, hidden / 4].
    """
    config = GPT2Config()
    config.num_hidden_layers = layers
    config.vocab_size, config.hidden_size, config.intermediate_size = words, hidden, 4 * hidden
    config.num_heads, config.max_position_embeddings = 4, 64
    model = GPT2LMHead(config)
    randomize(model, seed)
    cache_shape = [layers, 4, past, hidden // 4]
    ids, positions = (hidet.symbol([tokens], "int32", "cpu") for _ in range(2))
    keys, values = (hidet.symbol(cache_shape, "float32", "cpu") for _ in range(2))
    graph = hidet.trace_from(list(model(ids, positions, keys, values)), [ids, positions, keys, values])
    rng = np.random.default_rng(seed)
    cache = [rng.standard_normal(cache_shape).astype(np.float32) for _ in range(2)]
    sentence = rng.integers(0, words, tokens).astype(np.int32)
    return graph, [sentence, np.arange(past, past + tokens, dtype=np.int32), *cache]


def resnet18(batch: int = 2, pixels: int = 32, seed: int = 0) -> tuple[FlowGraph, list[np.ndarray]]:
    """Make a ResNet-18 with ten classes, and an input float32[batch, 3, pixels, pixels] for it."""
    model = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=10)
    randomize(model, seed)
    x = hidet.symbol([batch, 3, pixels, pixels], "float32", "cpu")
    graph = hidet.trace_from(model(x), [x])
    image = np.random.default_rng(seed).standard_normal((batch, 3, pixels, pixels)).astype(np.float32)
    return graph, [image]


def encoder_block(batch: int | str, seq: int | str, hidden: int = 32, heads: int = 4, seed: int = 0) -> FlowGraph:
    """Make a pre-norm transformer block: attention with an additive mask, then an MLP. Sizes may be names of symbols.

    Inputs: x float32[batch, seq, hidden] and mask float32[batch, 1, 1, seq]; output: float32[batch, seq, hidden].
    """
    rng = np.random.default_rng(seed)

    def weight(rows: int, columns: int) -> Tensor:
        return hidet.asarray((rng.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32))

    x = hidet.symbol([batch, seq, hidden], "float32", "cpu")
    mask = hidet.symbol([batch, 1, 1, seq], "float32", "cpu")
    rows, columns = x.shape[0], x.shape[1]

    def split(y: Tensor) -> Tensor:
        return ops.transpose(ops.reshape(y, [rows, columns, heads, hidden // heads]), [0, 2, 1, 3])

    y = ops.layer_norm(x, num_last_dims=1)
    query, key, value = (split(ops.matmul(y, weight(hidden, hidden))) for _ in range(3))
    scores = ops.matmul(query, ops.transpose(key, [0, 1, 3, 2])) * (hidden // heads) ** -0.5 + mask
    mixed = ops.transpose(ops.matmul(ops.softmax(scores, axis=-1), value), [0, 2, 1, 3])
    x1 = x + ops.matmul(ops.reshape(mixed, [rows, columns, hidden]), weight(hidden, hidden))
    y = ops.matmul(ops.layer_norm(x1, num_last_dims=1), weight(hidden, 2 * hidden))
    bias = hidet.asarray((rng.standard_normal(2 * hidden) * 0.1).astype(np.float32))
    y = ops.matmul(ops.gelu(y + bias), weight(2 * hidden, hidden))
    return hidet.trace_from(x1 + y, [x, mask])


def encoder_inputs(batch: int, seq: int, hidden: int = 32, seed: int = 0) -> list[np.ndarray]:
    """Make random inputs of an :func:`encoder_block`, with a mask that hides some of the keys."""
    rng = np.random.default_rng(seed)
    mask = np.where(rng.random((batch, 1, 1, seq)) < 0.3, -1e4, 0.0)
    return [rng.standard_normal((batch, seq, hidden)).astype(np.float32), mask.astype(np.float32)]


def narrow_resnet(
    bottleneck: bool = False, width: int = 8, batch: int = 4, pixels: int = 16, seed: int = 0
) -> tuple[FlowGraph, list[np.ndarray]]:
    """Make a ResNet-18, or -50 if ``bottleneck``, with ``width`` channels instead of 64, and an input for it.

    Input: float32[batch, 3, pixels, pixels].
    """
    block, layers = (Bottleneck, [3, 4, 6, 3]) if bottleneck else (BasicBlock, [2, 2, 2, 2])
    model = ResNet(block, [1, 1, 1, 1], num_classes=8)
    model.in_channels = width
    model.conv1 = hidet.nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3)
    model.bn1 = hidet.nn.BatchNorm2d(width)
    for number, blocks in enumerate(layers):
        channels, stride = width << number, 1 if number == 0 else 2
        setattr(model, f"layer{number + 1}", model.make_layer(block, channels, blocks, stride))
    model.fc = hidet.nn.Linear((width << 3) * block.expansion, 8)
    randomize(model, seed)
    x = hidet.symbol([batch, 3, pixels, pixels], "float32", "cpu")
    graph = hidet.trace_from(model(x), [x])
    image = np.random.default_rng(seed).standard_normal((batch, 3, pixels, pixels)).astype(np.float32)
    return graph, [image]


def _decoder_config(layers: int, heads: int, kv_heads: int, hidden: int, words: int) -> SimpleNamespace:
    """Make the transformers configuration that hidet's decoders read; the installed release's lacks some fields."""
    return SimpleNamespace(
        attention_bias=False,
        head_dim=hidden // heads,
        hidden_act="silu",
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        max_position_embeddings=16,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        pad_token_id=0,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_scaling=None,
        rope_theta=10000.0,
        vocab_size=words,
    )


def llama(
    layers: int = 1, heads: int = 4, kv_heads: int = 4, hidden: int = 16, words: int = 24, seed: int = 0
) -> tuple[FlowGraph, list[np.ndarray]]:
    """Make a LLaMA that decodes four tokens each of two sentences behind a cache of four, and inputs for it.

    Inputs: ids int32[2, 4], positions int32[2, 16], and for each layer keys and values float32[2, kv_heads, 4, size].
    Outputs: the most likely words, logits, and the longer caches.
    """
    batch, tokens, past = 2, 4, 4
    with scalar_tensors():
        model = LlamaForCausalLM(_decoder_config(layers, heads, kv_heads, hidden, words))
        randomize(model, seed)
        ids, positions = hidet.symbol([batch, tokens], "int32", "cpu"), hidet.symbol([batch, 16], "int32", "cpu")
        shape = [batch, kv_heads, past, hidden // heads]
        cache = [(_cache(shape), _cache(shape)) for _ in range(layers)]
        y = model(ids, positions, cache)
    outputs = [y["new_ids"], y["logits"], *(x for pair in y["past_key_values"] for x in pair)]
    graph = hidet.trace_from(outputs, [ids, positions, *(x for pair in cache for x in pair)])
    rng = np.random.default_rng(seed)
    rows = np.tile(np.arange(16, dtype=np.int32), (batch, 1))
    data = [rng.standard_normal(shape).astype(np.float32) for _ in range(2 * layers)]
    return graph, [rng.integers(0, words, (batch, tokens)).astype(np.int32), rows, *data]


def gemma(
    layers: int = 1, heads: int = 4, kv_heads: int = 1, hidden: int = 16, words: int = 24, seed: int = 0
) -> tuple[FlowGraph, list[np.ndarray]]:
    """Make a Gemma, with one head of keys and values, that decodes a token of four sentences behind a cache of three.

    It decodes one token, because hidet's mask does not fit a cache otherwise. hidet's class with a head loads released
    weights when it is made, so the head is added here in the same way.
    Inputs: ids int32[4, 1], positions int32[4, 1], and for each layer keys and values float32[4, kv_heads, 3, size].
    Outputs: logits, and the longer caches.
    """
    batch, past = 4, 3
    with scalar_tensors(), hidet.option.context():
        hidet.option.execution_mode("symbolic")  # hidet cannot compute its complex constants at once
        model = GemmaModel(_decoder_config(layers, heads, kv_heads, hidden, words))
        head = hidet.nn.Linear(hidden, words, bias=False)
        randomize(model, seed)
        randomize(head, seed)
        ids, positions = (hidet.symbol([batch, 1], "int32", "cpu") for _ in range(2))
        shape = [batch, kv_heads, past, hidden // heads]
        cache = [(_cache(shape), _cache(shape)) for _ in range(layers)]
        states, longer = model(ids, positions, cache)
        logits = head(states)
    outputs = [logits, *(x for pair in longer for x in pair)]
    graph = hidet.trace_from(outputs, [ids, positions, *(x for pair in cache for x in pair)])
    rng = np.random.default_rng(seed)
    data = [rng.standard_normal(shape).astype(np.float32) for _ in range(2 * layers)]
    at = np.full((batch, 1), past, np.int32)
    return graph, [rng.integers(0, words, (batch, 1)).astype(np.int32), at, *data]


def _cache(shape: list[int]) -> Tensor:
    return hidet.symbol(shape, "float32", "cpu")


def vit(layers: int = 1, heads: int = 4, hidden: int = 16, seed: int = 0) -> tuple[FlowGraph, list[np.ndarray]]:
    """Make a vision transformer: patches by a convolution, a class token, a fused and unbound projection, a head.

    Input: float32[4, 3, 8, 8], which makes patches of 4 x 4. Output: float32[4, 8].
    """
    batch, pixels, patch, classes = 4, 8, 4, 8
    tokens, size = (pixels // patch) ** 2 + 1, hidden // heads
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> Tensor:
        return hidet.asarray((rng.standard_normal(shape) / math.sqrt(shape[0])).astype(np.float32))

    def linear(x: Tensor, out: int) -> Tensor:
        return ops.add(ops.matmul(x, weight(int(x.shape[-1]), out)), weight(out))

    def norm(x: Tensor) -> Tensor:
        return ops.add(ops.multiply(ops.layer_norm(x), weight(hidden)), weight(hidden))

    image = hidet.symbol([batch, 3, pixels, pixels], "float32", "cpu")
    patches = ops.conv2d(image, weight(hidden, 3, patch, patch), stride=patch)
    patches = ops.transpose(ops.reshape(patches, [batch, hidden, tokens - 1]), [0, 2, 1])
    first = ops.broadcast(weight(1, 1, hidden), [batch, 1, hidden])
    x = ops.add(ops.concat([first, patches], 1), weight(1, tokens, hidden))
    for _ in range(layers):
        fused = ops.reshape(linear(norm(x), 3 * hidden), [batch, tokens, 3, heads, size])
        parts = ops.split(ops.transpose(fused, [2, 0, 3, 1, 4]), 3, axis=0)
        q, k, v = (ops.squeeze(part, [0]) for part in parts)
        scores = ops.matmul(ops.multiply(q, size**-0.5), ops.transpose(k, [0, 1, 3, 2]))
        mixed = ops.transpose(ops.matmul(ops.softmax(scores, -1), v), [0, 2, 1, 3])
        x = ops.add(x, linear(ops.reshape(mixed, [batch, tokens, hidden]), hidden))
        x = ops.add(x, linear(ops.gelu(linear(norm(x), 4 * hidden)), hidden))
    graph = hidet.trace_from(linear(norm(x)[:, 0], classes), [image])
    return graph, [rng.standard_normal((batch, 3, pixels, pixels)).astype(np.float32)]


def run_whole(graph: FlowGraph, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run an unsharded graph, operator by operator with hidet's CPU kernels."""
    return [y.numpy() for y in graph.forward([hidet.asarray(x) for x in inputs])]
