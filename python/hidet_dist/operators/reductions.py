"""Reductions, indices of extremes, softmax, and cumulative sums, products and extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops.reduce import reduce as hidet_reductions
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from hidet.ir.compute import cops
from hidet.ir.dtypes import boolean, float64, int32, int64
from hidet.ir.expr import Expr, if_then_else
from hidet.ir.type import DataType

from hidet_dist.operators import elementwise
from hidet_dist.operators.dtypes import category, floating, to_dtype
from hidet_dist.traits import has_traits

Dims = int | Sequence[int] | None


def dims_of(x: Tensor, dim: Dims) -> list[int]:
    """Return the dims of an argument, counted from the first; all dims if it has none."""
    rank = len(x.shape)
    dims = [dim] if isinstance(dim, int) else list(dim) if dim else list(range(rank))
    return sorted(d % rank for d in dims) if rank else []


@has_traits(kernel="reduction", in_any_layout=True)
class ReduceOp(Operator):
    """A reduction in the dtype of its operand; hidet's accumulate in float32, which cannot represent all integers."""

    def __init__(self, x: Tensor, dims: Sequence[int], keepdims: bool, kind: str):
        data = input_like(x, "x")
        y = cops.reduce(data, list(dims), keepdims, kind, x.dtype.name)
        attributes = {"dims": list(dims), "keepdims": keepdims, "kind": kind}
        super().__init__([x], attributes, Task(f"reduce_{kind}", [data], [y], attributes=attributes))
        self.name = f"Reduce{kind.capitalize()}"


_HIDET = {
    "sum": hidet_reductions.ReduceSumOp,
    "avg": hidet_reductions.ReduceMeanOp,
    "max": hidet_reductions.ReduceMaxOp,
    "min": hidet_reductions.ReduceMinOp,
    "prod": hidet_reductions.ReduceProdOp,
}


def _reduced(x: Tensor, dim: Dims, keepdim: bool, kind: str) -> Tensor:
    dims = dims_of(x, dim)
    if not dims:
        return x
    if x.dtype.is_float() and x.dtype != float64:
        return _HIDET[kind](x, dims, keepdim).outputs[0]
    return ReduceOp(x, dims, keepdim, kind).outputs[0]


def _summed(x: Tensor, dtype: DataType | str | None) -> Tensor:
    """Convert the operand of a sum or product: integers and booleans to int64."""
    if dtype is not None:
        return to_dtype(x, dtype)
    return to_dtype(x, int64) if category(x.dtype) < 2 else x


def sum(x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: DataType | str | None = None) -> Tensor:
    """The sum over dims, or over all of them: of integers and booleans as int64."""
    return _reduced(_summed(x, dtype), dim, keepdim, "sum")


def prod(x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: DataType | str | None = None) -> Tensor:
    """The product over dims, or over all of them: of integers and booleans as int64."""
    return _reduced(_summed(x, dtype), dim, keepdim, "prod")


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: DataType | str | None = None) -> Tensor:
    """The mean over dims, or over all of them.

    Raises ValueError for integers, unless ``dtype`` is a floating point one.
    """
    x = x if dtype is None else to_dtype(x, dtype)
    if not x.dtype.is_float():
        raise ValueError(f"The mean of {x.dtype.name} is not defined: give a floating point dtype.")
    return _reduced(x, dim, keepdim, "avg")


