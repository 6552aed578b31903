"""The lowering of attention with a cache of keys and values, as ONNX Runtime GenAI exports language models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hidet import ops
from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.frontends.onnx.attention import (
    attended,
    first_keys,
    in_heads,
    joined,
    near,
    near_by_batch,
    rotated_heads,
)
from hidet_dist.frontends.onnx.nodes import MICROSOFT, Node, bounded, lowers, static
from hidet_dist.frontends.refusals import Invalid, Refused
from hidet_dist.limits import MOST_PLACES
from hidet_dist.operators import elementwise, indexing, shaping
from hidet_dist.operators.attention import LEAST, Mask
from hidet_dist.operators.dtypes import constant, to_dtype
from hidet_dist.spec.extents import extents_of

# Inputs by position
_KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _LAST, _TOTAL, _COSINES, _SINES, _POSITIONS, _BIAS, _SINKS = range(1, 12)
_KEY_SCALE, _VALUE_SCALE, _QUERY_NORM, _KEY_NORM = range(12, 16)


class _CachePlaces(NamedTuple):
    """Where in the cache the new tokens of each sequence are.

    Attributes
    ----------
    total: int
        The most tokens of a sequence, old and new ones together.
    lengths: Tensor
        int64[batch], the tokens of each sequence.
    first: Tensor, optional
        int64[batch], the place of the first new token; None where all tokens are new, so that it is 0.
    """

    total: int
    lengths: Tensor
    first: Tensor | None


@lowers("GroupQueryAttention", domains=(MICROSOFT,))
def _group_query_attention(node: Node) -> tuple[Tensor | None, ...]:
    """Attention over a cache, as ONNX Runtime's CPU provider computes it where the caches are tensors of their own.

    New keys and values are written behind those that a sequence has. Rows behind its last token are 0 in the new
    cache, which is as long as the old one, or as the longest sequence.
    """
    _refuse_others(node)
    query, key, value = _in_heads(node)
    steps = static(query, 2, "the number of queries")
    places = _places(node, query, steps)
    if node.value(_QUERY_NORM) is not None:
        eps = float(node.get("qk_norm_epsilon", 1e-6))
        query, key = (
            operators.rms_norm(x, [extents_of(x)[3]], node.tensor(weight), eps)
            for x, weight in ((query, _QUERY_NORM), (key, _KEY_NORM))
        )
    if node.get("do_rotary", 0):
        positions = _positions(node, places, steps)
        cosines, sines = (ops.take(node.tensor(n), positions, 0) for n in (_COSINES, _SINES))
        width = 2 * static(cosines, 2, "the angles")
        interleaved = bool(node.get("rotary_interleaved", 0))
        query, key = (rotated_heads(x, cosines, sines, width, interleaved) for x in (query, key))
    present_key, present_value = (
        _cached(node.optional(past), x, places) for past, x in ((_PAST_KEY, key), (_PAST_VALUE, value))
    )
    keys, values = (_first_rows(x, places.total) for x in (present_key, present_value))
    dtype = query.dtype.name
    sinks = node.optional(_SINKS)
    if sinks is None and node.get("smooth_softmax", 0) > 0:
        sinks = constant(np.zeros(extents_of(query)[1]), dtype, query)
    mask = _mask(node, places, steps, dtype)
    scale = float(node.get("scale", 0.0)) or None
    precision = None if dtype == "float64" else "float32"
    scores = attended(query, keys, values, mask, scale, float(node.get("softcap", 0.0)), precision, sinks)
    return joined(scores.result), present_key, present_value


def _refuse_others(node: Node) -> None:
    """Raise Refused for what is not supported, and Invalid for what ONNX Runtime does not allow."""
    if node.value(_KEY_SCALE) is not None or node.value(_VALUE_SCALE) is not None:
        raise Refused("a quantized cache of keys and values is not supported")
    if node.get("sliding_window_cache", 0):
        raise Refused("a cache of the length of a window (sliding_window_cache) is not supported")
    if node.get("qk_output", 0) or any(node.outputs[3:]):
        raise Refused("attention that shows its scores (output_qk) is not supported")
    pairs = (
        ("key and value", _KEY, _VALUE),
        ("past_key and past_value", _PAST_KEY, _PAST_VALUE),
        ("cos_cache and sin_cache", _COSINES, _SINES),
        ("q_norm_weight and k_norm_weight", _QUERY_NORM, _KEY_NORM),
    )
    for names, one, other in pairs:
        if (node.value(one) is None) != (node.value(other) is None):
            raise Invalid(f"{names} must be given both, or neither")
    if node.get("do_rotary", 0) and node.value(_COSINES) is None:
        raise Invalid("do_rotary needs cos_cache and sin_cache")
    window = node.get("local_window_size", -1)
    if window == 0 or (window > 0 and not node.get("causal", 1)):
        raise Invalid(f"local_window_size is {window}; it must be 1 or more and causal, or -1")


def _in_heads(node: Node) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, heads, length, size], which the first input may have packed. Raises Invalid."""
    own, shared = int(node.attributes["num_heads"]), int(node.attributes["kv_num_heads"])
    if own < 1 or shared < 1 or own % shared:
        raise Invalid(f"num_heads is {own}; it must be a multiple of kv_num_heads, which is {shared}")
    query = node.tensor(0)
    width = static(query, 2, "a hidden size")
    if node.value(_KEY) is not None:
        key, value = node.tensor(_KEY), node.tensor(_VALUE)
        size, rest = divmod(width, own)
        if rest or any(static(x, 2, "a hidden size") != shared * size for x in (key, value)):
            sizes = [static(x, 2, "a hidden size") for x in (query, key, value)]
            raise Invalid(f"queries, keys and values have {sizes} elements for {own}, {shared} and {shared} heads")
        return in_heads(query, own), in_heads(key, shared), in_heads(value, shared)
    size, rest = divmod(width, own + 2 * shared)
    if rest:
        raise Invalid(f"packed queries, keys and values have {width} elements for {own + 2 * shared} heads")
    ends = [own * size, (own + shared) * size, width]
    parts = (ops.strided_slice(query, [start], [end], [2]) for start, end in zip([0, *ends], ends, strict=False))
    packed_query, packed_key, packed_value = parts
    return in_heads(packed_query, own), in_heads(packed_key, shared), in_heads(packed_value, shared)


