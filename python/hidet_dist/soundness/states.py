"""Graphs with states, and random calls of them, for random plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import hidet
import numpy as np
from hidet import ops
from hidet.graph import FlowGraph, Tensor

from hidet_dist.operators.row_attention import attention_over_rows
from hidet_dist.operators.states import replace_state, shift_state, write_rows
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.weights.states import state

Array = np.ndarray[Any, Any]
Rng = np.random.Generator

_MOST_TOKENS = 5


@dataclass(frozen=True)
class Stateful:
    """A graph with states, its symbolic dims, and a function that draws the inputs of a call."""

    graph: FlowGraph
    draw: Callable[[Rng], list[Array]]
    symbols: Mapping[str, SymbolSize] = field(default_factory=dict)


def _weight(rng: Rng, *shape: int) -> Tensor:
    return hidet.asarray(rng.uniform(-0.5, 0.5, shape).astype(np.float32))


def _of_tokens(rng: Rng) -> int:
    return int(rng.integers(2, _MOST_TOKENS + 1))


def paged_attention(rng: Rng) -> Stateful:
    """Each token writes its keys and values to a slot of two pools, and attends to the rows that a table names."""
    slots_of_pool, heads, size, rows = 8, 4, 3, 3
    width, tokens = heads * size, hidet.symbol_var("tokens")
    x, slots = hidet.symbol([tokens, width], "float32", "cpu"), hidet.symbol([tokens], "int64", "cpu")
    table = hidet.symbol([tokens, rows], "int64", "cpu")
    q, k, v = (ops.reshape(ops.matmul(x, _weight(rng, width, width)), [tokens, heads, size]) for _ in range(3))
    keys, values = (
        write_rows(state(name, [slots_of_pool, heads, size]), slots, new) for name, new in (("keys", k), ("values", v))
    )
    found, mixed = ops.take(keys, table, 0), ops.take(values, table, 0)
    scores = ops.softmax(ops.sum(ops.multiply(found, ops.unsqueeze(q, 1)), [3], keep_dim=True), 1)
    y = ops.reshape(ops.sum(ops.multiply(scores, mixed), [1]), [tokens, width])
    graph = hidet.trace_from([ops.matmul(y, _weight(rng, width, width)), keys, values], [x, slots, table])

    def draw(rng: Rng) -> list[Array]:
        count = _of_tokens(rng)
        # Slots repeat, and -1 and the number of rows are out of range: such rows are not written.
        return [
            rng.uniform(-1, 1, (count, width)),
            rng.integers(-1, slots_of_pool + 1, count),
            rng.integers(0, slots_of_pool, (count, rows)),
        ]

    return Stateful(graph, draw, {"tokens": SymbolSize(4)})


def recurrent(rng: Rng) -> Stateful:
    """A cell whose state is replaced, which reads the old value twice, and returns it."""
    batch, width = 4, 6
    x = hidet.symbol([batch, width], "float32", "cpu")
    old = state("hidden", [batch, width])
    mixed = ops.add(ops.matmul(old, _weight(rng, width, width)), ops.matmul(x, _weight(rng, width, width)))
    new = replace_state(old, ops.add(ops.multiply(old, 0.5), ops.tanh(mixed)))
    return Stateful(
        hidet.trace_from([ops.matmul(new, _weight(rng, width, 4)), ops.add(old, x), new], [x]),
        lambda rng: [rng.uniform(-1, 1, (batch, width))],
    )


def window(rng: Rng) -> Stateful:
    """A causal depthwise convolution over the last inputs, some of which are new."""
    batch, channels, taps, tokens = 2, 6, 4, hidet.symbol_var("tokens")
    x = hidet.symbol([batch, channels, tokens], "float32", "cpu")
    kept = shift_state(state("window", [batch, channels, taps]), x)
    y = ops.sum(ops.multiply(kept, _weight(rng, channels, taps)), [2])
    return Stateful(
        hidet.trace_from([ops.matmul(y, _weight(rng, channels, 4)), kept], [x]),
        lambda rng: [rng.uniform(-1, 1, (batch, channels, _of_tokens(rng)))],
        {"tokens": SymbolSize(2)},
    )


def two_writes(rng: Rng) -> Stateful:
    """Two updates of one state, by slots along two dims and then along a middle one, and a read between."""
    x = hidet.symbol([3, 4], "float32", "cpu")
    blocks, places = hidet.symbol([3], "int32", "cpu"), hidet.symbol([3], "int32", "cpu")
    first = write_rows(state("blocks", [3, 4, 4]), [blocks, places], ops.matmul(x, _weight(rng, 4, 4)), [0, 1])
    between = ops.sum(first, [0])
    columns = ops.transpose(ops.matmul(first, _weight(rng, 4, 4)), [1, 0, 2])
    second = write_rows(first, places, ops.strided_slice(columns, [0], [3], [0]), 1)
    return Stateful(
        hidet.trace_from([ops.matmul(between, _weight(rng, 4, 4)), ops.sum(second, [1]), second], [x, blocks, places]),
        lambda rng: [rng.uniform(-1, 1, (3, 4)), rng.integers(0, 3, 3), rng.integers(0, 4, 3)],
    )


def row_attention(rng: Rng) -> Stateful:
    """Rows are written to two pools, and read by an operator of two groups of heads, with a window and sinks."""
    heads, groups, size, page, pages, sequences, columns = 4, 2, 3, 2, 6, 2, 3
    width, tokens = heads * size, hidet.symbol_var("tokens")
    x, table = hidet.symbol([tokens, width], "float32", "cpu"), hidet.symbol([sequences, columns], "int64", "cpu")
    slots, own, lengths = (hidet.symbol([tokens], "int64", "cpu") for _ in range(3))
    q, k, v = (
        ops.reshape(ops.matmul(x, _weight(rng, width, count * size)), [tokens, count, size])
        for count in (heads, groups, groups)
    )
    pool = [page * pages, groups, size]
    keys, values = (write_rows(state(name, pool), slots, new) for name, new in (("keys", k), ("values", v)))
    y = attention_over_rows(
        q, keys, values, table, own, lengths, scale=0.6, page=page, window=5, sinks=_weight(rng, heads)
    )
    y = ops.matmul(ops.reshape(y, [tokens, width]), _weight(rng, width, width))

    def draw(rng: Rng) -> list[Array]:
        count = _of_tokens(rng)
        return [
            rng.uniform(-1, 1, (count, width)),
            rng.integers(-1, page * pages + 1, count),
            rng.integers(0, pages, (sequences, columns)),
            rng.integers(0, sequences, count),
            rng.integers(0, page * columns + 1, count),
        ]

    graph = hidet.trace_from([y, keys, values], [x, slots, table, own, lengths])
    return Stateful(graph, draw, {"tokens": SymbolSize(4)})


def latent_attention(rng: Rng) -> Stateful:
    """One pool in parts, whose rows are the keys of all heads, and the first elements of which are the values."""
    heads, size, value, page, parts, pages, sequences, columns = 4, 5, 3, 2, 2, 3, 2, 2
    width, tokens = heads * size, hidet.symbol_var("tokens")
    x = hidet.symbol([tokens, width], "float32", "cpu")
    table = hidet.symbol([sequences, parts, columns], "int64", "cpu")
    part, slots, own, lengths = (hidet.symbol([tokens], "int64", "cpu") for _ in range(4))
    q, new = (
        ops.reshape(ops.matmul(x, _weight(rng, width, count * size)), [tokens, count, size]) for count in (heads, 1)
    )
    latents = write_rows(state("latents", [parts, page * pages, 1, size]), [part, slots], new, [0, 1])
    y = attention_over_rows(q, latents, None, table, own, lengths, scale=0.6, page=page, value_size=value)
    y = ops.matmul(ops.reshape(y, [tokens, heads * value]), _weight(rng, heads * value, width))

    def draw(rng: Rng) -> list[Array]:
        count = _of_tokens(rng)
        return [
            rng.uniform(-1, 1, (count, width)),
            rng.integers(0, parts, count),
            rng.integers(-1, page * pages + 1, count),
            rng.integers(0, pages, (sequences, parts, columns)),
            rng.integers(0, sequences, count),
            rng.integers(0, page * parts * columns + 1, count),
        ]

    graph = hidet.trace_from([y, latents], [x, part, slots, table, own, lengths])
    return Stateful(graph, draw, {"tokens": SymbolSize(4)})


STATEFUL: dict[str, Callable[[Rng], Stateful]] = {
    "paged_attention": paged_attention,
    "recurrent": recurrent,
    "window": window,
    "two_writes": two_writes,
    "row_attention": row_attention,
    "latent_attention": latent_attention,
}