def amax(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The greatest element over dims, or over all of them."""
    return any(x, dim, keepdim) if x.dtype.is_boolean() else _reduced(x, dim, keepdim, "max")


def amin(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The least element over dims, or over all of them."""
    return all(x, dim, keepdim) if x.dtype.is_boolean() else _reduced(x, dim, keepdim, "min")


def any(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Whether any element over dims is nonzero: bool."""
    dims = dims_of(x, dim)
    x = to_dtype(x, boolean)
    return hidet_reductions.ReduceOrOp(x, dims, keepdim).outputs[0] if dims else x


def all(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Whether all elements over dims are nonzero: bool."""
    dims = dims_of(x, dim)
    x = to_dtype(x, boolean)
    return hidet_reductions.ReduceAndOp(x, dims, keepdim).outputs[0] if dims else x


def _place(x: Tensor, dim: int | None, keepdim: bool, cls: Any) -> Tensor:
    x = to_dtype(x, int32) if x.dtype.is_boolean() else x
    rank = len(x.shape)
    if rank == 0:
        return elementwise.mul(to_dtype(x, int64), 0)
    if dim is None:
        flat = cls(ops.flatten(x) if rank > 1 else x, 0, False).outputs[0]
        return ops.reshape(flat, [1] * rank) if keepdim else flat
    return cls(x, dim % rank, keepdim).outputs[0]


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The first index of the greatest element along ``dim``, or in the flattened ``x``: int64."""
    return _place(x, dim, keepdim, hidet_reductions.ArgMaxOp)


def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The first index of the least element along ``dim``, or in the flattened ``x``: int64."""
    return _place(x, dim, keepdim, hidet_reductions.ArgMinOp)


def max(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The greatest element; with ``dim``, the greatest elements along it and their first indices."""
    return amax(x) if dim is None else (amax(x, dim, keepdim), argmax(x, dim, keepdim))


def min(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The least element; with ``dim``, the least elements along it and their first indices."""
    return amin(x) if dim is None else (amin(x, dim, keepdim), argmin(x, dim, keepdim))


def var(x: Tensor, dim: Dims = None, correction: float | None = 1, keepdim: bool = False) -> Tensor:
    """The variance over dims: squares of differences from the mean, divided by their count less ``correction``."""
    correction = 1 if correction is None else correction
    dims = dims_of(x, dim)
    squares = ops.square(elementwise.sub(x, mean(x, dims, keepdim=True)))
    if correction == 0:
        return mean(squares, dims, keepdim)
    count = math.prod(int(x.shape[d]) for d in dims)
    if count <= correction:
        raise ValueError(f"The variance of {count} elements with a correction of {correction} is not defined.")
    return elementwise.mul(sum(squares, dims, keepdim), 1.0 / (count - correction))


def std(x: Tensor, dim: Dims = None, correction: float | None = 1, keepdim: bool = False) -> Tensor:
    """The square root of the variance; see :func:`var`."""
    return ops.sqrt(var(x, dim, correction, keepdim))


def var_mean(x: Tensor, dim: Dims = None, correction: float | None = 1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The variance and the mean."""
    return var(x, dim, correction, keepdim), mean(x, dim, keepdim)


def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """``log(sum(exp(x)))`` over dims, without overflow."""
    x = to_dtype(x, floating(x.dtype))
    most = amax(x, dim, keepdim=True)
    most = elementwise.where(elementwise.isfinite(most), most, 0.0)  # infinity stays infinity
    total = elementwise.add(elementwise.log(sum(elementwise.exp(elementwise.sub(x, most)), dim, True)), most)
    dims = dims_of(x, dim)
    return total if keepdim or not dims else ops.squeeze(total, dims)


def softmax(x: Tensor, dim: int, dtype: DataType | str | None = None) -> Tensor:
    """``exp(x)`` divided by its sum along ``dim``."""
    x = x if dtype is None else to_dtype(x, dtype)
    return _along(ops.softmax, x, dim)


def _along(function: Callable[[Tensor, int], Tensor], x: Tensor, dim: int) -> Tensor:
    """A function along a dim; a tensor without dims is one of one element."""
    if not x.shape:
        return ops.reshape(function(ops.reshape(x, [1]), 0), [])
    return function(x, dim % len(x.shape))


def safe_softmax(x: Tensor, dim: int, dtype: DataType | str | None = None) -> Tensor:
    """The softmax, with zeros in rows that are minus infinity everywhere."""
    x = x if dtype is None else to_dtype(x, dtype)
    masked = all(elementwise.eq(x, -math.inf), dim, keepdim=True)
    return elementwise.masked_fill(softmax(x, dim), masked, 0.0)


def log_softmax(x: Tensor, dim: int, dtype: DataType | str | None = None) -> Tensor:
    """The logarithm of the softmax along ``dim``."""
    x = x if dtype is None else to_dtype(x, dtype)
    return _along(ops.logsoftmax, x, dim)


@has_traits(kernel="reduction")
class CumulativeOp(Operator):
    """Cumulative reductions along a dim: of all elements up to each, or with ``reverse`` from it on.

    With ``exclusive`` the element itself does not count. ``kind`` is ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``.
    """

    def __init__(self, x: Tensor, dim: int, kind: str, exclusive: bool = False, reverse: bool = False):
        data, dtype = input_like(x, "x"), x.dtype
        neutral = _neutral(kind, dtype)

        def counts(j: Expr, i: Expr) -> Expr:
            if reverse:
                return j > i if exclusive else j >= i
            return j < i if exclusive else j <= i

        def element(*position: Expr) -> Expr:
            return reduce(
                [data.shape[dim]],
                lambda j: if_then_else(
                    counts(j, position[dim]), data[[*position[:dim], j, *position[dim + 1 :]]], neutral
                ),
                kind,
                accumulate_dtype=dtype.name,
            )

        attributes = {"dim": dim, "kind": kind, "exclusive": exclusive, "reverse": reverse}
        y = compute("y", data.shape, element)
        super().__init__([x], attributes, Task(f"cumulative_{kind}", [data], [y], attributes=attributes))
        self.name = f"Cumulative{kind.capitalize()}"


def _neutral(kind: str, dtype: DataType) -> Expr:
    """The element that changes no reduction of a kind."""
    if kind in ("sum", "prod"):
        return dtype.zero if kind == "sum" else dtype.one
    least = dtype.constant(-math.inf) if dtype.is_float() else dtype.min_value
    most = dtype.constant(math.inf) if dtype.is_float() else dtype.max_value
    return least if kind == "max" else most


def _cumulative(x: Tensor, dim: int, kind: str, **how: bool) -> Tensor:
    if not x.shape:
        return x
    return CumulativeOp(x, dim % len(x.shape), kind, **how).outputs[0]


def cumsum(x: Tensor, dim: int, dtype: DataType | str | None = None, **how: bool) -> Tensor:
    """Cumulative sums along ``dim``: of integers and booleans as int64. ``how``: ``exclusive``, ``reverse``."""
    return _cumulative(_summed(x, dtype), dim, "sum", **how)


def cumprod(x: Tensor, dim: int, dtype: DataType | str | None = None, **how: bool) -> Tensor:
    """Cumulative products along ``dim``: of integers and booleans as int64. ``how``: ``exclusive``, ``reverse``."""
    return _cumulative(_summed(x, dtype), dim, "prod", **how)


def cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The greatest element up to each along ``dim``, and the last index of it: int64."""
    return _extremes(x, dim, "max")


def cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The least element up to each along ``dim``, and the last index of it: int64."""
    return _extremes(x, dim, "min")


def _extremes(x: Tensor, dim: int, kind: str) -> tuple[Tensor, Tensor]:
    if not x.shape:
        return x, elementwise.mul(to_dtype(x, int64), 0)
    if x.dtype.is_boolean():
        values, indices = _extremes(to_dtype(x, int32), dim, kind)
        return to_dtype(values, boolean), indices
    values = _cumulative(x, dim, kind)
    # An element is an extreme where it is that of all before it, too. NaN stays from where it is met.
    is_extreme = elementwise.eq(x, values)
    if x.dtype.is_float():
        is_extreme = elementwise.logical_or(is_extreme, elementwise.isnan(x))
    rank, dim = len(x.shape), dim % len(x.shape)
    places = ops.reshape(ops.arange(0, x.shape[dim], dtype="int64"), [-1 if d == dim else 1 for d in range(rank)])
    return values, _cumulative(elementwise.where(is_extreme, places, -1), dim, "max")


def linalg_vector_norm(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, dtype: DataType | str | None = None
) -> Tensor:
    """The norm of order ``ord`` over dims, or over all of them."""
    x = x if dtype is None else to_dtype(x, dtype)
    size = elementwise.abs(x)
    if math.isinf(ord):
        return amax(size, dim, keepdim) if ord > 0 else amin(size, dim, keepdim)
    if ord == 0:
        return sum(to_dtype(elementwise.ne(x, 0), x.dtype), dim, keepdim)
    if ord == 1:
        return sum(size, dim, keepdim)
    if ord == 2:
        return elementwise.sqrt(sum(elementwise.mul(x, x), dim, keepdim))
    return elementwise.pow(sum(elementwise.pow(size, ord), dim, keepdim), 1.0 / ord)
