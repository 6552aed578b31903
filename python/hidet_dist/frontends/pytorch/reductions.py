"""Operators that reduce dims: sums, means, extremes, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hidet.graph import Tensor, ops

from hidet_dist.frontends.pytorch import pointwise
from hidet_dist.frontends.pytorch.calls import Call, Refused, cast, constant, lowers, whole_dims
from hidet_dist.frontends.pytorch.integer_reductions import reduce_integers
from hidet_dist.frontends.pytorch.shapes import reshaped
from hidet_dist.spec.extents import extents_of


def _reduced(call: Call, x: Tensor, dims: Any, keep: bool, function: str) -> Tensor:
    """A reduction of a tensor in the call's dtype."""
    axes = whole_dims(dims, len(x.shape))
    if not axes:
        return x
    if not x.dtype.is_float():
        return reduce_integers(x, axes, keep, function)
    known: dict[str, Callable[..., Tensor]] = {
        "sum": ops.sum,
        "max": ops.max,
        "min": ops.min,
        "prod": ops.prod,
    }
    return known[function](x, axes, keep)


@lowers("sum.dim_IntList", "sum.default")
def _sum(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _reduced(call, cast(x, call.dtype), dim, keepdim, "sum")


@lowers("mean.dim", "mean.default")
def _mean(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return mean(cast(x, call.dtype), dim, keepdim)


def mean(x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """The mean along dims; all of them for None."""
    axes = whole_dims(dim, len(x.shape))
    return ops.mean(x, axes, keepdim) if axes else x


@lowers("amax.default", "amin.default")
def _extreme(call: Call, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return _of_any(call, x, dim, keepdim, call.name.split(".")[1][1:])


def _of_any(call: Call, x: Tensor, dim: Any, keepdim: bool, function: str) -> Tensor:
    if x.dtype.name == "bool":
        return cast(_reduced(call, ops.cast(x, "int32"), dim, keepdim, function), "bool")
    return _reduced(call, x, dim, keepdim, function)


@lowers("max.default", "min.default")
def _extreme_of_all(call: Call, x: Tensor) -> Tensor:
    return _of_any(call, x, None, False, call.name.split(".")[1])


@lowers("max.dim", "min.dim")
def _extreme_and_place(call: Call, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    kind = call.name.split(".")[1]
    place = ops.argmax if kind == "max" else ops.argmin
    return _of_any(call, x, dim, keepdim, kind), place(x, dim % len(x.shape), keepdim)


@lowers("argmax.default", "argmin.default")
def _place(call: Call, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    function = ops.argmax if call.name == "aten.argmax.default" else ops.argmin
    if dim is None:
        size: Any = 1
        for extent in extents_of(x):
            size = extent * size
        return reshaped(function(reshaped(x, [size]), 0, False), call.shape)
    return function(x, dim % len(x.shape), keepdim)


@lowers("prod.default", "prod.dim_int")
def _prod(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _reduced(call, cast(x, call.dtype), dim, keepdim, "prod")


@lowers("any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims")
def _truth(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    function = "max" if call.name.split(".")[1] == "any" else "min"
    axes = whole_dims(dim, len(x.shape))
    return cast(reduce_integers(ops.cast(cast(x, "bool"), "int32"), axes, keepdim, function), "bool")


@lowers("var.correction", "var.dim", "std.correction", "std.dim")
def _var(
    call: Call,
    x: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Tensor:
    found = variance(x, dim, keepdim, _correction(unbiased, correction))
    return ops.sqrt(found) if ".std." in call.name else found


@lowers("var_mean.correction", "var_mean.dim", "std_mean.correction")
def _var_mean(
    call: Call, x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None
) -> tuple[Tensor, Tensor]:
    found = variance(x, dim, keepdim, _correction(unbiased, correction))
    return ops.sqrt(found) if "std" in call.name else found, mean(x, dim, keepdim)


def _correction(unbiased: bool, correction: Any) -> float:
    return float(correction) if correction is not None else float(unbiased)


def variance(x: Tensor, dim: Any, keepdim: bool, correction: float) -> Tensor:
    """The variance along dims, with so many degrees of freedom less than elements."""
    axes = whole_dims(dim, len(x.shape))
    found = ops.mean(ops.square(x - ops.mean(x, axes, True)), axes, keepdim)
    if correction == 0:
        return found
    count: Any = 1
    for axis in axes:
        count = extents_of(x)[axis] * count
    kind = x.dtype
    if isinstance(count, int):
        return ops.multiply(found, constant(count / (count - correction), kind.name))
    return ops.multiply(found, kind(count) / (kind(count) - kind(correction)))


@lowers("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype")
def _norm(
    call: Call, x: Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    x, order = cast(x, call.dtype), 2 if order is None else order
    axes = whole_dims(dim, len(x.shape))
    if order == 2:
        return ops.sqrt(ops.sum(ops.square(x), axes, keepdim))
    size = pointwise.unary(x, "abs")
    if order == 1:
        return ops.sum(size, axes, keepdim)
    if order in (float("inf"), float("-inf")):
        return (ops.max if order > 0 else ops.min)(size, axes, keepdim)
    powers = pointwise.with_scalar(size, "pow", float(order))
    return pointwise.with_scalar(ops.sum(powers, axes, keepdim), "pow", 1 / float(order))


@lowers("softmax.int", "_softmax.default", "_safe_softmax.default")
def _softmax(call: Call, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    if call.name == "aten._safe_softmax.default":
        raise Refused("a softmax of rows without any value is not supported")
    return ops.softmax(cast(x, call.dtype), dim % len(x.shape))


@lowers("log_softmax.int", "_log_softmax.default")
def _log_softmax(call: Call, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    return ops.logsoftmax(cast(x, call.dtype), dim % len(x.shape))


@lowers("logsumexp.default")
def _logsumexp(call: Call, x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    axes = whole_dims(dim, len(x.shape))
    most = ops.max(x, axes, True)
    found = ops.log(ops.sum(ops.exp(x - most), axes, True)) + most
    return reshaped(found, call.shape)


@lowers("count_nonzero.default", "count_nonzero.dim_IntList")
def _count_nonzero(call: Call, x: Tensor, dim: Any = None) -> Tensor:
    return _reduced(call, ops.cast(cast(x, "bool"), call.dtype), dim, False, "sum")
