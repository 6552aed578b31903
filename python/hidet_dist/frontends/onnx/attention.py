"""Lowerings of attention and rotary embeddings, of the standard and of ONNX Runtime."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hidet import ops
from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.frontends.onnx.initializers import dtype_name
from hidet_dist.frontends.onnx.nodes import MICROSOFT, Node, bounded, lowers, rank_of, static
from hidet_dist.frontends.refusals import Refused
from hidet_dist.limits import MOST_PLACES
from hidet_dist.operators import elementwise, reductions, shaping
from hidet_dist.operators.attention import LEAST, Mask, attention_mask, causal_mask, repeated_heads
from hidet_dist.operators.dtypes import constant, to_dtype
from hidet_dist.spec.extents import extents_of, same_extent


class _AttentionScores(NamedTuple):
    """Attention's result [batch, heads, queries, size], and what it is computed from [batch, heads, queries, keys]."""

    result: Tensor
    products: Tensor
    biased: Tensor
    probabilities: Tensor


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float | None,
    softcap: float = 0.0,
    precision: str | None = None,
    sinks: Tensor | None = None,
) -> _AttentionScores:
    """Attention of queries, keys and values [batch, heads, length, size]; keys and values may have fewer heads.

    ``sinks`` [heads] are scores of no key, which take a part of each query's attention.
    """
    dtype, heads = query.dtype, extents_of(query)[1]
    scale = 1 / math.sqrt(static(query, 3, "the size of a head")) if scale is None else scale
    key, value = (repeated_heads(x, heads) for x in (key, value))
    products = elementwise.mul(operators.matmul(query, key, transposed=True), float(scale))
    if softcap > 0:
        products = elementwise.mul(elementwise.tanh(elementwise.div(products, softcap)), softcap)
    biased = products if mask is None else elementwise.add(products, mask.bias)
    scores = biased if precision is None else to_dtype(biased, precision)
    softmax = reductions.softmax(scores, -1) if sinks is None else _softmax_beside(scores, sinks)
    probabilities = to_dtype(softmax, dtype)
    if mask is not None and mask.blind is not None:
        probabilities = elementwise.where(mask.blind, 0.0, probabilities)
    return _AttentionScores(operators.matmul(probabilities, value), products, biased, probabilities)


def _softmax_beside(scores: Tensor, sinks: Tensor) -> Tensor:
    """The softmax of scores [batch, heads, queries, keys] beside one more score for each head, which is left out."""
    batch, heads, queries, keys = extents_of(scores)
    column = ops.broadcast(
        ops.reshape(to_dtype(sinks, scores.dtype.name), [1, heads, 1, 1]), [batch, heads, queries, 1]
    )
    return ops.strided_slice(reductions.softmax(shaping.concat([scores, column], 3), 3), [0], [keys], [3])


