"""Element-wise operators with PyTorch's promotion of dtypes, signs of remainders and rounding.

Operands are tensors, broadcast against each other, or Python numbers. Functions that hidet defines as PyTorch does use
hidet's operators; the others are entries of the tables of functions here.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hidet import ops
from hidet.graph import Operator, Tensor
from hidet.graph.ops.arithmetic import (
    BinaryElementwiseOp,
    BinaryElementwiseOperation,
    BinaryElementwiseTask,
    UnaryElementwiseOp,
    WhereOp,
    WhereScalarTensorOp,
    WhereTensorScalarOp,
)
from hidet.graph.ops.utils import input_like
from hidet.ir import expr as ir
from hidet.ir import primitives
from hidet.ir.dtypes import boolean
from hidet.ir.expr import BitwiseAnd, BitwiseOr, BitwiseXor, Expr, LeftShift, RightShift, cast, if_then_else
from hidet.ir.type import DataType, data_type

from hidet_dist.operators.dtypes import Operand, Scalar, category, constant, floating, promoted_dtype, to_dtype, wrapped

# Functions of one operand. Arguments: the element, its dtype, and parameters.


def _round_half_even(v: Expr, d: DataType) -> Expr:
    below = primitives.floor(v)
    above, rest = below + d.one, v - below
    even = below - d(2.0) * primitives.floor(below * d(0.5))
    tie = if_then_else(even == d.zero, below, above)
    return if_then_else(rest < d(0.5), below, if_then_else(rest > d(0.5), above, tie))


def _softplus(v: Expr, d: DataType, beta: float, threshold: float) -> Expr:
    scaled = v * d(beta)
    soft = (primitives.max(scaled, d.zero) + primitives.log1p(primitives.exp(-primitives.abs(scaled)))) / d(beta)
    return if_then_else(scaled > d(threshold), v, soft)


def _elu(v: Expr, d: DataType, alpha: float, scale: float, input_scale: float) -> Expr:
    return if_then_else(v > d.zero, v * d(scale), primitives.expm1(v * d(input_scale)) * d(alpha * scale))


def _integer_power(v: Expr, d: DataType, exponent: int) -> Expr:
    result: Expr | None = None
    square = v
    while exponent:
        if exponent % 2:
            result = square if result is None else result * square
        square, exponent = square * square, exponent // 2
    return d.one if result is None else result


def _integer_power_of(v: Expr, d: DataType, *squares: int) -> Expr:
    """The power of an integer by its square, the square of that, and so on."""
    result: Expr = d.one
    for place, square in enumerate(squares):
        if square != 1:
            result = result * if_then_else(BitwiseAnd(v, d(1 << place)) == d.zero, d.one, d(square))
    return if_then_else(v < d.zero, _inverse_power(d(squares[0]), v, d), result) if d.signedness() else result


def _inverse_power(a: Expr, b: Expr, d: DataType) -> Expr:
    """The power of an integer by a negative one: that of its inverse, an integer if the base is 1 or -1, or else 0."""
    odd = if_then_else(BitwiseAnd(b, d.one) == d.zero, d.one, a)
    return if_then_else(a == d.one, a, if_then_else(a == d(-1), odd, d.zero))


def _integer_power_of_bits(a: Expr, b: Expr, d: DataType) -> Expr:
    """The power of an integer by one of six bits."""
    result: Expr = d.one
    for place in range(_POWER_BITS):
        result = result * if_then_else(BitwiseAnd(b, d(1 << place)) == d.zero, d.one, a)
        a = a * a
    return result


def _clamped(v: Expr, d: DataType, low: Scalar | None, high: Scalar | None) -> Expr:
    if any(isinstance(bound, float) and math.isnan(bound) for bound in (low, high)):
        return d(math.nan)
    # Comparisons with a number that is known take one instruction, where max and min that keep NaN take several.
    if low is not None:
        v = if_then_else(v < d(low), d(low), v)
    return v if high is None else if_then_else(v > d(high), d(high), v)


def _softshrink(v: Expr, d: DataType, bound: float) -> Expr:
    within = if_then_else(v < d(-bound), v + d(bound), v * d.zero)  # NaN is within
    return if_then_else(v > d(bound), v - d(bound), within)


_MAPS: Mapping[str, Callable[..., Expr]] = {
    "round": _round_half_even,
    "softplus": _softplus,
    "elu": _elu,
    "log_sigmoid": lambda v, d: primitives.min(v, d.zero) - primitives.log1p(primitives.exp(-primitives.abs(v))),
    "mish": lambda v, d: v * primitives.tanh(_softplus(v, d, 1.0, 20.0)),
    "tanhshrink": lambda v, d: v - primitives.tanh(v),
    "hardshrink": lambda v, d, bound: if_then_else(ir.logical_and(v >= d(-bound), v <= d(bound)), d.zero, v),
    "softshrink": _softshrink,
    "hardswish": lambda v, d: v * _clamped(v + d(3.0), d, 0.0, 6.0) / d(6.0),
    "sign": lambda v, d: if_then_else(v > d.zero, d.one, if_then_else(v < d.zero, d.zero - d.one, d.zero)),
    "exp2": lambda v, d: primitives.exp(v * d(math.log(2.0))),
    "logit": lambda v, d: primitives.log(v / (d.one - v)),
    "integer_power": _integer_power,
    "power": lambda v, d, exponent: primitives.pow(v, d(exponent)),
    "power_of": lambda v, d, base: primitives.pow(d(base), v),
    "logical_not": lambda v, d: ir.logical_not(v) if d.is_boolean() else v == d.zero,
    "nonzero": lambda v, d: v != d.zero,
    "nan_to_num": lambda v, d, nan, high, low: if_then_else(
        primitives.isfinite(v),
        v,
        if_then_else(v > d.zero, d(high), if_then_else(v < d.zero, d(low), d(nan))),
    ),
    "integer_power_of": _integer_power_of,
    "clamp": _clamped,
    "isfinite": lambda v, d: primitives.isfinite(v),
}


class MapOp(UnaryElementwiseOp):
    """A function of the table, applied to each element, with further ``parameters``."""

    def __init__(self, x: Tensor, function: str, parameters: Sequence[Any] = ()):
        dtype, define = x.dtype, _MAPS[function]
        super().__init__(
            x,
            op=lambda v: define(v, dtype, *parameters),
            name=function,
            attributes={"function": function, "parameters": list(parameters)},
        )
        self.name = function


# Functions of two operands of one dtype. A number as operand becomes a constant of that dtype.


def _of_other_sign(rest: Expr, b: Expr, d: DataType) -> Expr:
    """Whether the remainder of a division is nonzero and has not the sign of the divisor."""
    return ir.logical_or(ir.logical_and(rest < d.zero, b > d.zero), ir.logical_and(rest > d.zero, b < d.zero))


def _floor_divide(a: Expr, b: Expr, d: DataType) -> Expr:
    if d.is_integer():
        quotient = a / b
        rest = a - quotient * b
        return if_then_else(_of_other_sign(rest, b, d), quotient - d.one, quotient)
    # Divide the multiple of the divisor, so that rounding cannot cross an integer.
    rest = primitives.mod(a, b)
    exact = (a - rest) / b
    lower = if_then_else(_of_other_sign(rest, b, d), exact - d.one, exact)
    return if_then_else(b == d.zero, a / b, primitives.floor(lower + d(0.5)))


def _fmod(a: Expr, b: Expr, d: DataType) -> Expr:
    # hidet simplifies a remainder by one to zero of int32.
    return ir.cast(a % b, d) if d.is_integer() else primitives.mod(a, b)


def _remainder(a: Expr, b: Expr, d: DataType) -> Expr:
    rest = _fmod(a, b, d)
    return if_then_else(_of_other_sign(rest, b, d), rest + b, rest)


def _ignoring_nan(extreme: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr, DataType], Expr]:
    """Return the maximum or minimum of two elements; of one that is NaN and another one, the other one."""

    def define(a: Expr, b: Expr, d: DataType) -> Expr:
        if not d.is_float():
            return extreme(a, b)
        return if_then_else(primitives.isnan(a), b, if_then_else(primitives.isnan(b), a, extreme(a, b)))

    return define


def _truncate_divide(a: Expr, b: Expr, d: DataType) -> Expr:
    return a / b if d.is_integer() else primitives.trunc(a / b)


def _within_bits(b: Expr, d: DataType) -> Expr:
    """Whether a value of ``d`` can be shifted by ``b``: other shifts are undefined in C."""
    within = b < d(8 * int(d.nbytes))
    return ir.logical_and(b >= d.zero, within) if d.signedness() else within


def _left_shift(a: Expr, b: Expr, d: DataType) -> Expr:
    return if_then_else(_within_bits(b, d), cast(LeftShift(a, b), d), d.zero)


def _right_shift(a: Expr, b: Expr, d: DataType) -> Expr:
    beyond = if_then_else(a < d.zero, d(-1), d.zero) if d.signedness() else d.zero
    return if_then_else(_within_bits(b, d), cast(RightShift(a, b), d), beyond)


_COMBINATIONS: Mapping[str, Callable[[Expr, Expr, DataType], Expr]] = {
    "add": lambda a, b, d: ir.logical_or(a, b) if d.is_boolean() else a + b,
    "sub": lambda a, b, d: a - b,
    "mul": lambda a, b, d: ir.logical_and(a, b) if d.is_boolean() else a * b,
    "div": lambda a, b, d: a / b,
    "floor_divide": _floor_divide,
    "truncate_divide": _truncate_divide,
    "remainder": _remainder,
    "fmod": _fmod,
    "pow": lambda a, b, d: primitives.pow(a, b),
    "atan2": lambda a, b, d: primitives.atan2(a, b),
    "maximum": lambda a, b, d: primitives.max(a, b),
    "minimum": lambda a, b, d: primitives.min(a, b),
    "fmax": _ignoring_nan(primitives.max),
    "fmin": _ignoring_nan(primitives.min),
    "eq": lambda a, b, d: a == b,
    "ne": lambda a, b, d: a != b,
    "lt": lambda a, b, d: a < b,
    "le": lambda a, b, d: a <= b,
    "gt": lambda a, b, d: a > b,
    "ge": lambda a, b, d: a >= b,
    "logical_and": lambda a, b, d: ir.logical_and(a, b),
    "logical_or": lambda a, b, d: ir.logical_or(a, b),
    "logical_xor": lambda a, b, d: ir.logical_or(
        ir.logical_and(a, ir.logical_not(b)), ir.logical_and(ir.logical_not(a), b)
    ),
    "integer_power_of_bits": _integer_power_of_bits,
    "inverse_power": _inverse_power,
    "bitwise_and": lambda a, b, d: BitwiseAnd(a, b),
    "bitwise_or": lambda a, b, d: BitwiseOr(a, b),
    "bitwise_xor": lambda a, b, d: BitwiseXor(a, b),
    "left_shift": _left_shift,
    "right_shift": _right_shift,
}


class CombineOp(BinaryElementwiseOp):
    """A function of the table, applied to the elements of two broadcast tensors of one dtype."""

    def __init__(self, x: Tensor, y: Tensor, function: str):
        dtype, define = x.dtype, _COMBINATIONS[function]

        def apply(a: Expr, b: Expr) -> Expr:
            return define(a, b, dtype)

        self.op = BinaryElementwiseOperation.from_callable(apply, function)
        task = BinaryElementwiseTask(function, input_like(x, "x"), input_like(y, "y"), op=apply)
        Operator.__init__(self, inputs=[x, y], attributes={"function": function}, task=task)
        self.name = function


class CombineScalarOp(UnaryElementwiseOp):
    """A function of two operands, one of which is a number: the second, or the first if ``swapped``."""

    def __init__(self, x: Tensor, function: str, scalar: Scalar, swapped: bool = False):
        dtype, define = x.dtype, _COMBINATIONS[function]
        number = dtype(int(scalar) if isinstance(scalar, bool) and not dtype.is_boolean() else scalar)
        super().__init__(
            x,
            op=lambda v: define(number, v, dtype) if swapped else define(v, number, dtype),
            name=function,
            attributes={"function": function, "scalar": scalar, "swapped": swapped},
        )
        self.name = function


# hidet's operators for functions of two tensors that it defines as PyTorch does; its rewrites recognise them.
_HIDET: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": ops.add,
    "sub": ops.subtract,
    "mul": ops.multiply,
    "div": ops.divide,
    "eq": ops.equal,
    "ne": ops.not_equal,
    "lt": ops.less,
    "le": ops.less_equal,
    "gt": ops.greater,
    "ge": ops.greater_equal,
    "logical_and": ops.logical_and,
    "logical_or": ops.logical_or,
    "logical_xor": ops.logical_xor,
    "bitwise_and": ops.bitwise_and,
    "bitwise_or": ops.bitwise_or,
    "bitwise_xor": ops.bitwise_xor,
}
_HIDET_SCALAR = ("add", "sub", "mul", "div")


def _combined(function: str, x: Operand, y: Operand, dtype: DataType) -> Tensor:
    """Apply a function of two operands, both converted to ``dtype`` first."""
    left, right = (to_dtype(v, dtype) if isinstance(v, Tensor) else wrapped(v, dtype) for v in (x, y))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if function in _HIDET and not (dtype.is_boolean() and function in _HIDET_SCALAR):
            if len(left.shape) == 0 or len(right.shape) == 0:
                return CombineOp(left, right, function).outputs[0]  # hidet would read the constant while tracing
            return _HIDET[function](left, right)
        return CombineOp(left, right, function).outputs[0]
    if isinstance(left, Tensor):
        if function in _HIDET_SCALAR and not dtype.is_boolean():
            return _HIDET[function](left, dtype(right))
        return CombineScalarOp(left, function, right).outputs[0]
    if isinstance(right, Tensor):
        if function in _HIDET_SCALAR and not dtype.is_boolean():
            return _HIDET[function](dtype(left), right)
        return CombineScalarOp(right, function, left, swapped=True).outputs[0]
    raise TypeError(f"{function} of {x!r} and {y!r}: one of them must be a tensor.")


def add(x: Operand, y: Operand, alpha: Scalar = 1) -> Tensor:
    """``x + alpha * y``."""
    dtype = promoted_dtype(x, y)
    if alpha != 1:
        y = y * alpha if not isinstance(y, Tensor) else mul(to_dtype(y, dtype), alpha)
    return _combined("add", x, y, dtype)


def sub(x: Operand, y: Operand, alpha: Scalar = 1) -> Tensor:
    """``x - alpha * y``."""
    dtype = promoted_dtype(x, y)
    if alpha != 1:
        y = y * alpha if not isinstance(y, Tensor) else mul(to_dtype(y, dtype), alpha)
    return _combined("sub", x, y, dtype)


def rsub(x: Operand, y: Operand, alpha: Scalar = 1) -> Tensor:
    """``y - alpha * x``."""
    return sub(y, x, alpha)


def mul(x: Operand, y: Operand) -> Tensor:
    """``x * y``."""
    return _combined("mul", x, y, promoted_dtype(x, y))


def div(x: Operand, y: Operand, rounding_mode: str | None = None) -> Tensor:
    """``x / y``: of integers in float32, unless it is rounded (``"floor"`` or ``"trunc"``).

    Raises ValueError for another rounding mode.
    """
    if rounding_mode is None:
        return _combined("div", x, y, floating(promoted_dtype(x, y)))
    if rounding_mode not in ("floor", "trunc"):
        raise ValueError(f"div has no rounding mode {rounding_mode!r}: give None, 'floor' or 'trunc'.")
    return _combined("floor_divide" if rounding_mode == "floor" else "truncate_divide", x, y, promoted_dtype(x, y))


def floor_divide(x: Operand, y: Operand) -> Tensor:
    """The quotient, rounded down."""
    return div(x, y, "floor")


def remainder(x: Operand, y: Operand) -> Tensor:
    """The remainder of a division that is rounded down; it has the sign of ``y``."""
    return _combined("remainder", x, y, promoted_dtype(x, y))


def fmod(x: Operand, y: Operand) -> Tensor:
    """The remainder of a division that is rounded towards zero; it has the sign of ``x``."""
    return _combined("fmod", x, y, promoted_dtype(x, y))


def maximum(x: Operand, y: Operand) -> Tensor:
    """The larger element, or NaN if either is."""
    return _extreme("maximum", x, y)


def minimum(x: Operand, y: Operand) -> Tensor:
    """The smaller element, or NaN if either is."""
    return _extreme("minimum", x, y)


def fmax(x: Operand, y: Operand) -> Tensor:
    """The larger element; the other one where one is NaN."""
    return _extreme("fmax", x, y)


def fmin(x: Operand, y: Operand) -> Tensor:
    """The smaller element; the other one where one is NaN."""
    return _extreme("fmin", x, y)


def _extreme(function: str, x: Operand, y: Operand) -> Tensor:
    dtype = promoted_dtype(x, y)
    if dtype.is_boolean():
        return _combined("logical_or" if function in ("maximum", "fmax") else "logical_and", x, y, dtype)
    return _combined(function, x, y, dtype)


def atan2(x: Operand, y: Operand) -> Tensor:
    """The angle of the point (y, x)."""
    return _combined("atan2", x, y, floating(promoted_dtype(x, y)))


def pow(x: Operand, y: Operand) -> Tensor:
    """``x`` to the power ``y``; a negative power of integers is refused, as in PyTorch.

    Raises ValueError for a negative power of integers, and for truth values as exponents of truth values.
    """
    y = int(y) if isinstance(y, bool) else y
    dtype = promoted_dtype(x, y)
    if isinstance(x, Tensor) and not isinstance(y, Tensor):
        return _power(to_dtype(x, dtype), y)
    if dtype.is_boolean():
        raise ValueError("Truth values have no powers: convert one operand to integers first.")
    if isinstance(y, Tensor) and not isinstance(x, Tensor) and dtype.is_float():
        return MapOp(to_dtype(y, dtype), "power_of", [float(x)]).outputs[0]  # type: ignore[arg-type]
    if dtype.is_float():
        return _combined("pow", x, y, dtype)
    if not isinstance(x, Tensor):
        squares = [wrapped(int(x), dtype)]  # type: ignore[arg-type]
        while len(squares) < 8 * int(dtype.nbytes) - dtype.signedness():
            squares.append(wrapped(squares[-1] ** 2, dtype))
        return MapOp(to_dtype(y, dtype), "integer_power_of", squares).outputs[0]
    return _integer_powers(to_dtype(x, dtype), to_dtype(y, dtype))


def _integer_powers(x: Tensor, y: Tensor) -> Tensor:
    """Raise integers to the power of others of their dtype, modulo its range; negative powers are those of inverses.

    An operator takes six bits of the exponent, as its expression doubles with each: the last square has 32 factors.
    """
    bits = 8 * int(x.dtype.nbytes) - x.dtype.signedness()
    base, result = x, None
    for place in range(0, bits, _POWER_BITS):
        part = bitwise_and(bitwise_right_shift(y, place), 2**_POWER_BITS - 1)
        power = CombineOp(base, part, "integer_power_of_bits").outputs[0]
        result = power if result is None else mul(result, power)
        if place + _POWER_BITS < bits:
            base = MapOp(base, "integer_power", [2**_POWER_BITS]).outputs[0]
    assert result is not None
    if not x.dtype.signedness():
        return result
    return where(lt(y, 0), CombineOp(x, y, "inverse_power").outputs[0], result)


_POWER_BITS = 6


def _power(x: Tensor, exponent: Scalar) -> Tensor:
    if x.dtype.is_float():
        simple = {2.0: ops.square, 1.0: lambda v: v, 0.5: sqrt, -0.5: rsqrt, -1.0: reciprocal}
        if exponent in simple:
            return simple[float(exponent)](x)  # type: ignore[arg-type]
        if float(exponent).is_integer() and 0 <= exponent <= 8:  # type: ignore[arg-type, operator]
            return MapOp(x, "integer_power", [int(exponent)]).outputs[0]  # type: ignore[arg-type]
        return MapOp(x, "power", [float(exponent)]).outputs[0]  # type: ignore[arg-type]
    if exponent < 0:  # type: ignore[operator]
        raise ValueError(f"Integers have no power {exponent}: convert the base to a floating point dtype first.")
    most = 2**_POWER_BITS
    high, low = divmod(int(exponent), most)  # type: ignore[arg-type]
    power = MapOp(x, "integer_power", [low]).outputs[0]
    return mul(power, _power(MapOp(x, "integer_power", [most]).outputs[0], high)) if high else power


def _comparison(function: str) -> Callable[[Operand, Operand], Tensor]:
    def compare(x: Operand, y: Operand) -> Tensor:
        return _combined(function, x, y, promoted_dtype(x, y))

    compare.__name__ = function
    compare.__doc__ = f"Whether ``{function}`` holds, element by element: bool."
    return compare


eq, ne, lt, le, gt, ge = map(_comparison, ("eq", "ne", "lt", "le", "gt", "ge"))


def _logical(function: str) -> Callable[[Operand, Operand], Tensor]:
    def combine(x: Operand, y: Operand) -> Tensor:
        left, right = (to_dtype(v, boolean) if isinstance(v, Tensor) else bool(v) for v in (x, y))
        return _combined(function, left, right, boolean)

    combine.__name__ = function
    combine.__doc__ = f"``{function}`` of what is nonzero, element by element: bool."
    return combine


logical_and, logical_or, logical_xor = map(_logical, ("logical_and", "logical_or", "logical_xor"))


def _bitwise(function: str) -> Callable[[Operand, Operand], Tensor]:
    def combine(x: Operand, y: Operand) -> Tensor:
        dtype = promoted_dtype(x, y)
        if category(dtype) > 1:
            raise ValueError(f"bitwise_{function} is for integers and booleans, and not for {dtype.name}.")
        return _combined(("logical_" if dtype.is_boolean() else "bitwise_") + function, x, y, dtype)

    combine.__name__ = f"bitwise_{function}"
    combine.__doc__ = f"``{function}`` of the bits of integers, or of booleans. Raises ValueError for other dtypes."
    return combine


bitwise_and, bitwise_or, bitwise_xor = map(_bitwise, ("and", "or", "xor"))


def _shift(function: str) -> Callable[[Operand, Operand], Tensor]:
    def shift(x: Operand, y: Operand) -> Tensor:
        dtype = promoted_dtype(x, y)
        if category(dtype) != 1:
            raise ValueError(f"{function} is defined of integers, and not of {dtype.name}.")
        return _combined(function, x, y, dtype)

    shift.__name__ = f"bitwise_{function}"
    shift.__doc__ = (
        "The bits of integers, moved by ``y`` places; by as many as there are or more, none is left, except for copies "
        "of the sign to the right. Raises ValueError for other dtypes."
    )
    return shift


bitwise_left_shift, bitwise_right_shift = map(_shift, ("left_shift", "right_shift"))


def bitwise_not(x: Tensor) -> Tensor:
    """The complement of all bits; the negation of booleans."""
    return logical_not(x) if x.dtype.is_boolean() else ops.bitwise_invert(x)


def _condition(condition: Operand, *like: Operand) -> Tensor:
    """Convert a condition, a tensor or a number that is known, to a tensor of bool."""
    if isinstance(condition, Tensor):
        return to_dtype(condition, boolean)
    return constant(bool(condition), boolean, next(x for x in like if isinstance(x, Tensor)))


def where(condition: Operand, x: Operand, y: Operand) -> Tensor:
    """``x`` where the condition is nonzero, else ``y``, in their promoted dtype; one of the three is a tensor."""
    condition, dtype = _condition(condition, x, y), promoted_dtype(x, y)
    left, right = (to_dtype(v, dtype) if isinstance(v, Tensor) else wrapped(v, dtype) for v in (x, y))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return WhereOp(condition, left, right).outputs[0]
    if isinstance(left, Tensor):
        return WhereTensorScalarOp(condition, x=left, y=right).outputs[0]
    if isinstance(right, Tensor):
        return WhereScalarTensorOp(condition, y=right, x=left).outputs[0]
    return SelectOp(condition, left, right, dtype.name).outputs[0]


class SelectOp(UnaryElementwiseOp):
    """One of two numbers of a dtype, by a condition."""

    def __init__(self, condition: Tensor, x: Scalar, y: Scalar, dtype: str):
        kind = data_type(dtype)
        super().__init__(
            condition,
            op=lambda v: if_then_else(v, kind(x), kind(y)),
            name="select",
            attributes={"x": x, "y": y, "dtype": dtype},
        )


def masked_fill(x: Tensor, mask: Operand, value: Operand) -> Tensor:
    """``x`` with ``value`` where the mask is true; the result has the dtype of ``x``."""
    if isinstance(value, Tensor):
        return where(mask, to_dtype(value, x.dtype), x)
    value = value if x.dtype.is_float() else bool(value) if x.dtype.is_boolean() else int(value)  # type: ignore[arg-type]
    return WhereScalarTensorOp(_condition(mask, x), y=x, x=wrapped(value, x.dtype)).outputs[0]


def clamp(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """``x`` limited to ``min`` and ``max``; ``max`` where they cross. NaN stays NaN.

    Raises ValueError when there is no limit.
    """
    bounds = [bound for bound in (min, max) if bound is not None]
    if not bounds:
        raise ValueError("clamp needs at least one of min and max.")
    x = to_dtype(x, promoted_dtype(x, *bounds))
    if any(isinstance(bound, Tensor) for bound in bounds):
        x = x if min is None else maximum(x, min)
        return x if max is None else minimum(x, max)
    limits = [None if bound is None else wrapped(bound, x.dtype) for bound in (min, max)]
    return MapOp(x, "clamp", limits).outputs[0]


def clamp_min(x: Tensor, min: Operand) -> Tensor:
    """``x``, at least ``min``."""
    return clamp(x, min=min)


def clamp_max(x: Tensor, max: Operand) -> Tensor:
    """``x``, at most ``max``."""
    return clamp(x, max=max)


# Functions of one operand


def _floating(define: Callable[[Tensor], Tensor], name: str) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        return define(to_dtype(x, floating(x.dtype)))

    apply.__name__ = name
    apply.__doc__ = f"``{name}`` of each element: of integers and booleans in float32."
    return apply


def _mapped(function: str, *parameters: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: MapOp(x, function, parameters).outputs[0]


exp, exp2, expm1 = (
    _floating(*definition) for definition in ((ops.exp, "exp"), (_mapped("exp2"), "exp2"), (ops.expm1, "expm1"))
)
log, log2, log10, log1p = (
    _floating(*definition)
    for definition in ((ops.log, "log"), (ops.log2, "log2"), (ops.log10, "log10"), (ops.log1p, "log1p"))
)
sqrt, rsqrt, reciprocal = (
    _floating(*definition) for definition in ((ops.sqrt, "sqrt"), (ops.rsqrt, "rsqrt"), (ops.reciprocal, "reciprocal"))
)
sin, cos, tan = (_floating(*definition) for definition in ((ops.sin, "sin"), (ops.cos, "cos"), (ops.tan, "tan")))
asin, acos, atan = (
    _floating(*definition) for definition in ((ops.asin, "asin"), (ops.acos, "acos"), (ops.atan, "atan"))
)
sinh, cosh, tanh = (
    _floating(*definition) for definition in ((ops.sinh, "sinh"), (ops.cosh, "cosh"), (ops.tanh, "tanh"))
)
asinh, acosh, atanh = (
    _floating(*definition) for definition in ((ops.asinh, "asinh"), (ops.acosh, "acosh"), (ops.atanh, "atanh"))
)
erf, sigmoid = (_floating(*definition) for definition in ((ops.erf, "erf"), (ops.sigmoid, "sigmoid")))


def _rounding(define: Callable[[Tensor], Tensor], name: str) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        return define(x) if x.dtype.is_float() else x

    apply.__name__ = name
    apply.__doc__ = f"``{name}`` of each element; integers stay as they are."
    return apply


floor, ceil, trunc = (
    _rounding(*definition) for definition in ((ops.floor, "floor"), (ops.ceil, "ceil"), (ops.trunc, "trunc"))
)


def round(x: Tensor, decimals: int = 0) -> Tensor:
    """The nearest integer, or multiple of ``10**-decimals``; of two equally near ones, the even one."""
    if not x.dtype.is_float():
        return x
    if decimals == 0:
        return MapOp(x, "round").outputs[0]
    factor = 10.0 ** builtins.abs(decimals)
    scaled = mul(x, factor) if decimals > 0 else div(x, factor)
    rounded = MapOp(scaled, "round").outputs[0]
    return div(rounded, factor) if decimals > 0 else mul(rounded, factor)


def abs(x: Tensor) -> Tensor:
    """The absolute value."""
    return x if x.dtype.is_boolean() else ops.abs(x)


def neg(x: Tensor) -> Tensor:
    """``-x``."""
    return ops.negative(x)


def sign(x: Tensor) -> Tensor:
    """1, 0 or -1, by the sign of ``x``."""
    return x if x.dtype.is_boolean() else MapOp(x, "sign").outputs[0]


def square(x: Tensor) -> Tensor:
    """``x * x``."""
    return mul(x, x)


def logical_not(x: Tensor) -> Tensor:
    """Whether an element is zero: bool."""
    return MapOp(x, "logical_not").outputs[0]


def isnan(x: Tensor) -> Tensor:
    """Whether an element is not a number: bool."""
    return ops.isnan(x) if x.dtype.is_float() else ops.not_equal(x, x)


def isinf(x: Tensor) -> Tensor:
    """Whether an element is infinite: bool."""
    return ops.isinf(x) if x.dtype.is_float() else ops.not_equal(x, x)


def isfinite(x: Tensor) -> Tensor:
    """Whether an element is a finite number: bool."""
    return ops.isfinite(x) if x.dtype.is_float() else ops.equal(x, x)


def nan_to_num(x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """``x`` with numbers for NaN, infinity and its negative: by default 0 and the dtype's limits."""
    if not x.dtype.is_float():
        return x
    info = x.dtype.finfo()
    high, low = (float(info.max) if posinf is None else posinf, float(info.min) if neginf is None else neginf)
    return MapOp(x, "nan_to_num", [nan or 0.0, high, low]).outputs[0]


