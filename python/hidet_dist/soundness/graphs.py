"""Small whole graphs for random plans: patterns of operators from models, and models themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import hidet
import numpy as np
import torch
from hidet import ops
from hidet.graph import FlowGraph, Tensor
from hidet.graph.ops.matmul.matmul import matmul_nt
from hidet.graph.ops.scatter import scatter_

from hidet_dist.rules.declared import definition_of
from hidet_dist.soundness.oracle import evaluate, numpy_dtype
from hidet_dist.testing import bert, models

Builder = Callable[[np.random.Generator], FlowGraph]


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


def uneven(rng: np.random.Generator) -> FlowGraph:
    """A language model whose vocabulary and inner width have no useful divisors; its head shares the lookup's table."""
    words, width, inner = 13, 8, 11
    x = hidet.symbol([2, 4], "int64", "cpu")
    table = _weight(rng, words, width)
    hidden = ops.layer_norm(ops.add(ops.take(table, x, 0), _weight(rng, 4, width)))
    # Zeros in the padding of the inner width become ones here and infinity there: neither may affect results.
    wide = ops.exp(ops.add(ops.matmul(hidden, _weight(rng, width, inner)), _weight(rng, inner)))
    wide = ops.divide(wide, hidet.asarray(rng.uniform(2, 4, [inner]).astype(np.float32)))
    hidden = ops.add(hidden, ops.matmul(wide, _weight(rng, inner, width)))
    return _trace(x, ops.add(matmul_nt(hidden, table), _weight(rng, words)))


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


