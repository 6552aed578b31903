"""Graphs of the shapes that people really have. Their weights are names and shapes; files may hold the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import hidet
from hidet import ops

from hidet_dist.weights import weight as named_weight

_ROPE_PAIR = 2


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT-2 or GPT-3: learned positions, layer norm, GELU; the head has a matrix of its own."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    batch: int
    sequence: int
    dtype: str = "float16"


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a LLaMA: rotary positions, RMS norm, gated SiLU, grouped queries, a head of its own."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    batch: int
    sequence: int
    dtype: str = "float16"


GPT2 = GPTConfig(layers=12, hidden=768, heads=12, vocabulary=50257, batch=8, sequence=1024, dtype="float32")
GPT3_175B = GPTConfig(layers=96, hidden=12288, heads=96, vocabulary=50257, batch=8, sequence=2048)
LLAMA3_8B = LlamaConfig(32, 4096, 32, 8, 14336, 128256, batch=16, sequence=128)
LLAMA3_70B = LlamaConfig(80, 8192, 64, 8, 28672, 128256, batch=16, sequence=128)


def gpt(config: GPTConfig) -> hidet.FlowGraph:
    """``int32[batch, sequence]`` to logits ``[batch, sequence, vocabulary]``, with a causal mask as second input."""
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
    """``int32[batch, sequence]`` to logits ``[batch, sequence, vocabulary]``, with a causal mask as second input."""
    batch, seq, hidden = config.batch, config.sequence, config.hidden
    size, group = hidden // config.heads, config.heads // config.kv_heads

    def weight(name: str, *shape: int) -> hidet.Tensor:
        return named_weight(name, shape, config.dtype)

    def linear(x: hidet.Tensor, out: int, name: str) -> hidet.Tensor:
        return ops.matmul(x, weight(name, int(x.shape[-1]), out))

    def norm(x: hidet.Tensor, name: str) -> hidet.Tensor:
        return x * ops.rsqrt(ops.mean(x * x, dims=-1, keep_dim=True) + 1e-5) * weight(name, hidden)

    cosine, sine = weight("cosine", seq, size), weight("sine", seq, size)

    def rotate(x: hidet.Tensor) -> hidet.Tensor:
        left, right = x[:, :, :, : size // _ROPE_PAIR], x[:, :, :, size // _ROPE_PAIR :]
        return x * cosine + ops.concat([-right, left], axis=3) * sine

    def heads(x: hidet.Tensor, count: int) -> hidet.Tensor:
        return ops.permute_dims(ops.reshape(x, [batch, seq, count, size]), [0, 2, 1, 3])

    def grouped(x: hidet.Tensor) -> hidet.Tensor:
        """Each key and value head once for every query head of its group."""
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
