"""Lowerings of operators that reduce dims: sums, means, extremes, softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hidet.graph import Tensor, ops

from hidet_dist.frontends.pytorch.calls import Call, Lowering, constant, lower_plainly, lowers
from hidet_dist.operators import log_softmax, logsumexp, reductions, softmax, to_dtype
from hidet_dist.spec.extents import extents_of


def _in_result_dtype(function: Callable[..., Tensor]) -> Lowering:
    """Lower a reduction whose operand is cast to the dtype of the result first."""

    def lowering(call: Call, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        return function(to_dtype(x, call.dtype), dim, keepdim, dtype=call.dtype)

    return lowering


def _plain(function: Callable[..., Any]) -> Lowering:
    return lambda call, x, *args, **options: function(x, *args, **options)


def _as_result(function: Callable[..., Tensor]) -> Lowering:
    """Lower a reduction whose result is cast: ``any`` and ``all`` are uint8 of uint8, and bool of all others."""
    return lambda call, x, *args, **options: to_dtype(function(x, *args, **options), call.dtype)


def _register() -> None:
    lowers("sum.dim_IntList", "sum.default")(_in_result_dtype(reductions.sum))
    lowers("mean.dim", "mean.default")(_in_result_dtype(reductions.mean))
    lowers("prod.default", "prod.dim_int")(_in_result_dtype(reductions.prod))
    for name in ("amax", "amin", "argmax", "argmin"):
        lowers(f"{name}.default")(_plain(getattr(reductions, name)))
    for name in ("max", "min"):
        lowers(f"{name}.default", f"{name}.dim")(_plain(getattr(reductions, name)))
    for name in ("any", "all"):
        lowers(f"{name}.default", f"{name}.dim", f"{name}.dims")(_as_result(getattr(reductions, name)))


_register()


@lowers("var.correction", "var.dim", "var.default", "std.correction", "std.dim", "std.default")
def _var(call: Call, x: Tensor, *args: Any, **options: Any) -> Tensor:
    dims, keepdim, correction = _variance_options(call, args, **options)
    result = variance(x, dims, keepdim, correction)
    return ops.sqrt(result) if call.name.startswith("aten.std.") else result


@lowers("var_mean.correction", "var_mean.dim", "var_mean.default", "std_mean.correction", "std_mean.dim")
def _var_mean(call: Call, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    dims, keepdim, correction = _variance_options(call, args, **options)
    result = variance(x, dims, keepdim, correction)
    result = ops.sqrt(result) if call.name.startswith("aten.std") else result
    return result, reductions.mean(x, dims, keepdim)


def _variance_options(
    call: Call,
    args: tuple[Any, ...],
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    correction: Any = None,
) -> tuple[Any, bool, float]:
    """Return the dims, whether they are kept, and the correction, from the arguments of any overload."""
    if call.name.endswith(".correction"):
        dim = args[0] if args else dim
        return dim, keepdim, 1.0 if correction is None else float(correction)
    if call.name.endswith(".default"):
        return None, False, float(args[0] if args else unbiased)
    arguments = [*args, *(dim, unbiased, keepdim)[len(args) :]]
    return arguments[0], arguments[2], float(arguments[1])


def variance(x: Tensor, dim: Any, keepdim: bool, correction: float) -> Tensor:
    """Compute the variance along dims, symbolic ones included; the divisor is their number less ``correction``."""
    axes = reductions.dims_of(x, dim)
    squares = ops.square(ops.subtract(x, reductions.mean(x, axes, True)))
    result = reductions.mean(squares, axes, keepdim)
    if correction == 0:
        return result
    count: Any = 1
    for axis in axes:
        count = extents_of(x)[axis] * count
    if isinstance(count, int):
        factor = count / (count - correction) if count > correction else math.inf  # the variance is undefined
        return ops.multiply(result, constant(factor, x.dtype.name))
    kind = x.dtype
    return ops.multiply(result, kind(count) / (kind(count) - kind(correction)))


@lowers("linalg_vector_norm.default")
def _vector_norm(
    call: Call, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    return reductions.linalg_vector_norm(x, ord, dim, keepdim, call.dtype)


@lowers("norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype")
def _norm(call: Call, x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return reductions.linalg_vector_norm(x, 2 if p is None else p, dim, keepdim, call.dtype)


@lowers("softmax.int", "_softmax.default")
def _softmax(call: Call, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    return softmax(x, dim, call.dtype)


@lowers("_safe_softmax.default")
def _safe_softmax(call: Call, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    return reductions.safe_softmax(x, dim, call.dtype)


@lowers("log_softmax.int", "_log_softmax.default")
def _log_softmax(call: Call, x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    return log_softmax(x, dim, call.dtype)


@lowers("cumsum.default", "cumprod.default")
def _cumulative(call: Call, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    function = reductions.cumsum if call.name == "aten.cumsum.default" else reductions.cumprod
    return function(x, dim, call.dtype)


@lowers("cummax.default", "cummin.default")
def _cumulative_extremes(call: Call, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return reductions.cummax(x, dim) if call.name == "aten.cummax.default" else reductions.cummin(x, dim)


@lowers("count_nonzero.default", "count_nonzero.dim_IntList")
def _count_nonzero(call: Call, x: Tensor, dim: Any = None) -> Tensor:
    return reductions.sum(to_dtype(to_dtype(x, "bool"), call.dtype), dim)


lower_plainly({"logsumexp.default": logsumexp})
