"""hidet 0.6.1 lacks many functions of half precision; those of float32 take their place from now on.

* For CPUs it calls functions of C by names for which there is none of its half precision (``mod``, ``rsqrt``), or whose
  result is of double precision, beside which an element of half precision is ambiguous (``expm1``). Of bfloat16 it has
  half of the functions only. All of them are computed in float32 and rounded, as kernels of this package do.
* For GPUs it has some functions of half precision, which stay. The others are computed in float32 likewise.
* For CPUs it calls ``rsqrt`` of float64, which C does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hidet.ir.dtypes import bfloat16, float16, float32, float64
from hidet.ir.expr import Div, Expr, cast
from hidet.ir.primitives.math import MathFunctionSet, registered_math_function_sets
from hidet.ir.type import DataType

_UNARY = (
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "asinh", "acosh", "atanh"),
    *("exp", "expm1", "erf", "sqrt", "rsqrt", "log", "log2", "log10", "log1p"),
    *("round", "abs", "trunc", "ceil", "floor"),
)
_BINARY = ("mod", "pow", "atan2")
_PREDICATES = ("isfinite", "isinf", "isnan")
FUNCTIONS = (*_UNARY, *_BINARY, *_PREDICATES, "fma")
"""The functions that go through float32. Extremes are in :mod:`hidet_dist.compat.extremes`."""


def _through_float32(device: str, name: str, dtype: DataType) -> Callable[..., Expr]:
    """Make the method of a set of functions that computes in float32."""
    result = None if name in _PREDICATES else dtype

    def method(self: Any, *operands: Expr) -> Expr:
        function = getattr(registered_math_function_sets[device, "float32"], name)
        wide: Expr = function(*(cast(operand, float32) for operand in operands))
        return wide if result is None else cast(wide, result)

    return method


def _reciprocal_root(self: Any, a: Expr) -> Expr:
    return Div(float64.one, self.sqrt(a))


def lacks(functions: type[MathFunctionSet], name: str) -> bool:
    """Whether a class of functions does not define one."""
    return getattr(functions, name) is getattr(MathFunctionSet, name)


def install() -> None:
    """Compute functions of half precision in float32 from now on."""
    for device in ("cpu", "cuda"):
        for dtype in (float16, bfloat16):
            functions = type(registered_math_function_sets[device, dtype.name])
            for name in FUNCTIONS:
                if device == "cpu" or lacks(functions, name):
                    setattr(functions, name, _through_float32(device, name, dtype))
    type(registered_math_function_sets["cpu", "float64"]).rsqrt = _reciprocal_root
