"""Operators that look elements up by number, write them, or order them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet.graph import Tensor, ops

from hidet_dist.frontends.pytorch import pointwise
from hidet_dist.frontends.pytorch.calls import Call, Refused, cast, constant, lowers, static
from hidet_dist.frontends.pytorch.integer_reductions import reduce_integers
from hidet_dist.frontends.pytorch.shapes import expanded, permuted, reshaped, sliced
from hidet_dist.spec.extents import extents_of


@lowers("embedding.default")
def _embedding(call: Call, weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
    return ops.take(weight, indices, 0)


@lowers("index_select.default")
def _index_select(call: Call, x: Tensor, dim: int, index: Tensor) -> Tensor:
    return ops.take(x, reshaped(index, [call.shape[dim]]), dim % len(x.shape))


@lowers("gather.default", "take_along_dim.default")
def _gather(call: Call, x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    dim %= len(x.shape)
    for other, (size, own) in enumerate(zip(extents_of(index), extents_of(x), strict=True)):
        if other != dim and isinstance(size, int) and isinstance(own, int) and size < own:
            x = sliced(x, other, 0, size)
    return ops.gather(x, index, dim)


@lowers("index.Tensor", "_unsafe_index.Tensor")
def _index(call: Call, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype.name in ("bool", "uint8") for _, index in given):
        raise Refused("indexing by a mask is not supported: the size of what it gives depends on data")
    shape = extents_of(x)
    if len(given) == 1:
        return ops.take(x, given[0][1], given[0][0])
    # Several indices are broadcast; the dims that they are of become one, in which they are one number.
    places = [dim for dim, _ in given]
    joined = places == list(range(places[0], places[-1] + 1))
    rest = [dim for dim in range(len(shape)) if dim not in places]
    front = places[0] if joined else 0
    axes = [*rest[:front], *places, *rest[front:]]
    flat_size: Any = 1
    for place in places:
        flat_size = shape[place] * flat_size
    flat = reshaped(
        permuted(x, axes), [*(shape[d] for d in rest[:front]), flat_size, *(shape[d] for d in rest[front:])]
    )
    count = len(call.shape) - len(rest)
    number: Tensor | None = None
    for place, index in given:
        size = static(shape[place], "the size of a dim that is indexed together with others")
        own = cast(index, "int64")
        own = pointwise.where(pointwise.with_scalar(own, "lt", 0), ops.add(own, constant(size, "int64")), own, "int64")
        number = own if number is None else ops.multiply(number, constant(size, "int64")) + own
    assert number is not None
    return ops.take(flat, expanded(number, call.shape[front : front + count]), front)


@lowers("one_hot.default")
def _one_hot(call: Call, x: Tensor, num_classes: int = -1) -> Tensor:
    classes = ops.arange(0, call.shape[-1], 1, dtype=x.dtype)
    return cast(ops.equal(ops.unsqueeze(x, [len(x.shape)]), classes), call.dtype)


@lowers("bucketize.Tensor", "searchsorted.Tensor")
def _bucketize(call: Call, a: Tensor, b: Tensor, *, out_int32: bool = False, right: bool = False, **_: Any) -> Tensor:
    values, bounds = (a, b) if call.name == "aten.bucketize.Tensor" else (b, a)
    if len(bounds.shape) != 1:
        raise Refused("a search in several sorted sequences is not supported")
    below = (ops.less_equal if right else ops.less)(bounds, ops.unsqueeze(values, [len(values.shape)]))
    return reduce_integers(ops.cast(below, call.dtype), [len(values.shape)], False, "sum")
