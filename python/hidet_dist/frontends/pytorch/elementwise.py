"""Operators that compute each element of their output from the elements at its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hidet.graph import Tensor, ops
from hidet.ir import data_type

from hidet_dist.frontends.pytorch import pointwise
from hidet_dist.frontends.pytorch.calls import Call, Refused, cast, constant, lowers, operand

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": ops.exp,
    "expm1": ops.expm1,
    "log": ops.log,
    "log1p": ops.log1p,
    "log2": ops.log2,
    "log10": ops.log10,
    "sqrt": ops.sqrt,
    "rsqrt": ops.rsqrt,
    "sin": ops.sin,
    "cos": ops.cos,
    "tan": ops.tan,
    "sinh": ops.sinh,
    "cosh": ops.cosh,
    "tanh": ops.tanh,
    "asin": ops.asin,
    "acos": ops.acos,
    "atan": ops.atan,
    "asinh": ops.asinh,
    "acosh": ops.acosh,
    "atanh": ops.atanh,
    "erf": ops.erf,
    "sigmoid": ops.sigmoid,
    "reciprocal": ops.reciprocal,
    "silu": ops.silu,
    "hardswish": ops.hardswish,
    "hardsigmoid": ops.hardsigmoid,
    "relu6": ops.relu6,
    "softsign": ops.softsign,
}
"""Those that compute in floating point: integers are cast first."""

_SAME: dict[str, Callable[[Tensor], Tensor]] = {"neg": ops.negative, "relu": ops.relu, "square": ops.square}
_OF_FLOATS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": ops.floor,
    "ceil": ops.ceil,
    "trunc": ops.trunc,
}


def _register() -> None:
    def in_result_dtype(function: Callable[[Tensor], Tensor]) -> Callable[[Call, Tensor], Tensor]:
        return lambda call, x: function(cast(x, call.dtype))

    def of_floats(function: Callable[[Tensor], Tensor]) -> Callable[[Call, Tensor], Tensor]:
        return lambda call, x: function(x) if x.dtype.is_float() else x

    for name, function in (_UNARY | _SAME).items():
        lowers(f"{name}.default")(in_result_dtype(function))
    for name, function in _OF_FLOATS.items():
        lowers(f"{name}.default")(of_floats(function))


_register()


@lowers("abs.default", "sign.default", "sgn.default", "round.default", "isnan.default", "isinf.default", "erfc.default")
def _by_definition(call: Call, x: Tensor) -> Tensor:
    kind = call.name.split(".")[1]
    if kind == "round" and not x.dtype.is_float():
        return x
    if kind in ("isnan", "isinf") and not x.dtype.is_float():
        return ops.full(list(x.shape), False, "bool")
    return pointwise.unary(cast(x, call.dtype) if kind == "erfc" else x, "sign" if kind == "sgn" else kind)


@lowers("isfinite.default")
def _isfinite(call: Call, x: Tensor) -> Tensor:
    return pointwise.unary(x, "isfinite") if x.dtype.is_float() else ops.full(list(x.shape), True, "bool")


@lowers("logical_not.default")
def _logical_not(call: Call, x: Tensor) -> Tensor:
    return ops.logical_not(cast(x, "bool"))


@lowers("bitwise_not.default")
def _bitwise_not(call: Call, x: Tensor) -> Tensor:
    return ops.logical_not(x) if x.dtype.name == "bool" else ops.bitwise_invert(x)


@lowers("gelu.default")
def _gelu(call: Call, x: Tensor, *, approximate: str = "none") -> Tensor:
    return ops.gelu(x, approximate=approximate == "tanh")


@lowers("leaky_relu.default")
def _leaky_relu(call: Call, x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return ops.leaky_relu(x, float(negative_slope))


@lowers("elu.default")
def _elu(call: Call, x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    inner = ops.expm1(_scaled(x, input_scale))
    return _scaled(ops.where(pointwise.with_scalar(x, "gt", 0), x, _scaled(inner, alpha)), scale)


@lowers("celu.default")
def _celu(call: Call, x: Tensor, alpha: float = 1.0) -> Tensor:
    return _elu(call, x, alpha, 1.0, 1.0 / alpha)


@lowers("selu.default")
def _selu(call: Call, x: Tensor) -> Tensor:
    # Klambauer et al. 2017, equation 2
    return _elu(call, x, 1.6732632423543772, 1.0507009873554805)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else ops.multiply(x, constant(factor, x.dtype.name))


@lowers("softplus.default")
def _softplus(call: Call, x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    inner = _scaled(ops.log1p(ops.exp(_scaled(x, beta))), 1 / beta)
    return ops.where(pointwise.with_scalar(_scaled(x, beta), "gt", threshold), x, inner)


@lowers("mish.default")
def _mish(call: Call, x: Tensor) -> Tensor:
    return x * ops.tanh(_softplus(call, x))


@lowers("log_sigmoid.default")
def _log_sigmoid(call: Call, x: Tensor) -> Tensor:
    # Of the negative absolute value, so that the exponential stays small.
    return ops.minimum(x, ops.full([], 0, x.dtype)) - ops.log1p(ops.exp(-pointwise.unary(x, "abs")))


@lowers("hardtanh.default")
def _hardtanh(call: Call, x: Tensor, min_val: float = -1, max_val: float = 1) -> Tensor:
    return ops.clamp(x, min_val, max_val)


@lowers("threshold.default")
def _threshold(call: Call, x: Tensor, threshold: float, value: float) -> Tensor:
    return ops.where(pointwise.with_scalar(x, "gt", threshold), x, float(value))


@lowers("prelu.default", "_prelu_kernel.default")
def _prelu(call: Call, x: Tensor, weight: Tensor) -> Tensor:
    if len(weight.shape) == 1 and len(x.shape) > 1:
        weight = ops.reshape(weight, [1, weight.shape[0], *[1] * (len(x.shape) - 2)])
    return ops.where(pointwise.with_scalar(x, "gt", 0), x, x * weight)


@lowers("clamp.default", "clip.default")
def _clamp(call: Call, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    x = cast(x, call.dtype)
    if min is not None:
        x = pointwise.with_scalar(x, "max", min)
    return x if max is None else pointwise.with_scalar(x, "min", max)


@lowers("clamp_min.default")
def _clamp_min(call: Call, x: Tensor, min: Any) -> Tensor:
    return _clamp(call, x, min)


@lowers("clamp_max.default")
def _clamp_max(call: Call, x: Tensor, max: Any) -> Tensor:
    return _clamp(call, x, None, max)


@lowers("clamp.Tensor", "clip.Tensor")
def _clamp_tensor(call: Call, x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    x = cast(x, call.dtype)
    if min is not None:
        x = _extreme(call, x, min, ops.maximum, "max")
    return x if max is None else _extreme(call, x, max, ops.minimum, "min")


def _extreme(call: Call, x: Any, y: Any, function: Callable[..., Tensor], name: str) -> Tensor:
    x, y = operand(x, call.dtype), operand(y, call.dtype)
    if not isinstance(x, Tensor):
        x, y = y, x
    return function(x, y) if isinstance(y, Tensor) else pointwise.with_scalar(x, name, y)


@lowers("maximum.default", "max.other")
def _maximum(call: Call, x: Any, y: Any) -> Tensor:
    return _extreme(call, x, y, ops.maximum, "max")


@lowers("minimum.default", "min.other")
def _minimum(call: Call, x: Any, y: Any) -> Tensor:
    return _extreme(call, x, y, ops.minimum, "min")


@lowers("add.Tensor", "add.Scalar")
def _add(call: Call, x: Any, y: Any, alpha: Any = 1) -> Tensor:
    if call.dtype == "bool":
        return ops.logical_or(cast(x, "bool"), cast(y, "bool"))
    x, y = operand(x, call.dtype), operand(y, call.dtype)
    return ops.add(x, _times(y, alpha, call.dtype))


@lowers("sub.Tensor", "sub.Scalar")
def _sub(call: Call, x: Any, y: Any, alpha: Any = 1) -> Tensor:
    x, y = operand(x, call.dtype), operand(y, call.dtype)
    return ops.subtract(x, _times(y, alpha, call.dtype))


@lowers("rsub.Tensor", "rsub.Scalar")
def _rsub(call: Call, x: Any, y: Any, alpha: Any = 1) -> Tensor:
    return ops.subtract(operand(y, call.dtype), _times(operand(x, call.dtype), alpha, call.dtype))


def _times(x: Any, factor: Any, dtype: str) -> Any:
    return x if isinstance(factor, int | float) and factor == 1 else ops.multiply(x, constant(factor, dtype))


@lowers("mul.Tensor", "mul.Scalar")
def _mul(call: Call, x: Any, y: Any) -> Tensor:
    if call.dtype == "bool":
        return ops.logical_and(cast(x, "bool"), cast(y, "bool"))
    return ops.multiply(operand(x, call.dtype), operand(y, call.dtype))


@lowers("div.Tensor", "div.Scalar", "true_divide.Tensor")
def _div(call: Call, x: Any, y: Any) -> Tensor:
    return ops.divide(operand(x, call.dtype), operand(y, call.dtype))


@lowers("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(call: Call, x: Any, y: Any, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is None:
        return _div(call, x, y)
    return _with_either(call, x, y, "floor_divide" if rounding_mode == "floor" else "trunc_divide")


@lowers("floor_divide.default", "floor_divide.Scalar")
def _floor_divide(call: Call, x: Any, y: Any) -> Tensor:
    return _with_either(call, x, y, "floor_divide")


@lowers("remainder.Tensor", "remainder.Scalar")
def _remainder(call: Call, x: Any, y: Any) -> Tensor:
    return _with_either(call, x, y, "remainder")


@lowers("fmod.Tensor", "fmod.Scalar")
def _fmod(call: Call, x: Any, y: Any) -> Tensor:
    return _with_either(call, x, y, "fmod")


@lowers("atan2.default")
def _atan2(call: Call, x: Any, y: Any) -> Tensor:
    return _with_either(call, x, y, "atan2")


def _with_either(call: Call, x: Any, y: Any, function: str) -> Tensor:
    """A function of two tensors, or of a tensor and a number."""
    return _related(x, y, function, call.dtype)


def _related(x: Any, y: Any, function: str, dtype: str) -> Tensor:
    x, y = operand(x, dtype), operand(y, dtype)
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return pointwise.binary(x, y, function)
    if isinstance(x, Tensor):
        return pointwise.with_scalar(x, function, y)
    return pointwise.binary(ops.full([], x, dtype), y, function)


@lowers("pow.Tensor_Scalar")
def _pow_scalar(call: Call, x: Tensor, exponent: Any) -> Tensor:
    x = cast(x, call.dtype)
    if isinstance(exponent, int | float):
        exponent = int(exponent) if exponent == int(exponent) else exponent
        known = {2: ops.square, 1: lambda v: v, 0.5: ops.sqrt, -0.5: ops.rsqrt, -1: ops.reciprocal}
        if exponent in known and (x.dtype.is_float() or exponent in (1, 2)):
            return known[exponent](x)
        if isinstance(exponent, int) and 2 < exponent <= 4:
            square = ops.square(x)
            return square * x if exponent == 3 else ops.square(square)
    if not x.dtype.is_float():
        raise Refused(f"an integer to the power of {exponent} is not supported")
    return pointwise.with_scalar(x, "pow", exponent)


@lowers("pow.Scalar")
def _scalar_pow(call: Call, base: Any, exponent: Tensor) -> Tensor:
    exponent = cast(exponent, call.dtype)
    if not exponent.dtype.is_float() or not float(base) > 0:
        raise Refused(f"{base} to the power of a tensor is supported for positive bases in floating point only")
    return ops.exp(ops.multiply(exponent, constant(math.log(float(base)), call.dtype)))


@lowers("pow.Tensor_Tensor")
def _pow(call: Call, x: Any, exponent: Any) -> Tensor:
    if not data_type(call.dtype).is_float():
        raise Refused("integer powers of a tensor are not supported")
    return _related(x, exponent, "pow", call.dtype)


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_COMPARE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eq": ops.equal,
    "ne": ops.not_equal,
    "lt": ops.less,
    "le": ops.less_equal,
    "gt": ops.greater,
    "ge": ops.greater_equal,
}


@lowers(*(f"{name}.{kind}" for name in _COMPARISONS for kind in ("Tensor", "Scalar")))
def _compare(call: Call, x: Any, y: Any) -> Tensor:
    kind, dtype = call.name.split(".")[1], call.common_dtype(0, 1)
    if dtype == "bool":
        dtype = "uint8"
    x, y = operand(x, dtype), operand(y, dtype)
    if not isinstance(x, Tensor):
        x, y, kind = y, x, _MIRRORED[kind]
    return _COMPARE[kind](x, y) if isinstance(y, Tensor) else pointwise.with_scalar(x, kind, y)


_LOGICAL = {"logical_and": ops.logical_and, "logical_or": ops.logical_or, "logical_xor": ops.logical_xor}


@lowers("logical_and.default", "logical_or.default", "logical_xor.default")
def _logical(call: Call, x: Any, y: Any) -> Tensor:
    return _LOGICAL[call.name.split(".")[1]](_truth(x), _truth(y))


def _truth(x: Any) -> Tensor:
    return cast(x, "bool") if isinstance(x, Tensor) else ops.full([], bool(x), "bool")


_BITWISE = {
    "and": (ops.logical_and, ops.bitwise_and),
    "or": (ops.logical_or, ops.bitwise_or),
    "xor": (ops.logical_xor, ops.bitwise_xor),
}


@lowers(
    *(f"bitwise_{name}.{kind}" for name in _BITWISE for kind in ("Tensor", "Scalar", "Scalar_Tensor")),
    *(f"__{name}__.{kind}" for name in _BITWISE for kind in ("Tensor", "Scalar")),
)
def _bitwise(call: Call, x: Any, y: Any) -> Tensor:
    logical, bitwise = _BITWISE[call.name.split(".")[1].removeprefix("bitwise_").strip("_")]
    if call.dtype == "bool":
        return logical(_truth(x), _truth(y))
    x, y = (v if isinstance(v, Tensor) else ops.full([], int(v), call.dtype) for v in (x, y))
    return bitwise(cast(x, call.dtype), cast(y, call.dtype))


@lowers("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(call: Call, condition: Tensor, x: Any, y: Any) -> Tensor:
    condition = cast(condition, "bool")
    return pointwise.where(condition, operand(x, call.dtype), operand(y, call.dtype), call.dtype)


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(call: Call, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return pointwise.where(cast(mask, "bool"), operand(value, call.dtype), operand(x, call.dtype), call.dtype)


@lowers("addcmul.default")
def _addcmul(call: Call, x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + _scaled(a * b, value)


@lowers("addcdiv.default")
def _addcdiv(call: Call, x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + _scaled(a / b, value)


@lowers("lerp.Tensor", "lerp.Scalar")
def _lerp(call: Call, x: Tensor, end: Tensor, weight: Any) -> Tensor:
    return x + ops.multiply(end - x, operand(weight, call.dtype))


@lowers(
    "_to_copy.default",
    "to.dtype",
    "to.dtype_layout",
    "to.device",
    "to.other",
    "to.prim_dtype",
    "type_as.default",
    "float.default",
    "_cast_Float.default",
)
def _to(call: Call, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return cast(x, call.dtype)


@lowers(
    "clone.default",
    "contiguous.default",
    "alias.default",
    "detach.default",
    "detach_.default",
    "lift_fresh_copy.default",
    "lift_fresh.default",
    "lift.default",
    "positive.default",
    "resolve_conj.default",
    "resolve_neg.default",
)
def _itself(call: Call, x: Tensor, **_: Any) -> Tensor:
    return x


@lowers("dropout.default", "feature_dropout.default", "alpha_dropout.default", "feature_alpha_dropout.default")
def _dropout(call: Call, x: Tensor, p: float, train: bool) -> Tensor:
    if train and p > 0:
        raise Refused("dropout is on: call module.eval() first")
    return x


@lowers("native_dropout.default")
def _native_dropout(call: Call, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return _dropout(call, x, p, bool(train)), ops.full(list(x.shape), True, "bool")
