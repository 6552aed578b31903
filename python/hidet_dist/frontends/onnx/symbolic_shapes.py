"""Arithmetic on shapes with symbolic dims, from which models compute the arguments of reshape, expand and slice."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from hidet.ir.expr import Add, BinaryExpr, Constant, Div, Expr, Mod, Multiply, SymbolVar, is_constant
from hidet.ir.tools import simplify

from hidet_dist.frontends.refusals import Refused

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.floordiv,
}
_MOST_PARTS = 1000


def _plain(value: Any) -> Any:
    """Convert a constant of hidet or NumPy to an int; return any other value as it is."""
    if isinstance(value, Constant) or (isinstance(value, Expr) and is_constant(value)):
        return int(value)
    return int(value) if isinstance(value, np.integer) else value


def _array(values: Any, shape: Sequence[int]) -> np.ndarray:
    """Make an array of sizes: of int64 if all are known, else of the dtype object."""
    flat = [_plain(value) for value in values]
    if all(isinstance(value, int) for value in flat):
        return np.array(flat, np.int64).reshape(shape)
    array = np.empty(len(flat), object)
    for position, value in enumerate(flat):
        array[position] = value
    return array.reshape(shape)


def _combined(function: Callable[[Any, Any], Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Apply a function to the elements of two arrays, broadcast."""
    a, b = np.broadcast_arrays(a, b)
    pairs = zip(a.reshape(-1), b.reshape(-1), strict=True)
    return _array([simplify(_short(function(_plain(x), _plain(y)))) for x, y in pairs], a.shape)


def _short(size: Any) -> Any:
    """Return a size. Raises Refused for an expression so long that models have none: it may double in each step."""
    pending, count = [size], 0
    while pending:
        part, count = pending.pop(), count + 1
        if count > _MOST_PARTS:
            raise Refused(f"a size is an expression of more than {_MOST_PARTS} numbers and operations: give it in dims")
        pending += [part.a, part.b] if isinstance(part, BinaryExpr) else []
    return size


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal. Raises Refused if that depends on a symbolic dim."""
    a, b = _plain(a), _plain(b)
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if str(a) == str(b):
        return True
    for size, expression in ((a, b), (b, a)):
        bound = _lower_bound(expression)
        if isinstance(size, int) and bound is not None and size < bound:
            return False
    raise Refused(f"the model compares the size {a} with {b}: give the size in dims")


def _lower_bound(size: Any) -> int | None:
    """Return a number that a size is never below, since a dim has at least one element; None if none is known."""
    size = _plain(size)
    if isinstance(size, int):
        return size
    if isinstance(size, SymbolVar):
        return 1
    if not isinstance(size, Add | Multiply | Div | Mod):
        return None
    a, b = _lower_bound(size.a), _lower_bound(size.b)
    if a is None or b is None or a < 0 or b < 0:
        return None
    return a + b if isinstance(size, Add) else a * b if isinstance(size, Multiply) else 0


def evaluate_shapes(name: str, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    """Compute an operator's outputs for shapes, some of which are symbolic.

    Raises
    ------
    Refused
        For an operator that is not supported on shapes.
    """
    x = inputs[0]
    if any(isinstance(value, np.ndarray) and value.dtype.kind == "f" for value in inputs):
        raise Refused(f"a shape with symbolic dims is computed with {name} of floats: give the sizes in dims")
    if name in _ARITHMETIC:
        return [_combined(_ARITHMETIC[name], inputs[0], inputs[1])]
    if name in ("Identity", "Cast"):
        return [x]
    moved = _moved(name, inputs, attributes)
    if moved is not None:
        return [moved]
    if name == "Equal":
        a, b = np.broadcast_arrays(inputs[0], inputs[1])
        pairs = zip(a.reshape(-1), b.reshape(-1), strict=True)
        return [np.array([_same(p, q) for p, q in pairs], bool).reshape(a.shape)]
    if name == "Where":
        condition, a, b = np.broadcast_arrays(*inputs)
        chosen = [p if c else q for c, p, q in zip(condition.reshape(-1), a.reshape(-1), b.reshape(-1), strict=True)]
        return [_array(chosen, condition.shape)]
    if name == "ReduceProd":
        total: Any = 1
        for value in x.reshape(-1):
            total = _short(total * _plain(value))
        return [_array([total], [1] if attributes.get("keepdims", 1) else [])]
    raise Refused(f"a shape with symbolic dims is computed with {name}: give the sizes in dims")


def _moved(name: str, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> np.ndarray | None:
    """Compute an operator that only moves the numbers of shapes; None for any other."""
    x = inputs[0]
    if name == "Gather":
        part = np.take(x, inputs[1].astype(np.int64), attributes.get("axis", 0))
        return _array(np.asarray(part, object).reshape(-1), np.shape(inputs[1])) if x.ndim == 1 else part
    if name == "Concat":
        flat = [value for part in inputs for value in part.reshape(-1)]
        return _array(flat, [len(flat)])
    if name in ("Unsqueeze", "Squeeze", "Reshape"):
        # Shapes have at most one dim.
        scalar = name == "Squeeze" or (name == "Reshape" and inputs[1].size == 0)
        return _array(x.reshape(-1), [] if scalar and x.size == 1 else [x.size])
    if name == "Slice":
        start, stop = int(inputs[1].reshape(-1)[0]), int(inputs[2].reshape(-1)[0])
        step = int(inputs[4].reshape(-1)[0]) if len(inputs) > 4 and inputs[4] is not None else 1
        part = x[start:stop:step]
        return _array(part, [len(part)])
    return None