def gated_decoder(rng: np.random.Generator) -> FlowGraph:
    """A decoder layer of LLaMA: RMS norm, rotary embedding, four heads with two heads of keys and values, a gate."""
    batch, length, heads, groups, size = 2, 4, 4, 2, 4
    width = heads * size
    x = hidet.symbol([batch, length, width], "float32", "cpu")

    def norm(y: Tensor) -> Tensor:
        scale = ops.rsqrt(ops.add(ops.mean(ops.square(y), [-1], keep_dim=True), 1e-5))
        return ops.multiply(ops.multiply(y, scale), _weight(rng, width))

    angle = np.outer(np.arange(length), [1.0, 0.1, 1.0, 0.1]).astype(np.float32)
    cosine, sine = hidet.asarray(np.cos(angle)), hidet.asarray(np.sin(angle))

    def split(y: Tensor, count: int) -> Tensor:
        return ops.transpose(ops.reshape(y, [batch, length, count, size]), [0, 2, 1, 3])

    def rotate(y: Tensor) -> Tensor:
        left, right = ops.split(y, 2, axis=3)
        turned = ops.concat([ops.negative(right), left], 3)
        return ops.add(ops.multiply(y, cosine), ops.multiply(turned, sine))

    def repeat(y: Tensor) -> Tensor:
        wide = ops.broadcast(ops.unsqueeze(y, 2), [batch, groups, heads // groups, length, size])
        return ops.reshape(wide, [batch, heads, length, size])

    normed = norm(x)
    q = rotate(split(ops.matmul(normed, _weight(rng, width, width)), heads))
    k = repeat(rotate(split(ops.matmul(normed, _weight(rng, width, groups * size)), groups)))
    v = repeat(split(ops.matmul(normed, _weight(rng, width, groups * size)), groups))
    mask = hidet.asarray(np.triu(np.full([length, length], -1e4, np.float32), 1))
    scores = ops.softmax(ops.add(ops.matmul(q, ops.transpose(k, [0, 1, 3, 2])), mask), -1)
    merged = ops.reshape(ops.transpose(ops.matmul(scores, v), [0, 2, 1, 3]), [batch, length, width])
    x1 = ops.add(x, ops.matmul(merged, _weight(rng, width, width)))
    normed = norm(x1)
    gate = ops.silu(ops.matmul(normed, _weight(rng, width, 24)))
    hidden = ops.multiply(gate, ops.matmul(normed, _weight(rng, width, 24)))
    return _trace(x, ops.add(x1, ops.matmul(hidden, _weight(rng, 24, width))))


def experts(rng: np.random.Generator) -> FlowGraph:
    """A layer of four experts: all of them compute, and a router weights the best one for each token."""
    tokens, width, count = 8, 8, 4
    x = hidet.symbol([tokens, width], "float32", "cpu")
    scores = ops.softmax(ops.matmul(x, _weight(rng, width, count)), 1)
    best = ops.equal(scores, ops.max(scores, [1], keep_dim=True))
    weights = ops.where(best, scores, 0.0)
    hidden = ops.gelu(ops.matmul(ops.unsqueeze(x, 0), _weight(rng, count, width, 12)))
    outputs = ops.matmul(hidden, _weight(rng, count, 12, width))
    weighed = ops.multiply(outputs, ops.unsqueeze(ops.transpose(weights, [1, 0]), 2))
    return _trace(x, ops.sum(weighed, [0]))


def encoder(rng: np.random.Generator) -> FlowGraph:
    """A sentence encoder of one layer."""
    config = bert.BertConfig(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=8,
    )
    return bert.trace(bert.random_bert(config, seed=int(rng.integers(100))), batch=2, seq=4)


def _route(x: Tensor, rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Route each token to an expert: compute the expert, the token's slot among those of the expert, and the weight.

    Returns one-hot experts float32[tokens, count], slots int64[tokens, count] (-1 for other experts) and weights
    float32[tokens, 1].
    """
    scores = ops.softmax(ops.matmul(x, _weight(rng, int(x.shape[1]), count)), 1)
    best = ops.argmax(scores, 1, keep_dim=True)
    chosen = ops.equal(best, hidet.asarray(np.arange(count).reshape(1, count)))
    order = ops.cumsum(ops.cast(chosen, "int64"), 0)
    places = ops.where(chosen, order - 1, ops.full([1, 1], -1, "int64", "cpu"))
    return ops.cast(chosen, "float32"), places, ops.max(scores, [1], keep_dim=True)


def _expert_mlp(x: Tensor, rng: np.random.Generator) -> Tensor:
    """``x[experts, room, width]`` through each expert's two matrices."""
    count, _, width = map(int, x.shape)
    return ops.matmul(ops.gelu(ops.matmul(x, _weight(rng, count, width, 12))), _weight(rng, count, 12, width))


def experts_by_masks(rng: np.random.Generator) -> FlowGraph:
    """Four experts with room for four tokens each, as in GShard: products with a mask dispatch and combine tokens."""
    tokens, width, count, room = 8, 8, 4, 4
    x = hidet.symbol([tokens, width], "float32", "cpu")
    chosen, places, weights = _route(x, rng, count)
    slots = hidet.asarray(np.arange(room).reshape(1, 1, room))
    there = ops.cast(ops.equal(ops.unsqueeze(places, 2), slots), "float32")
    mask = ops.reshape(ops.multiply(there, ops.unsqueeze(chosen, 2)), [tokens, count * room])
    sent = ops.reshape(ops.matmul(ops.transpose(mask, [1, 0]), x), [count, room, width])
    outputs = ops.reshape(_expert_mlp(sent, rng), [count * room, width])
    return _trace(x, ops.add(x, ops.multiply(ops.matmul(mask, outputs), weights)))


def experts_by_index(rng: np.random.Generator) -> FlowGraph:
    """Four experts with room for all tokens: tokens are scattered to their expert's slots and gathered from there."""
    tokens, width, count, room = 8, 8, 4, 8
    x = hidet.symbol([tokens, width], "float32", "cpu")
    _, places, weights = _route(x, rng, count)
    first = hidet.asarray(np.arange(count).reshape(1, count) * room)
    slot = ops.max(ops.where(ops.less(places, first * 0), first * 0 - 1, ops.add(places, first)), [1], keep_dim=True)
    slots = ops.broadcast(slot, [tokens, width])
    empty = ops.full([count * room, width], 0.0, "float32", "cpu")
    sent = ops.reshape(scatter_(empty, 0, slots, x, "replace"), [count, room, width])
    outputs = ops.reshape(_expert_mlp(sent, rng), [count * room, width])
    return _trace(x, ops.add(x, ops.multiply(ops.gather(outputs, slots, 0), weights)))


def _folded(build: Callable[[], FlowGraph]) -> FlowGraph:
    """Trace a graph, with constants folded by the oracle instead of hidet's kernels."""
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        graph = build()
    new: dict[Tensor, Tensor] = {}
    for op in graph.nodes:
        inputs = [new.get(x, x) for x in op.inputs]
        if all(x.storage is not None for x in inputs):
            values = [x.cpu().torch().numpy().astype(numpy_dtype(x.dtype)) for x in inputs]
            for y, value in zip(op.outputs, evaluate(definition_of(op), values), strict=True):
                new[y] = hidet.from_torch(torch.from_numpy(np.array(value, y.dtype.name, order="C")))
        elif inputs != op.inputs:
            moved = copy.copy(op)
            moved.inputs = inputs
            moved.outputs = moved.symbolic_run()
            new.update(zip(op.outputs, moved.outputs, strict=True))
    return hidet.trace_from([new.get(y, y) for y in graph.outputs], graph.inputs)


def _model(build: Callable[..., tuple[FlowGraph, list[np.ndarray]]]) -> Builder:
    return lambda rng: _folded(lambda: build(seed=int(rng.integers(100)))[0])


# Patterns of operators from models.
PATTERNS: dict[str, Builder] = {
    "mlp": mlp,
    "fused_projection": fused_projection,
    "attention": attention,
    "lookup": lookup,
    "uneven": uneven,
    "convolutions": convolutions,
    "triangle": triangle,
    "gated_decoder": gated_decoder,
    "experts": experts,
}

MODELS: dict[str, Builder] = {
    "gpt2": _model(partial(models.gpt2, layers=1, tokens=4, hidden=16, words=24)),
    "llama": _model(models.llama),
    "llama_grouped": _model(partial(models.llama, kv_heads=2)),
    "gemma": _model(models.gemma),
    "resnet18": _model(models.narrow_resnet),
    "resnet50": _model(partial(models.narrow_resnet, bottleneck=True)),
    "minilm": encoder,
    "vit": _model(models.vit),
    "experts_by_masks": lambda rng: _folded(lambda: experts_by_masks(rng)),
    "experts_by_index": lambda rng: _folded(lambda: experts_by_index(rng)),
}

GRAPHS: dict[str, Builder] = PATTERNS | MODELS

# Only the oracle can run these: hidet has no CPU kernel for an operator in them (its scatter is opaque).
WITHOUT_KERNELS = ("experts_by_index",)
