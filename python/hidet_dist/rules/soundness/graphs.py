"""Small whole graphs with what models do between their operators: fused projections, heads, groups, masks, lookups."""

from __future__ import annotations

from collections.abc import Callable

import hidet
import numpy as np
from hidet import ops
from hidet.graph import FlowGraph, Tensor
from hidet.graph.ops.matmul.matmul import matmul_nt


def _weight(rng: np.random.Generator, *shape: int) -> Tensor:
    return hidet.asarray(rng.uniform(-0.5, 0.5, shape).astype(np.float32))


def _trace(x: Tensor, y: Tensor) -> FlowGraph:
    return hidet.trace_from(y, inputs=[x])


def mlp(rng: np.random.Generator) -> FlowGraph:
    """Two projections, an activation and a residual."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    hidden = ops.gelu(ops.add(ops.matmul(x, _weight(rng, 8, 24)), _weight(rng, 24)))
    return _trace(x, ops.add(x, ops.matmul(hidden, _weight(rng, 24, 8))))


def fused_projection(rng: np.random.Generator) -> FlowGraph:
    """A projection to query, key and value in one matrix, split, and each projected again."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    q, k, v = ops.split(ops.matmul(x, _weight(rng, 8, 36)), 3, axis=1)
    y = ops.add(ops.multiply(q, k), v)
    return _trace(x, ops.matmul(y, _weight(rng, 12, 8)))


def attention(rng: np.random.Generator) -> FlowGraph:
    """Causal self-attention of four heads from a fused projection, as GPT-2 has it."""
    batch, length, heads, size = 2, 6, 4, 4
    x = hidet.symbol([batch, length, heads * size], "float32", "cpu")
    fused = ops.matmul(x, _weight(rng, heads * size, 3 * heads * size))
    q, k, v = (
        ops.transpose(ops.reshape(part, [batch, length, heads, size]), [0, 2, 1, 3])
        for part in ops.split(fused, 3, axis=2)
    )
    mask = hidet.asarray(np.triu(np.full([length, length], -1e4, np.float32), 1))
    scores = ops.add(ops.matmul(q, ops.transpose(k, [0, 1, 3, 2])), mask)
    mixed = ops.matmul(ops.softmax(scores, -1), v)
    merged = ops.reshape(ops.transpose(mixed, [0, 2, 1, 3]), [batch, length, heads * size])
    return _trace(x, ops.layer_norm(ops.add(x, ops.matmul(merged, _weight(rng, heads * size, heads * size)))))


def lookup(rng: np.random.Generator) -> FlowGraph:
    """Token and position embeddings, and scores over the vocabulary by the same table."""
    x = hidet.symbol([2, 6], "int64", "cpu")
    table = _weight(rng, 12, 8)
    hidden = ops.add(ops.take(table, x, 0), _weight(rng, 6, 8))
    return _trace(x, matmul_nt(ops.layer_norm(hidden), table))


def convolutions(rng: np.random.Generator) -> FlowGraph:
    """Dense, depthwise and pointwise convolutions with padding, pooling and a mean over the image."""
    x = hidet.symbol([2, 4, 6, 6], "float32", "cpu")
    y = ops.relu(ops.conv2d(x, _weight(rng, 12, 4, 3, 3), padding=1))
    y = ops.conv2d(y, _weight(rng, 12, 1, 3, 3), padding=1, groups=12)
    y = ops.max_pool2d(ops.conv2d(y, _weight(rng, 12, 12, 1, 1)), 2, 2, 0)
    return _trace(x, ops.matmul(ops.mean(y, [2, 3]), _weight(rng, 12, 4)))


def triangle(rng: np.random.Generator) -> FlowGraph:
    """Absolute indices between projections: a triangle, a pad, a slice with a stride."""
    x = hidet.symbol([8, 8], "float32", "cpu")
    y = ops.tril(ops.matmul(x, _weight(rng, 8, 12)), 1)
    y = ops.pad(y, [0, 2, 0, 2])
    y = ops.strided_slice(y, [0, 1], [8, 16], [0, 1], [1, 2])
    return _trace(x, ops.matmul(ops.triu(y, -1), _weight(rng, 8, 4)))


GRAPHS: dict[str, Callable[[np.random.Generator], FlowGraph]] = {
    "mlp": mlp,
    "fused_projection": fused_projection,
    "attention": attention,
    "lookup": lookup,
    "convolutions": convolutions,
    "triangle": triangle,
}
