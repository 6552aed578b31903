"""Graphs of the shapes that people really have, with weights that nobody has to hold: for planning, not for running."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import hidet
import torch
from hidet import ops

_ROPE_PAIR = 2


def lazy_weight(shape: tuple[int, ...], dtype: str = "float16") -> hidet.Tensor:
    """A constant of zeros whose memory is taken only where it is read, so that a plan can be made without it.

    The pages are mapped without reservation: a graph may have weights of more bytes than the machine has memory.
    """
    kind: torch.dtype = getattr(torch, dtype)
    nbytes = math.prod(shape) * kind.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    pages = mmap.mmap(-1, max(nbytes, 1), flags=flags)
    return hidet.from_torch(torch.frombuffer(pages, dtype=kind, count=math.prod(shape)).reshape(shape))


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

    def weight(*shape: int) -> hidet.Tensor:
        return lazy_weight(shape, config.dtype)

    def linear(x: hidet.Tensor, out: int) -> hidet.Tensor:
        return ops.matmul(x, weight(int(x.shape[-1]), out)) + weight(out)

    def norm(x: hidet.Tensor) -> hidet.Tensor:
        return ops.layer_norm(x) * weight(hidden) + weight(hidden)

    def heads(x: hidet.Tensor, axes: list[int]) -> hidet.Tensor:
        return ops.permute_dims(ops.reshape(x, [batch, seq, config.heads, size]), axes)

    ids = hidet.symbol([batch, seq], "int32", "cpu")
    mask = hidet.symbol([1, 1, seq, seq], config.dtype, "cpu")
    words = weight(config.vocabulary, hidden)
    x = ops.take(words, ids) + weight(seq, hidden)
    for _ in range(config.layers):
        y = norm(x)
        query, key, value = (heads(linear(y, hidden), axes) for axes in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
        scores = ops.matmul(query, key) * (1.0 / math.sqrt(size)) + mask
        context = ops.matmul(ops.softmax(scores, axis=-1), value)
        merged = ops.reshape(ops.permute_dims(context, [0, 2, 1, 3]), [batch, seq, hidden])
        x = x + linear(merged, hidden)
        x = x + linear(ops.gelu(linear(norm(x), 4 * hidden)), hidden)
    logits = ops.matmul(norm(x), weight(hidden, config.vocabulary))
    return hidet.trace_from(logits, [ids, mask])


def llama(config: LlamaConfig) -> hidet.FlowGraph:
    """``int32[batch, sequence]`` to logits ``[batch, sequence, vocabulary]``, with a causal mask as second input."""
    batch, seq, hidden = config.batch, config.sequence, config.hidden
    size, group = hidden // config.heads, config.heads // config.kv_heads

    def weight(*shape: int) -> hidet.Tensor:
        return lazy_weight(shape, config.dtype)

    def linear(x: hidet.Tensor, out: int) -> hidet.Tensor:
        return ops.matmul(x, weight(int(x.shape[-1]), out))

    def norm(x: hidet.Tensor) -> hidet.Tensor:
        return x * ops.rsqrt(ops.mean(x * x, dims=-1, keep_dim=True) + 1e-5) * weight(hidden)

    cosine, sine = weight(seq, size), weight(seq, size)

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
    x = ops.take(weight(config.vocabulary, hidden), ids)
    for _ in range(config.layers):
        y = norm(x)
        query = rotate(heads(linear(y, hidden), config.heads))
        key = grouped(rotate(heads(linear(y, size * config.kv_heads), config.kv_heads)))
        value = grouped(heads(linear(y, size * config.kv_heads), config.kv_heads))
        scores = ops.matmul(query, ops.permute_dims(key, [0, 1, 3, 2])) * (1.0 / math.sqrt(size)) + mask
        context = ops.matmul(ops.softmax(scores, axis=-1), value)
        merged = ops.reshape(ops.permute_dims(context, [0, 2, 1, 3]), [batch, seq, hidden])
        x = x + linear(merged, hidden)
        y = norm(x)
        x = x + linear(ops.silu(linear(y, config.inner)) * linear(y, config.inner), hidden)
    return hidet.trace_from(ops.matmul(norm(x), weight(hidden, config.vocabulary)), [ids, mask])
