"""Element-wise operators that hidet lacks, or defines otherwise than NumPy and PyTorch: functions of elements, by name.

hidet's remainder takes the sign of the dividend, its quotient of integers rounds towards zero, and it compares tensors
with tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hidet.graph import Tensor, ops
from hidet.graph.ops.arithmetic import BinaryElementwiseOp, UnaryElementwiseOp
from hidet.ir import data_type, primitives
from hidet.ir.dtypes import boolean
from hidet.ir.expr import Expr, cast, if_then_else, logical_and
from hidet.ir.tools import infer_type

Function = Callable[[Any, Any], Any]


def _is_float(x: Any) -> bool:
    return bool(infer_type(x).is_float())


def _remainder(a: Any, b: Any) -> Any:
    """Of the sign of the divisor."""
    rest = primitives.mod(a, b) if _is_float(a) else a % b
    zero = infer_type(a).zero
    return if_then_else(logical_and(rest != zero, (rest < zero) != (b < zero)), rest + b, rest)


def _floor_divide(a: Any, b: Any) -> Any:
    if _is_float(a):
        return primitives.floor(a / b)
    zero = infer_type(a).zero
    exact = a // b  # towards zero, as C divides
    return if_then_else(logical_and(exact * b != a, (a < zero) != (b < zero)), exact - infer_type(a).one, exact)


_BINARY: dict[str, Function] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "max": lambda a, b: if_then_else(a < b, b, a),
    "min": lambda a, b: if_then_else(b < a, b, a),
    "pow": primitives.pow,
    "atan2": primitives.atan2,
    "remainder": _remainder,
    "floor_divide": _floor_divide,
    "trunc_divide": lambda a, b: primitives.trunc(a / b) if _is_float(a) else a // b,
    "fmod": lambda a, b: primitives.mod(a, b) if _is_float(a) else a % b,
}


def _absolute(x: Any) -> Any:
    return if_then_else(x < infer_type(x).zero, -x, x)


def _sign(x: Any) -> Any:
    kind = infer_type(x)
    return if_then_else(x > kind.zero, kind.one, if_then_else(x < kind.zero, kind(-1), kind.zero))


_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": _absolute,
    "sign": _sign,
    "round": primitives.rint if hasattr(primitives, "rint") else primitives.round,
    "isnan": lambda x: cast(primitives.isnan(x), boolean),
    "isinf": lambda x: cast(primitives.isinf(x), boolean),
    "isfinite": lambda x: cast(primitives.isfinite(x), boolean),
    "erfc": lambda x: infer_type(x).one - primitives.erf(x),
}


class UnaryOp(UnaryElementwiseOp):
    """A function of each element, by its name."""

    def __init__(self, x: Tensor, function: str):
        super().__init__(x, _UNARY[function], function, attributes={"function": function})


class ScalarOp(UnaryElementwiseOp):
    """A function of each element and one number, by its name; the number is of the tensor's dtype."""

    def __init__(self, x: Tensor, function: str, scalar: Any):
        number = scalar if isinstance(scalar, Expr) else x.dtype(scalar)
        attributes = {"function": function, "scalar": scalar}
        super().__init__(x, lambda v: _BINARY[function](v, number), f"{function}s", attributes=attributes)


class BinaryOp(BinaryElementwiseOp):
    """A function of two elements, by its name; the tensors are of one dtype."""

    def __init__(self, x: Tensor, y: Tensor, function: str):
        super().__init__(x, y, _BINARY[function], function)
        self.attrs["function"] = function


def unary(x: Tensor, function: str) -> Tensor:
    """``abs``, ``sign``, ``round`` (half to even), ``isnan``, ``isinf``, ``isfinite`` or ``erfc`` of each element."""
    return UnaryOp(x, function).outputs[0]


def with_scalar(x: Tensor, function: str, scalar: Any) -> Tensor:
    """A function of each element and a number, such as ``lt`` or ``remainder``; the number is the second operand."""
    return ScalarOp(x, function, scalar).outputs[0]


def binary(x: Tensor, y: Tensor, function: str) -> Tensor:
    """A function of the elements of two tensors of one dtype, broadcast, such as ``floor_divide``."""
    return BinaryOp(x, y, function).outputs[0]


class ChoiceOp(UnaryElementwiseOp):
    """One of two numbers of a dtype for each truth value."""

    def __init__(self, condition: Tensor, x: Any, y: Any, dtype: str):
        kind = data_type(dtype)
        attributes = {"x": x, "y": y, "dtype": dtype}
        super().__init__(condition, lambda v: if_then_else(v, kind(x), kind(y)), "choice", attributes=attributes)


def where(condition: Tensor, x: Any, y: Any, dtype: str) -> Tensor:
    """``x`` where the condition holds, else ``y``; either may be a number."""
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        return ChoiceOp(condition, x, y, dtype).outputs[0]
    return ops.where(condition, _plain(x, dtype), _plain(y, dtype))


def _plain(x: Any, dtype: str) -> Any:
    if isinstance(x, Tensor):
        return x
    value = getattr(x, "value", x)
    if isinstance(value, bool | int | float):
        return float(value) if data_type(dtype).is_float() else int(value)
    return ops.full([], x, dtype)