def in_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * size] as [batch, heads, length, size]."""
    batch, length, _ = extents_of(x)
    return ops.permute_dims(
        ops.reshape(x, [batch, length, heads, static(x, 2, "a hidden size") // heads]), [0, 2, 1, 3]
    )


def joined(x: Tensor) -> Tensor:
    """[batch, heads, length, size] as [batch, length, heads * size]."""
    batch, _, length, _ = extents_of(x)
    width = static(x, 1, "the heads") * static(x, 3, "the size of a head")
    return ops.reshape(ops.permute_dims(x, [0, 2, 1, 3]), [batch, length, width])


def near(queries: int, keys: int, offset: int, left: int, right: int, like: Tensor) -> tuple[Tensor, bool]:
    """Whether query i sees key j, of those at most ``left`` before and ``right`` behind ``i + offset``.

    A negative number is no bound; one of them is. Returns bool[queries, keys], and whether each query sees a key.
    """
    places = np.arange(bounded(queries, "the queries of a mask", MOST_PLACES)) + offset
    first = np.maximum(places - left, 0) if left >= 0 else np.zeros_like(places)
    last = np.minimum(places + right, keys - 1) if right >= 0 else np.full_like(places, keys - 1)
    low, high = (constant(bound.reshape(-1, 1), "int64", like) for bound in (first, last))
    key = _numbers(keys, [1, keys], like)
    bounds = [elementwise.ge(key, low)] if left >= 0 else []
    bounds += [elementwise.le(key, high)] if right >= 0 else []
    return functools.reduce(elementwise.logical_and, bounds), bool((first <= last).all())


def near_by_batch(queries: int, keys: int, lengths: Tensor, left: int, right: int) -> list[Tensor]:
    """The same bounds where the queries are the last of ``lengths[batch]`` keys: bool[batch, 1, queries, keys]."""
    query = _numbers(queries, [1, 1, queries, 1], lengths)
    length = ops.reshape(to_dtype(lengths, "int64"), [extents_of(lengths)[0], 1, 1, 1])
    place = elementwise.sub(elementwise.add(query, length), queries)
    key = _numbers(keys, [1, 1, 1, keys], lengths)
    bounds = [elementwise.ge(key, elementwise.sub(place, left))] if left >= 0 else []
    return [*bounds, *([elementwise.le(key, elementwise.add(place, right))] if right >= 0 else [])]


def first_keys(counts: Tensor, keys: int) -> Tensor:
    """Whether a key is one of the first ``counts[batch]``: bool[batch, 1, 1, keys]."""
    count = ops.reshape(to_dtype(counts, "int64"), [extents_of(counts)[0], 1, 1, 1])
    return elementwise.lt(_numbers(keys, [1, 1, 1, keys], counts), count)


def _numbers(count: int, shape: Sequence[int], like: Tensor) -> Tensor:
    """The numbers from 0 to ``count - 1`` in a shape. Raises Refused for too many."""
    numbers = np.arange(bounded(count, "the positions of a mask", MOST_PLACES))
    return constant(numbers.reshape(shape), "int64", like)


@lowers("Attention")
def _attention(node: Node) -> tuple[Tensor | None, ...]:
    query, key, value = (node.tensor(n) for n in range(3))
    flat = rank_of(query) == 3
    if flat:
        own, shared = int(node.attributes["q_num_heads"]), int(node.attributes["kv_num_heads"])
        query, key, value = in_heads(query, own), in_heads(key, shared), in_heads(value, shared)
    past = 0
    if node.value(4) is not None:
        past = static(node.tensor(4), 2, "the length of a cache")
        key, value = shaping.concat([node.tensor(4), key], 2), shaping.concat([node.tensor(5), value], 2)
    precision = node.get("softmax_precision", 0)
    mode, mask = node.get("qk_matmul_output_mode", 0), _mask(node, query, key, past)
    softcap = float(node.get("softcap", 0.0))
    scale = node.get("scale", None)
    scores = attended(query, key, value, mask, scale, softcap, dtype_name(precision) if precision else None)
    shown: Tensor | None = None
    if len(node.outputs) > 3 and node.outputs[3]:
        shown = {0: scores.products, 1: scores.products, 2: scores.biased, 3: scores.probabilities}[mode]
        if mode == 2 and mask is not None:
            hidden = elementwise.le(mask.bias, LEAST[query.dtype.name])
            shown = elementwise.where(hidden, -math.inf, shown)
    return joined(scores.result) if flat else scores.result, key, value, shown


def _mask(node: Node, query: Tensor, key: Tensor, past: int) -> Mask | None:
    """The mask of the standard's attention: what is given, causality, and the keys that are no padding."""
    dtype, given, lengths = query.dtype.name, node.optional(3), node.optional(6)
    left, right = int(node.get("left_window_size", -1)), int(node.get("right_window_size", -1))
    right = 0 if node.get("is_causal", 0) else right
    is_bounded = left >= 0 or right >= 0
    if given is None and lengths is None:
        if not is_bounded:
            return None
        if not past and (left, right) == (-1, 0):
            return causal_mask(extents_of(query)[2], extents_of(key)[2], dtype)
    keys, allowed, all_see = static(key, 2, "the number of keys"), list[Tensor](), False
    if given is not None:
        given = _of_width(given, keys)
    if is_bounded:
        queries = static(query, 2, "the number of queries")
        if lengths is None:
            seen, all_see = near(queries, keys, past, left, right, query)
            allowed.append(seen)
        else:
            allowed += near_by_batch(queries, keys, lengths, left, right)
    if lengths is not None:
        allowed.append(first_keys(lengths, keys))
    if given is not None and given.dtype.is_boolean():
        allowed.append(given)
        given = None
    if not allowed:
        assert given is not None
        return attention_mask(given, dtype)
    together = functools.reduce(elementwise.logical_and, allowed)
    if given is not None:
        return attention_mask(elementwise.where(together, given, -math.inf), dtype)
    if all_see and len(allowed) == 1:
        return Mask(elementwise.SelectOp(together, 0.0, LEAST[dtype], dtype).outputs[0], None)
    return attention_mask(together, dtype)


