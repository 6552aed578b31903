"""Lowerings of element-wise operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hidet.graph import Tensor, ops
from hidet.ir.expr import Expr

from hidet_dist.frontends.pytorch.calls import Call, Lowering, constant, lower_plainly, lowers, plain
from hidet_dist.frontends.refusals import Refused
from hidet_dist.operators import elementwise, to_dtype
from hidet_dist.operators.elementwise import CombineScalarOp

_UNARY = (
    *("abs", "neg", "sign", "square", "reciprocal", "floor", "ceil", "trunc", "round", "round.decimals"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "erf", "sigmoid"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("logical_not", "bitwise_not", "isnan", "isinf", "isfinite", "nan_to_num"),
    *("relu", "relu6", "silu", "gelu", "leaky_relu", "prelu", "elu", "celu", "selu", "softplus", "mish", "glu"),
    *("log_sigmoid", "hardtanh", "hardswish", "hardsigmoid", "softshrink", "hardshrink", "threshold"),
    *("addcmul", "addcdiv", "lerp.Tensor", "lerp.Scalar", "masked_fill.Scalar", "masked_fill.Tensor"),
    *("clamp", "clamp.Tensor", "clamp_min", "clamp_min.Tensor", "clamp_max", "clamp_max.Tensor"),
    *("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar"),
)
"""Functions of :mod:`hidet_dist.operators.elementwise` with the arguments of the ATen operator of that name and
overload; the default overload if none is named."""

_OF_NUMBERS = ("addcmul", "addcdiv", "lerp", "masked_fill", "clamp", "clamp_min", "clamp_max", "where")
"""Those of them that take numbers in place of tensors."""

_BINARY = {
    "add": ("add.Tensor", "add.Scalar"),
    "sub": ("sub.Tensor", "sub.Scalar"),
    "rsub": ("rsub.Tensor", "rsub.Scalar"),
    "mul": ("mul.Tensor", "mul.Scalar"),
    "div": ("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "true_divide.Tensor"),
    "floor_divide": ("floor_divide.default", "floor_divide.Scalar"),
    "remainder": ("remainder.Tensor", "remainder.Scalar"),
    "fmod": ("fmod.Tensor", "fmod.Scalar"),
    "maximum": ("maximum.default", "max.other"),
    "minimum": ("minimum.default", "min.other"),
    "fmax": ("fmax.default",),
    "fmin": ("fmin.default",),
    "atan2": ("atan2.default",),
    "pow": ("pow.Tensor_Scalar", "pow.Scalar", "pow.Tensor_Tensor"),
    **{name: (f"{name}.Tensor", f"{name}.Scalar") for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{
        f"bitwise_{side}_shift": (
            *(f"bitwise_{side}_shift.{kind}" for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")),
            *(f"__{side[0]}shift__.{kind}" for kind in ("Tensor", "Scalar")),
        )
        for side in ("left", "right")
    },
    **{f"logical_{name}": (f"logical_{name}.default",) for name in ("and", "or", "xor")},
    **{
        f"bitwise_{name}": (
            *(f"bitwise_{name}.{kind}" for kind in ("Tensor", "Scalar", "Scalar_Tensor")),
            *(f"__{name}__.{kind}" for kind in ("Tensor", "Scalar")),
        )
        for name in ("and", "or", "xor")
    },
}

_OF_SIZES = (
    *("add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "maximum", "minimum", "pow"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
"""Those whose second operand, or first one, may be a number computed from symbolic dims."""

_OTHER_NAMES = {"_prelu_kernel": "prelu", "clip": "clamp", "sgn": "sign"}


def _of_numbers(function: Callable[..., Tensor]) -> Lowering:
    """Lower a function that takes numbers; one computed from symbolic dims is passed as a tensor without dims."""

    def lowering(call: Call, *args: Any, **options: Any) -> Tensor:
        if any(isinstance(value, Expr) for value in options.values()):
            raise Refused(f"{', '.join(options)} computed from symbolic dims is not supported")
        if any(isinstance(x, Expr) for x in args):
            dtype = call.common_dtype(*(place for place, x in enumerate(args) if x is not None))
            args = tuple(ops.full([], constant(x, dtype), dtype) if isinstance(x, Expr) else x for x in args)
        return function(*args, **options)

    return lowering


def _binary(name: str, function: Callable[..., Tensor]) -> Lowering:
    """Lower a function of two operands, one of which may be a number computed from symbolic dims."""

    def lowering(call: Call, x: Any, y: Any, *rest: Any, **options: Any) -> Tensor:
        if not any(isinstance(operand, Expr) for operand in (x, y, *rest, *options.values())):
            return function(x, y, *rest, **options)
        if name not in _OF_SIZES or rest or options:
            raise Refused(f"{name} of numbers computed from symbolic dims is not supported with these arguments")
        dtype = call.common_dtype(0, 1) if name in ("eq", "ne", "lt", "le", "gt", "ge") else call.dtype
        swapped = (not isinstance(x, Tensor)) != (name == "rsub")
        tensor, number = (x, y) if isinstance(x, Tensor) else (y, x)
        combined = "sub" if name == "rsub" else name
        return CombineScalarOp(to_dtype(tensor, dtype), combined, number, swapped).outputs[0]

    return lowering


def _register() -> None:
    for entry in _UNARY:
        name, _, overload = entry.partition(".")
        numbers = name in _OF_NUMBERS
        lowering = (_of_numbers if numbers else plain)(getattr(elementwise, name))
        lowers(f"{name}.{overload or 'default'}", numbers=numbers)(lowering)
    lower_plainly({f"{other}.default": getattr(elementwise, name) for other, name in _OTHER_NAMES.items()})
    for name, overloads in _BINARY.items():
        lowers(*overloads, numbers=True)(_binary(name, getattr(elementwise, name)))


_register()


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
    return to_dtype(x, call.dtype)


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
def _identity(call: Call, x: Tensor, **_: Any) -> Tensor:
    return x


@lowers("dropout.default", "feature_dropout.default", "alpha_dropout.default", "feature_alpha_dropout.default")
def _dropout(call: Call, x: Tensor, p: float, train: bool) -> Tensor:
    if train and p > 0:
        raise Refused("dropout is on: call module.eval() first")
    return x


@lowers("native_dropout.default")
def _native_dropout(call: Call, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return _dropout(call, x, p, bool(train)), ops.full(list(x.shape), constant(True, "bool"), "bool")


@lowers("erfc.default")
def _erfc(call: Call, x: Tensor) -> Tensor:
    return elementwise.rsub(elementwise.erf(x), 1.0)
