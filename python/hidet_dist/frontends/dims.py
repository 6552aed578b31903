"""Conversion of PyTorch's symbolic sizes, and of numbers computed from them, to hidet's expressions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from hidet.ir import primitives
from hidet.ir.dtypes import float64
from hidet.ir.expr import Expr, cast, symbol_var

from hidet_dist.spec.extents import Extent

_SUM_AND_PRODUCT: dict[str, Callable[[Any, Any], Any]] = {"Add": operator.add, "Mul": operator.mul}
_FUNCTIONS: dict[str, Callable[[Expr], Expr]] = {
    f"OpaqueUnaryFn_{name}": getattr(primitives, name) for name in ("sqrt", "exp", "log", "log2", "sin", "cos", "tanh")
}


class Dims:
    """The symbolic dims of an exported program.

    Parameters
    ----------
    names: mapping
        Names of symbols in PyTorch's shape environment, such as ``s77``, to the user's names of the dims.
    """

    def __init__(self, names: Mapping[str, str]):
        self._names = dict(names)

    def extent(self, size: Any) -> Extent:
        """Convert a size to an int, or an expression of symbolic dims.

        Raises
        ------
        ValueError
            When the size depends on data, or uses arithmetic that hidet's extents lack.
        """
        if isinstance(size, int):
            return size
        return self._expression(size.node.expr)

    def shape(self, sizes: Sequence[Any]) -> list[Extent]:
        """Convert a shape; raises ValueError as :meth:`extent` does."""
        return [self.extent(size) for size in sizes]

    def number(self, value: Any) -> float | Expr:
        """Convert a ``torch.SymFloat`` to a float, or an expression of float64.

        Raises
        ------
        ValueError
            When it depends on data, or uses a function that is not supported.
        """
        return self._float(value.node.expr)

    def _float(self, expression: Any) -> float | Expr:
        if expression.is_number:
            return float(expression)
        if expression.is_integer and type(expression).__name__ != "ToFloat":
            return cast(self._expression(expression), float64)
        kind = type(expression).__name__
        parts = [self._float(part) for part in expression.args]
        if kind == "ToFloat":
            return parts[0]
        if kind in ("Add", "Mul"):
            return reduce(_SUM_AND_PRODUCT[kind], parts)
        if kind in ("IntTrueDiv", "FloatTrueDiv"):
            return _constant(parts[0]) / _constant(parts[1])
        if kind in ("FloatPow", "Pow"):
            return primitives.pow(_constant(parts[0]), _constant(parts[1]))
        if kind in _FUNCTIONS:
            return _FUNCTIONS[kind](parts[0])
        if kind.startswith("Symbol"):
            raise ValueError(f"the number {expression} depends on data")
        raise ValueError(f"the number {expression} is computed from sizes by {kind}, which is not supported")

    def _expression(self, expression: Any) -> Extent:
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            name = str(expression)
            if name.startswith("u"):
                raise ValueError(f"the size {name} depends on data")
            return symbol_var(self._names.get(name, name))
        kind = type(expression).__name__
        if kind == "Pow" and expression.exp.is_Integer and int(expression.exp) > 0:
            return reduce(lambda a, b: a * b, [self._expression(expression.base)] * int(expression.exp))
        parts = [self._expression(part) for part in expression.args]
        if kind == "Add":
            # Subtracted terms are last, so that no partial sum is negative.
            return reduce(lambda a, b: a + b, sorted(parts, key=lambda part: isinstance(part, int) and part < 0))
        if kind == "Mul":
            return reduce(lambda a, b: a * b, parts)
        if kind in ("FloorDiv", "CleanDiv", "IntTrueDiv"):
            return parts[0] // parts[1]
        if kind in ("Mod", "PythonMod"):
            return parts[0] % parts[1]
        raise ValueError(f"the size {expression} is not a sum, product, quotient or remainder of symbolic dims")


def _constant(value: float | Expr) -> Expr:
    """Make an expression of a number."""
    return value if isinstance(value, Expr) else float64(value)
