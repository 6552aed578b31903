"""Attention: products of queries and keys, what hides keys, and heads that share keys and values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from hidet import ops
from hidet.graph import Tensor
from hidet.graph.ops.transform import BroadcastOp
from hidet.ir.type import data_type

from hidet_dist.operators import elementwise, reductions
from hidet_dist.operators.dtypes import to_dtype
from hidet_dist.operators.products import matmul
from hidet_dist.spec.extents import Extent, extents_of, same_extent

LEAST: dict[str, float] = {
    "float16": -65504.0,
    "bfloat16": -3.3895313892515355e38,
    "float32": -3.4028234663852886e38,
    "float64": -1.7976931348623157e308,
}


class Mask(NamedTuple):
    """What is added to the scores of attention, as tensors of the graph.

    An operator that hid the mask could be sharded wrongly.

    Attributes
    ----------
    bias: Tensor
        Broadcast to the scores [..., queries, keys] and of their dtype; its least number where a key is not seen.
    blind: Tensor, optional
        bool[..., queries, 1]: the queries that see no key, whose result is 0. None where each sees one.
    """

    bias: Tensor
    blind: Tensor | None


def causal_mask(queries: Extent, keys: Extent, dtype: str) -> Mask:
    """The mask by which query i sees the keys up to i."""
    hidden = ops.full([queries, keys], data_type(dtype)(LEAST[dtype]), dtype)
    return Mask(ops.triu(hidden, 1), None)


def is_causal_mask(values: torch.Tensor, queries: Extent, keys: Extent) -> bool:
    """Whether the known values of a mask are those of a causal one."""
    if values.dtype != torch.bool or tuple(values.shape[-2:]) != (queries, keys):
        return False
    return bool((values == torch.ones_like(values).tril()).all())


def attention_mask(mask: Tensor, dtype: str, values: torch.Tensor | None = None) -> Mask:
    """A mask of PyTorch's attention: bool, true where a key is seen, or what is added to the scores.

    ``values`` are those of a mask that is known while tracing: no query is then looked at that sees a key.
    """
    while isinstance(mask.op, BroadcastOp) and len(mask.op.inputs[0].shape) == len(mask.shape):
        mask = mask.op.inputs[0]  # sums broadcast by themselves
    is_bool = mask.dtype.is_boolean()
    if is_bool:
        bias = elementwise.SelectOp(mask, 0.0, LEAST[dtype], dtype).outputs[0]
    else:
        bias = elementwise.clamp_min(to_dtype(mask, dtype), LEAST[dtype])
    if values is not None and bool((values if is_bool else values > -math.inf).any(-1).all()):
        return Mask(bias, None)
    # The least number itself is no minus infinity: a row of it is the mean of all values.
    seen = mask if is_bool else elementwise.ge(to_dtype(mask, dtype), LEAST[dtype])
    return Mask(bias, elementwise.logical_not(reductions.any(seen, -1, True)))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(query @ key.T * scale + mask) @ value``, shapes [..., heads, length, size].

    A mask is bool (true where a key is seen) or is added. ``is_causal`` lets query i see the keys up to i. A query that
    sees no key has the result 0. With ``enable_gqa`` there may be fewer heads of keys and values, each for as many
    heads of queries. ``scale`` is one over the root of the size of a head by default.

    Raises ValueError when there are a mask and causality, or dropout, or the size of a head is a symbolic dim and there
    is no scale.
    """
    if dropout_p:
        raise ValueError(f"Attention has dropout {dropout_p}: put the model into inference mode (eval()).")
    if attn_mask is not None and is_causal:
        raise ValueError("Attention takes either a mask or is_causal=True.")
    *_, queries, size = extents_of(query)
    dtype = query.dtype.name
    if scale is None:
        if not isinstance(size, int):
            raise ValueError(f"The size of a head is {size}: attention over a symbolic dim needs a scale.")
        scale = 1.0 / math.sqrt(size)
    if enable_gqa:
        key, value = (repeated_heads(x, extents_of(query)[-3]) for x in (key, value))
    if is_causal:
        attn_mask = causal_mask(queries, extents_of(key)[-2], dtype)
    elif isinstance(attn_mask, Tensor):
        attn_mask = attention_mask(attn_mask, dtype)
    scores = elementwise.mul(matmul(query, key, transposed=True), float(scale))
    scores = scores if attn_mask is None else elementwise.add(scores, attn_mask.bias)
    mixed = matmul(reductions.softmax(scores, -1), value)
    if attn_mask is None or attn_mask.blind is None:
        return mixed
    return elementwise.where(attn_mask.blind, 0.0, mixed)


def repeated_heads(x: Tensor, heads: Any) -> Tensor:
    """Keys or values [..., groups, length, size] with each of their heads for ``heads / groups`` heads in turn."""
    *batch, groups, length, size = extents_of(x)
    if same_extent(groups, heads):
        return x
    wide = ops.broadcast(ops.unsqueeze(x, [len(batch) + 1]), [*batch, groups, heads // groups, length, size])
    return ops.reshape(wide, [*batch, heads, length, size])