def _places(node: Node, query: Tensor, steps: int) -> _CachePlaces:
    """Where the new tokens are. Raises Invalid where they are more than all tokens, or not all though none is old."""
    total = bounded(int(node.scalar(_TOTAL, "total_sequence_length")), "the tokens of a sequence", MOST_PLACES)
    past = 0 if node.value(_PAST_KEY) is None else static(node.tensor(_PAST_KEY), 2, "the length of a cache")
    if total < steps or (total > steps and not past):
        raise Invalid(f"total_sequence_length is {total}, with {steps} new tokens and a cache of {past}")
    last = to_dtype(ops.reshape(node.tensor(_LAST), [extents_of(query)[0]]), "int64")
    first = None if total == steps else elementwise.sub(last, steps - 1)
    return _CachePlaces(total, elementwise.add(last, 1), first)


def _positions(node: Node, places: _CachePlaces, steps: int) -> Tensor:
    """The positions of new tokens, int64[batch, steps]: those given, of which a first call reads one, or the places."""
    given, batch = node.optional(_POSITIONS), extents_of(places.lengths)[0]
    if given is not None and places.first is not None:
        return to_dtype(given, "int64")
    count = constant(np.arange(steps).reshape(1, -1), "int64", places.lengths)
    if given is not None:
        start = ops.strided_slice(to_dtype(given, "int64"), [0, 0], [1, 1], [0, 1])
        return ops.broadcast(elementwise.add(count, start), [batch, steps])
    if places.first is None:
        return ops.broadcast(count, [batch, steps])
    return elementwise.add(count, ops.reshape(places.first, [batch, 1]))


def _cached(past: Tensor | None, new: Tensor, places: _CachePlaces) -> Tensor:
    """The cache [batch, heads, rows, size] after the new rows [batch, heads, steps, size] are written."""
    batch, _, steps, _ = extents_of(new)
    length = 0 if past is None else static(past, 2, "the length of a cache")
    if places.first is None or past is None:
        missing = max(length, places.total) - steps
        return shaping.constant_pad_nd(new, [0, 0, 0, missing]) if missing > 0 else new
    if places.total > length:
        past = shaping.constant_pad_nd(past, [0, 0, 0, places.total - length])
    count = constant(np.arange(steps).reshape(1, -1), "int64", new)
    rows = elementwise.add(count, ops.reshape(places.first, [batch, 1]))
    index = ops.broadcast(ops.reshape(rows, [batch, 1, steps, 1]), list(extents_of(new)))
    written = indexing.scatter(past, 2, index, new)
    is_used = first_keys(places.lengths, max(length, places.total))
    return elementwise.where(ops.reshape(is_used, [batch, 1, max(length, places.total), 1]), written, 0.0)


def _first_rows(cache: Tensor, count: int) -> Tensor:
    return cache if static(cache, 2, "the length of a cache") == count else ops.strided_slice(cache, [0], [count], [2])


def _mask(node: Node, places: _CachePlaces, steps: int, dtype: str) -> Mask:
    """What is added to scores [batch, heads, steps, total]: an input, and what hides keys that a query does not see."""
    allowed = first_keys(places.lengths, places.total)
    if node.get("causal", 1):
        window = int(node.get("local_window_size", -1))
        left = window - 1 if window > 0 else -1  # a query is one of its window
        if places.first is None:
            bounds = [near(steps, places.total, 0, left, 0, allowed)[0]]
        else:
            bounds = near_by_batch(steps, places.total, places.lengths, left, 0)
        for bound in bounds:
            allowed = elementwise.logical_and(allowed, bound)
    bias = node.optional(_BIAS)
    if bias is None:
        return Mask(elementwise.SelectOp(allowed, 0.0, LEAST[dtype], dtype).outputs[0], None)
    return Mask(elementwise.where(allowed, to_dtype(bias, dtype), LEAST[dtype]), None)
