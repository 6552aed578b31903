"""Lowerings of operators that read or write elements by index, and of sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet.graph import Tensor, ops

from hidet_dist import operators
from hidet_dist.frontends.pytorch.calls import Call, Refused, lowers, static
from hidet_dist.operators import elementwise, reductions, to_dtype
from hidet_dist.operators.shaping import reshaped
from hidet_dist.spec.extents import extents_of


@lowers("embedding.default")
def _embedding(call: Call, weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
    return ops.take(weight, indices, 0)


@lowers("index_select.default")
def _index_select(call: Call, x: Tensor, dim: int, index: Tensor) -> Tensor:
    return ops.take(x, reshaped(index, [call.shape[dim]]), dim % len(x.shape))


@lowers("gather.default")
def _gather(call: Call, x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    return operators.gather(x, dim, index)


@lowers("index.Tensor", "_unsafe_index.Tensor")
def _index(call: Call, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    indexed = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype.name in ("bool", "uint8") for _, index in indexed):
        raise Refused("indexing by a mask is not supported: the size of the result depends on data")
    if len(indexed) == 1:
        return ops.take(x, indexed[0][1], indexed[0][0])
    return operators.index(x, list(indices))


@lowers("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce")
def _scatter(call: Call, x: Tensor, dim: int, index: Tensor, source: Any, *, reduce: str | None = None) -> Tensor:
    return operators.scatter(x, dim, index, source, reduce)


@lowers("scatter_add.default")
def _scatter_add(call: Call, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return operators.scatter_add(x, dim, index, source)


@lowers("scatter_reduce.two")
def _scatter_reduce(
    call: Call, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    return operators.scatter_reduce(x, dim, index, source, reduce, include_self)


@lowers("index_put.default", "_unsafe_index_put.default")
def _index_put(
    call: Call, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    return operators.index_put(x, list(indices), to_dtype(values, call.dtype), accumulate)


@lowers("index_add.default")
def _index_add(call: Call, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    return operators.index_add(x, dim, index, source, alpha)


@lowers("index_copy.default")
def _index_copy(call: Call, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return operators.index_copy(x, dim, index, source)


@lowers("one_hot.default")
def _one_hot(call: Call, x: Tensor, num_classes: int = -1) -> Tensor:
    return operators.one_hot(x, static(call.shape[-1], "the number of classes"))


@lowers("topk.default")
def _topk(
    call: Call, x: Tensor, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    return operators.topk(x, static(k, "k of topk"), dim, largest)


@lowers("sort.default", "sort.stable")
def _sort(
    call: Call, x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor, Tensor]:
    return operators.sort(x, dim, descending)


@lowers("argsort.default", "argsort.stable")
def _argsort(call: Call, x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Tensor:
    return operators.argsort(x, dim, descending)


@lowers("histc.default")
def _histc(call: Call, x: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    return to_dtype(operators.histc(x, bins, min, max), call.dtype)


@lowers("bucketize.Tensor", "searchsorted.Tensor")
def _bucketize(call: Call, a: Tensor, b: Tensor, *, out_int32: bool = False, right: bool = False, **_: Any) -> Tensor:
    values, bounds = (a, b) if call.name == "aten.bucketize.Tensor" else (b, a)
    if len(bounds.shape) != 1:
        raise Refused("a search in several sorted sequences is not supported")
    last = len(extents_of(values))
    below = (elementwise.le if right else elementwise.lt)(bounds, ops.unsqueeze(values, [last]))
    return reductions.sum(to_dtype(below, call.dtype), [last], dtype=call.dtype)
