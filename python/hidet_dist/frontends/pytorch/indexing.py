"""Lowerings of operators that read or write elements by index, and of sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hidet.graph import Tensor, ops

from hidet_dist import operators
from hidet_dist.frontends.pytorch.calls import Call, lower_plainly, lowers, static
from hidet_dist.frontends.refusals import Invalid, Refused
from hidet_dist.operators import elementwise, reductions, to_dtype
from hidet_dist.operators.dtypes import constant
from hidet_dist.operators.shaping import expanded, reshaped
from hidet_dist.spec.extents import extents_of


@lowers("embedding.default")
def _embedding(call: Call, weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
    rows = extents_of(weight)[0]
    if indices.storage is not None and isinstance(rows, int):
        known = indices.cpu().numpy()
        if (outside := known[(known < 0) | (known >= rows)]).size:
            raise Invalid(
                f"The model reads row {outside[0]} of an embedding of {rows} rows, whatever its inputs are: trace it "
                "with shorter sequences, or give the embedding more rows."
            )
    return ops.take(weight, indices, 0)


@lowers("_embedding_bag.default", "_embedding_bag_forward_only.default")
def _embedding_bag(
    call: Call,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, None, None, None]:
    count = static(call.shape[0], "the number of bags")
    number = static(extents_of(indices)[0], "the number of indices")
    known, size = call.known(offsets), number // max(count, 1)
    is_even = known is not None and number == count * size and (known[:count].numpy() == np.arange(count) * size).all()
    if is_even and size and padding_idx < 0:
        found = operators.embedding(weight, indices)  # all bags are of one size
        if per_sample_weights is not None:
            found = elementwise.mul(found, ops.unsqueeze(per_sample_weights, [1]))
        whole = reshaped(found, [count, size, extents_of(found)[1]])
        return (reductions.sum, reductions.mean, reductions.amax)[mode](whole, 1), None, None, None
    if known is not None:
        inner = known[1:count].numpy()  # where the second bag begins, and the others
        bags = constant(np.searchsorted(inner, np.arange(number), "right"), "int64", indices)
    else:
        begins = offsets if not include_last_offset else ops.strided_slice(offsets, [0], [count], [0])
        place = constant(np.arange(number).reshape(-1, 1), "int64", indices)
        begun = elementwise.le(ops.unsqueeze(to_dtype(begins, "int64"), 0), place)
        bags = elementwise.sub(reductions.sum(begun, 1), 1)
    reduced = operators.embedding_bag(
        weight, indices, bags, count, ("sum", "mean", "max")[mode], per_sample_weights, padding_idx
    )
    return reduced, None, None, None


@lowers("index.Tensor", "_unsafe_index.Tensor")
def _index(call: Call, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    indexed = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype.name in ("bool", "uint8") for _, index in indexed):
        raise Refused("indexing by a mask is not supported: the size of the result depends on data")
    if len(indexed) == 1:
        return ops.take(x, indexed[0][1], indexed[0][0])
    return operators.index(x, list(indices))


@lowers("index_put.default", "_unsafe_index_put.default")
def _index_put(
    call: Call, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    return operators.index_put(x, list(indices), to_dtype(values, call.dtype), accumulate)


@lowers("masked_scatter.default")
def _masked_scatter(call: Call, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return operators.masked_scatter(expanded(x, call.shape), mask, source)


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


lower_plainly(
    {
        "index_select.default": operators.index_select,
        "gather.default": operators.gather,
        "scatter.src": operators.scatter,
        "scatter.value": operators.scatter,
        "scatter.reduce": operators.scatter,
        "scatter.value_reduce": operators.scatter,
        "scatter_add.default": operators.scatter_add,
        "scatter_reduce.two": operators.scatter_reduce,
        "index_add.default": operators.index_add,
        "index_copy.default": operators.index_copy,
    }
)
