"""Arithmetic on shapes with symbolic dims, which models compute to reshape, expand and slice by."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from hidet.ir.expr import Constant, Expr, is_constant
from hidet.ir.tools import simplify

from hidet_dist.frontends.onnx.nodes import Refused

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.floordiv,
}


def _plain(value: Any) -> Any:
    if isinstance(value, Constant) or (isinstance(value, Expr) and is_constant(value)):
        return int(value)
    return int(value) if isinstance(value, np.integer) else value


def _held(values: Any, shape: Sequence[int]) -> np.ndarray:
    """An array of the values: of integers where all are known."""
    flat = [_plain(value) for value in values]
    if all(isinstance(value, int) for value in flat):
        return np.array(flat, np.int64).reshape(shape)
    held = np.empty(len(flat), object)
    for place, value in enumerate(flat):
        held[place] = value
    return held.reshape(shape)


def _combined(function: Callable[[Any, Any], Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = np.broadcast_arrays(a, b)
    pairs = zip(a.reshape(-1), b.reshape(-1), strict=True)
    return _held([simplify(function(_plain(x), _plain(y))) for x, y in pairs], a.shape)


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal. Raises Refused where that depends on a symbolic dim."""
    a, b = _plain(a), _plain(b)
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if str(a) == str(b):
        return True
    if any(isinstance(size, int) and size < 1 for size in (a, b)):
        return False  # a dim has at least one element
    raise Refused(f"the model compares the size {a} with {b}: give the size in dims")


def evaluate_shapes(name: str, given: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    """The outputs of an operator on shapes, some of which are symbolic.

    Raises
    ------
    Refused
        For an operator that shapes are not made with here.
    """
    x = given[0]
    if name in _ARITHMETIC:
        return [_combined(_ARITHMETIC[name], given[0], given[1])]
    if name in ("Identity", "Cast"):
        return [x]
    if name == "Gather":
        found = np.take(x, given[1].astype(np.int64), attributes.get("axis", 0))
        return [_held(np.asarray(found, object).reshape(-1), np.shape(given[1]))] if x.ndim == 1 else [found]
    if name == "Concat":
        flat = [value for part in given for value in part.reshape(-1)]
        return [_held(flat, [len(flat)])]
    if name in ("Unsqueeze", "Squeeze", "Reshape"):
        # Of shapes, which have at most one dim.
        scalar = name == "Squeeze" or (name == "Reshape" and given[1].size == 0)
        return [_held(x.reshape(-1), [] if scalar and x.size == 1 else [x.size])]
    if name == "Slice":
        start, stop = int(given[1].reshape(-1)[0]), int(given[2].reshape(-1)[0])
        step = int(given[4].reshape(-1)[0]) if len(given) > 4 and given[4] is not None else 1
        part = x[start:stop:step]
        return [_held(part, [len(part)])]
    if name == "Equal":
        a, b = np.broadcast_arrays(given[0], given[1])
        pairs = zip(a.reshape(-1), b.reshape(-1), strict=True)
        return [np.array([_same(p, q) for p, q in pairs], bool).reshape(a.shape)]
    if name == "Where":
        condition, a, b = np.broadcast_arrays(*given)
        chosen = [p if c else q for c, p, q in zip(condition.reshape(-1), a.reshape(-1), b.reshape(-1), strict=True)]
        return [_held(chosen, condition.shape)]
    if name == "ReduceProd":
        total: Any = 1
        for value in x.reshape(-1):
            total = total * _plain(value)
        return [_held([total], [1] if attributes.get("keepdims", 1) else [])]
    raise Refused(f"a shape with symbolic dims is computed with {name}: give the sizes in dims")