def _of_width(mask: Tensor, keys: int) -> Tensor:
    """Hide the keys behind those that a mask has, unless it is one number."""
    missing = keys - static(mask, rank_of(mask) - 1, "the width of a mask") if rank_of(mask) > 0 else 0
    if missing <= 0:
        return mask
    return shaping.constant_pad_nd(mask, [0, missing], 0 if mask.dtype.is_boolean() else -math.inf)


@lowers("RotaryEmbedding")
def _rotary_embedding(node: Node) -> Tensor:
    cosines, sines = node.tensor(1), node.tensor(2)
    if node.value(3) is not None:
        cosines, sines = (ops.take(table, node.tensor(3), 0) for table in (cosines, sines))
    return _rotated(node, cosines, sines)


@lowers("RotaryEmbedding", domains=(MICROSOFT,))
def _rotary_embedding_of_a_table(node: Node) -> Tensor:
    if node.get("is_packed_batching", 0) or node.get("scale", 1.0) != 1.0:
        raise Refused("a rotary embedding of packed sequences, or with a scale, is not supported")
    x, positions = node.tensor(0), to_dtype(node.tensor(1), "int64")
    batch, length = static(x, 0, "the batch"), static(x, rank_of(x) - 2, "the length of a sequence")
    if rank_of(positions) == 1:  # the position of the first one
        steps = constant(np.arange(length).reshape(1, -1), "int64", x)
        positions = ops.broadcast(elementwise.add(steps, ops.reshape(positions, [1, 1])), [batch, length])
    return _rotated(node, *(ops.take(node.tensor(n), positions, 0) for n in (2, 3)))


