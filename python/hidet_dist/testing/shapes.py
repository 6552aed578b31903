"""Graphs with the shapes of real models. Their weights are names and shapes; files may hold the data."""

from __future__ import annotations

import math

import hidet
import numpy as np
from hidet import ops

from hidet_dist.normalize import normalize
from hidet_dist.testing.sizes import (
    GPT2,
    GPT3_175B,
    LLAMA3_8B,
    LLAMA3_70B,
    NORM_EPSILON,
    TINY_LLAMA,
    GPTConfig,
    LlamaConfig,
)
from hidet_dist.view import GraphView
from hidet_dist.weights import weight as named_weight
from hidet_dist.weights.named import mark_of

__all__ = [
    "GPT2",
    "GPT3_175B",
    "LLAMA3_8B",
    "LLAMA3_70B",
    "TINY_LLAMA",
    "GPTConfig",
    "LlamaConfig",
    "gpt",
    "llama",
    "random_weights",
]

_ROPE_PAIR = 2
_ROPE_BASE = 10000.0  # Su et al. 2021, section 3.2.2


def gpt(config: GPTConfig) -> hidet.FlowGraph:
    """Make a graph from ``int32[batch, sequence]`` and a causal mask to logits ``[batch, sequence, vocabulary]``."""
    batch, seq, hidden = config.batch, config.sequence, config.hidden
    size = hidden // config.heads

    def weight(name: str, *shape: int) -> hidet.Tensor:
        return named_weight(name, shape, config.dtype)

    def linear(x: hidet.Tensor, out: int, name: str) -> hidet.Tensor:
        return ops.matmul(x, weight(f"{name}.weight", int(x.shape[-1]), out)) + weight(f"{name}.bias", out)

    def norm(x: hidet.Tensor, name: str) -> hidet.Tensor:
        return ops.layer_norm(x) * weight(f"{name}.weight", hidden) + weight(f"{name}.bias", hidden)

    def heads(x: hidet.Tensor, axes: list[int]) -> hidet.Tensor:
        return ops.permute_dims(ops.reshape(x, [batch, seq, config.heads, size]), axes)

    ids = hidet.symbol([batch, seq], "int32", "cpu")
    mask = hidet.symbol([1, 1, seq, seq], config.dtype, "cpu")
    words = weight("words", config.vocabulary, hidden)
    x = ops.take(words, ids) + weight("positions", seq, hidden)
    for number in range(config.layers):
        layer = f"layers.{number}"
        y = norm(x, f"{layer}.norm1")
        query = heads(linear(y, hidden, f"{layer}.query"), [0, 2, 1, 3])
        key = heads(linear(y, hidden, f"{layer}.key"), [0, 2, 3, 1])
        value = heads(linear(y, hidden, f"{layer}.value"), [0, 2, 1, 3])
        scores = ops.matmul(query, key) * (1.0 / math.sqrt(size)) + mask
        context = ops.matmul(ops.softmax(scores, axis=-1), value)
        merged = ops.reshape(ops.permute_dims(context, [0, 2, 1, 3]), [batch, seq, hidden])
        x = x + linear(merged, hidden, f"{layer}.out")
        inner = ops.gelu(linear(norm(x, f"{layer}.norm2"), 4 * hidden, f"{layer}.up"))
        x = x + linear(inner, hidden, f"{layer}.down")
    logits = ops.matmul(norm(x, "norm"), weight("head", hidden, config.vocabulary))
    return hidet.trace_from(logits, [ids, mask])