# Activations


def relu(x: Tensor) -> Tensor:
    """The larger of ``x`` and 0."""
    return ops.relu(x)


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return ops.silu(x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU by erf, or by tanh if ``approximate`` is ``"tanh"``.

    Raises ValueError for another approximation.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu has no approximation {approximate!r}: give 'none' or 'tanh'.")
    return ops.gelu(x, approximate == "tanh")


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """``x`` where it is positive, else ``negative_slope * x``."""
    return ops.leaky_relu(x, negative_slope)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` where it is positive, else ``weight * x``, with one weight or one for each channel (dim 1)."""
    if len(x.shape) > 1 and len(weight.shape) == 1:
        weight = ops.reshape(weight, [weight.shape[0], *[1] * (len(x.shape) - 2)])
    return ops.prelu(x, weight)


def elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """``scale * x`` where it is positive, else ``scale * alpha * (exp(input_scale * x) - 1)``."""
    return MapOp(x, "elu", [float(alpha), float(scale), float(input_scale)]).outputs[0]


def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """ELU with a continuous derivative: ``alpha * (exp(x / alpha) - 1)`` below 0."""
    return elu(x, alpha, 1.0, 1.0 / alpha)


def selu(x: Tensor) -> Tensor:
    """ELU with the constants of self-normalizing networks (Klambauer et al. 2017)."""
    return elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """``log(1 + exp(beta * x)) / beta``; ``x`` itself where ``beta * x`` is above the threshold."""
    return MapOp(x, "softplus", [float(beta), float(threshold)]).outputs[0]


def mish(x: Tensor) -> Tensor:
    """``x * tanh(softplus(x))``."""
    return MapOp(x, "mish").outputs[0]


def log_sigmoid(x: Tensor) -> Tensor:
    """``log(sigmoid(x))``, without overflow."""
    return MapOp(x, "log_sigmoid").outputs[0]


def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """``x`` limited to the two values."""
    return clamp(x, min_val, max_val)


def relu6(x: Tensor) -> Tensor:
    """``x`` limited to 0 and 6."""
    return clamp(x, 0, 6)


def hardswish(x: Tensor) -> Tensor:
    """``x * relu6(x + 3) / 6``."""
    return MapOp(x, "hardswish").outputs[0]


def hardsigmoid(x: Tensor) -> Tensor:
    """``relu6(x + 3) / 6``."""
    return ops.hardsigmoid(x)


def softsign(x: Tensor) -> Tensor:
    """``x / (1 + abs(x))``."""
    return ops.softsign(x)


def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """``x`` moved towards 0 by ``lambd``, and 0 within that distance."""
    return MapOp(x, "softshrink", [float(lambd)]).outputs[0]


def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """``x``, and 0 where its absolute value is at most ``lambd``."""
    return MapOp(x, "hardshrink", [float(lambd)]).outputs[0]


def tanhshrink(x: Tensor) -> Tensor:
    """``x - tanh(x)``."""
    return MapOp(x, "tanhshrink").outputs[0]


def threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    """``value`` where ``x`` is at most the threshold, else ``x``."""
    return where(le(x, threshold), value, x)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    """The first half along ``dim`` times the sigmoid of the second."""
    left, right = ops.split(x, 2, axis=dim % len(x.shape))
    return mul(left, sigmoid(right))


def lerp(x: Tensor, end: Tensor, weight: Operand) -> Tensor:
    """``x + weight * (end - x)``."""
    return add(x, mul(sub(end, x), weight))


def addcmul(x: Tensor, a: Tensor, b: Tensor, value: Scalar = 1) -> Tensor:
    """``x + value * a * b``."""
    return add(x, mul(a, b), alpha=value)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Scalar = 1) -> Tensor:
    """``x + value * a / b``."""
    return add(x, div(a, b), alpha=value)