def _rotated(node: Node, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate pairs of elements of each head by angles whose cosines and sines are [batch, length, pairs]."""
    x, flat = node.tensor(0), rank_of(node.tensor(0)) == 3
    if flat:
        heads = int(node.get("num_heads", 0)) or static(x, 2, "a hidden size") // (2 * static(cosines, 2, "the angles"))
        x = in_heads(x, heads)
    width = int(node.get("rotary_embedding_dim", 0)) or static(x, 3, "the size of a head")
    turned = rotated_heads(x, cosines, sines, width, bool(node.get("interleaved", 0)))
    return joined(turned) if flat else turned


def rotated_heads(x: Tensor, cosines: Tensor, sines: Tensor, width: int, interleaved: bool) -> Tensor:
    """Rotate pairs of the first ``width`` elements of each head of x [batch, heads, length, size].

    Angles have cosines and sines [batch, length, width / 2]. Pairs are neighbours if ``interleaved``, else one half's
    elements and the other's.
    """
    size = static(x, 3, "the size of a head")
    cosines, sines = (ops.unsqueeze(table, [1]) for table in (cosines, sines))
    part = x if width == size else ops.strided_slice(x, [0], [width], [3])
    if interleaved:
        first, second = (ops.strided_slice(part, [n], [width], [3], [2]) for n in range(2))
    else:
        first, second = (ops.strided_slice(part, [n * width // 2], [(n + 1) * width // 2], [3]) for n in range(2))
    real = elementwise.sub(elementwise.mul(first, cosines), elementwise.mul(second, sines))
    imaginary = elementwise.add(elementwise.mul(first, sines), elementwise.mul(second, cosines))
    if interleaved:
        turned = ops.reshape(shaping.stack([real, imaginary], 4), list(extents_of(part)))
    else:
        turned = shaping.concat([real, imaginary], 3)
    if width != size:
        turned = shaping.concat([turned, ops.strided_slice(x, [width], [size], [3])], 3)
    return turned


# Attention as ONNX Runtime's optimizer writes it


def _runtime_mask(node: Node, given: Tensor | None, bias: Tensor | None, query: Tensor, key: Tensor, past: int) -> Any:
    """What is added to the scores: numbers for padding, for keys after a query, and an input of the node."""
    dtype, keys = query.dtype.name, static(key, 2, "the number of keys")
    total = bias
    if given is not None:
        batch = static(query, 0, "the batch")
        if rank_of(given) == 1 and same_extent(extents_of(given)[0], batch):
            seen = first_keys(given, keys)
        elif rank_of(given) in (2, 3):
            shape = [batch, 1, *([1] if rank_of(given) == 2 else []), *extents_of(given)[1:]]
            seen = ops.reshape(elementwise.gt(given, 0), shape)
        else:
            raise Refused(f"a mask of the shape {list(extents_of(given))} is not supported")
        hidden = elementwise.SelectOp(seen, 0.0, float(node.get("mask_filter_value", -10000.0)), dtype).outputs[0]
        total = hidden if total is None else elementwise.add(total, hidden)
    if node.get("unidirectional", 0):
        allowed, _ = near(static(query, 2, "the number of queries"), keys, past, -1, 0, query)
        after = elementwise.SelectOp(allowed, 0.0, LEAST[dtype], dtype).outputs[0]
        total = after if total is None else elementwise.where(allowed, total, LEAST[dtype])
    return None if total is None else Mask(total, None)


@lowers("Attention", domains=(MICROSOFT,))
def _runtime_attention(node: Node) -> tuple[Tensor | None, ...]:
    if node.get("do_rotary", 0) or node.get("past_present_share_buffer", 0) or node.value(6) is not None:
        raise Refused("attention with rotary embeddings, or that shares its cache, is not supported")
    x, weight, heads = node.tensor(0), node.tensor(1), int(node.attributes["num_heads"])
    width = static(weight, 1, "the width of a weight")
    sizes = [int(n) for n in node.get("qkv_hidden_sizes", [width // 3] * 3)]
    projected = operators.matmul(x, weight)
    if node.value(2) is not None:
        projected = elementwise.add(projected, node.tensor(2))
    ends = np.cumsum(sizes)
    query, key, value = (
        in_heads(ops.strided_slice(projected, [int(end - size)], [int(end)], [2]), heads)
        for size, end in zip(sizes, ends, strict=True)
    )
    past = 0
    if node.value(4) is not None:
        cache = node.tensor(4)
        past = static(cache, 3, "the length of a cache")
        key, value = (shaping.concat([shaping.select(cache, 0, n), own], 2) for n, own in enumerate((key, value)))
    present = shaping.stack([key, value], 0) if len(node.outputs) > 1 and node.outputs[1] else None
    mask = _runtime_mask(node, node.optional(3), node.optional(5), query, key, past)
    scale = node.get("scale", 0.0) or None
    return joined(attended(query, key, value, mask, scale).result), present


@lowers("MultiHeadAttention", domains=(MICROSOFT,))
def _multi_head_attention(node: Node) -> tuple[Tensor | None, ...]:
    if node.value(8) is not None or node.value(9) is not None or (len(node.outputs) > 3 and node.outputs[3]):
        raise Refused("attention that shares its cache, or shows its scores, is not supported")
    heads = int(node.attributes["num_heads"])
    query, key, value = _parts(node)
    if node.value(3) is not None:
        bias, parts, start = node.tensor(3), [], 0
        for x in (query, key, value):
            if rank_of(x) != 3:
                raise Refused("a bias of keys and values that are in heads already is not supported")
            end = start + static(x, 2, "a hidden size")
            parts.append(elementwise.add(x, ops.strided_slice(bias, [start], [end], [0])))
            start = end
        query, key, value = parts
    query, key, value = (x if rank_of(x) == 4 else in_heads(x, heads) for x in (query, key, value))
    past = 0
    if node.value(6) is not None:
        past = static(node.tensor(6), 2, "the length of a cache")
        key, value = shaping.concat([node.tensor(6), key], 2), shaping.concat([node.tensor(7), value], 2)
    mask = _runtime_mask(node, node.optional(4), node.optional(5), query, key, past)
    scale = node.get("scale", 0.0) or None
    return joined(attended(query, key, value, mask, scale).result), key, value


def _parts(node: Node) -> Sequence[Tensor]:
    """Queries, keys and values, some of which may be packed: [batch, length, heads, parts, size]."""
    query = node.tensor(0)
    if rank_of(query) == 5:
        return [ops.permute_dims(shaping.select(query, 3, n), [0, 2, 1, 3]) for n in range(3)]
    key = node.tensor(1)
    if rank_of(key) == 5:
        return [query, *(ops.permute_dims(shaping.select(key, 3, n), [0, 2, 1, 3]) for n in range(2))]
    return query, key, node.tensor(2)