def llama(config: LlamaConfig) -> hidet.FlowGraph:
    """Make a graph from ``int32[batch, sequence]`` and a causal mask to logits ``[batch, sequence, vocabulary]``."""
    batch, seq, hidden = config.batch, config.sequence, config.hidden
    size, group = hidden // config.heads, config.heads // config.kv_heads

    def weight(name: str, *shape: int) -> hidet.Tensor:
        return named_weight(name, shape, config.dtype)

    def linear(x: hidet.Tensor, out: int, name: str) -> hidet.Tensor:
        return ops.matmul(x, weight(name, int(x.shape[-1]), out))

    def norm(x: hidet.Tensor, name: str) -> hidet.Tensor:
        return x * ops.rsqrt(ops.mean(x * x, dims=-1, keep_dim=True) + NORM_EPSILON) * weight(name, hidden)

    cosine, sine = weight("cosine", seq, size), weight("sine", seq, size)

    def rotate(x: hidet.Tensor) -> hidet.Tensor:
        left, right = x[:, :, :, : size // _ROPE_PAIR], x[:, :, :, size // _ROPE_PAIR :]
        return x * cosine + ops.concat([-right, left], axis=3) * sine

    def heads(x: hidet.Tensor, count: int) -> hidet.Tensor:
        return ops.permute_dims(ops.reshape(x, [batch, seq, count, size]), [0, 2, 1, 3])

    def grouped(x: hidet.Tensor) -> hidet.Tensor:
        """Repeat each head of keys and values for every head of queries in its group."""
        wide = ops.broadcast(
            ops.reshape(x, [batch, config.kv_heads, 1, seq, size]), [batch, config.kv_heads, group, seq, size]
        )
        return ops.reshape(wide, [batch, config.heads, seq, size])

    ids = hidet.symbol([batch, seq], "int32", "cpu")
    mask = hidet.symbol([1, 1, seq, seq], config.dtype, "cpu")
    x = ops.take(weight("words", config.vocabulary, hidden), ids)
    for number in range(config.layers):
        layer = f"layers.{number}"
        y = norm(x, f"{layer}.norm1")
        query = rotate(heads(linear(y, hidden, f"{layer}.query"), config.heads))
        key = grouped(rotate(heads(linear(y, size * config.kv_heads, f"{layer}.key"), config.kv_heads)))
        value = grouped(heads(linear(y, size * config.kv_heads, f"{layer}.value"), config.kv_heads))
        scores = ops.matmul(query, ops.permute_dims(key, [0, 1, 3, 2])) * (1.0 / math.sqrt(size)) + mask
        context = ops.matmul(ops.softmax(scores, axis=-1), value)
        merged = ops.reshape(ops.permute_dims(context, [0, 2, 1, 3]), [batch, seq, hidden])
        x = x + linear(merged, hidden, f"{layer}.out")
        y = norm(x, f"{layer}.norm2")
        gate = ops.silu(linear(y, config.inner, f"{layer}.gate"))
        x = x + linear(gate * linear(y, config.inner, f"{layer}.up"), hidden, f"{layer}.down")
    logits = ops.matmul(norm(x, "norm"), weight("head", hidden, config.vocabulary))
    return hidet.trace_from(logits, [ids, mask])


def random_weights(graph: hidet.FlowGraph, seed: int = 0) -> dict[str, np.ndarray]:
    """Make random float32 data for a graph's weights by name, the same for the same seed.

    Matrices and convolutions are scaled so that activations keep their size (Glorot and Bengio 2010; He et al. 2015);
    norms and biases change it little. ``cosine`` and ``sine`` are the tables of rotary positions.
    """
    rng = np.random.default_rng(seed)
    view = GraphView(normalize(graph))
    data = {}
    for tensor in view.weights:
        mark, shape = mark_of(view.tensors[tensor]), view.shape(tensor)
        if mark is None:
            continue
        name = mark.name
        kind = name.rpartition(".")[2]
        if kind in ("cosine", "sine"):
            data[name] = _rotary_table(kind, *shape)
            continue
        array = rng.standard_normal(shape, np.float32)
        if kind == "running_var":
            array = 1 + np.abs(array)
        elif len(shape) == 1:
            is_scale = kind == "weight" or "norm" in kind
            array = (np.float32(1) if is_scale else np.float32(0)) + np.float32(0.1) * array
        elif len(shape) > 2:
            array *= np.float32(math.sqrt(2 / math.prod(shape[1:])))
        elif kind not in ("words", "positions"):
            array *= np.float32(math.sqrt(2 / sum(shape)))
        data[name] = array
    return data


def _rotary_table(kind: str, positions: int, size: int) -> np.ndarray:
    frequencies = _ROPE_BASE ** -(np.arange(0, size, _ROPE_PAIR) / size)
    angles = np.tile(np.arange(positions)[:, None] * frequencies, _ROPE_PAIR)
    return np.asarray(np.cos(angles) if kind == "cosine" else np.sin(angles), np.float32)
