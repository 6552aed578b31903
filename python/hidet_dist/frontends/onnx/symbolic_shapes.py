"""Arithmetic on shapes with symbolic dims, which models compute as arguments of reshape, expand and slice."""

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
    """Make an array of values; of integers if all are known."""
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
    """Whether two sizes are equal. Raises Refused if that depends on a symbolic dim."""
    a, b = _plain(a), _plain(b)
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if str(a) == str(b):
        return True
    if any(isinstance(size, int) and size < 1 for size in (a, b)):
        return False  # a dim has at least one element
    raise Refused(f"the model compares the size {a} with {b}: give the size in dims")


def evaluate_shapes(name: str, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    """Compute an operator's outputs for shapes, some of which are symbolic.

    Raises
    ------
    Refused
        For an operator that is not supported on shapes.
    """
    x = inputs[0]
    if name in _ARITHMETIC:
        return [_combined(_ARITHMETIC[name], inputs[0], inputs[1])]
    if name in ("Identity", "Cast"):
        return [x]
    if name == "Gather":
        taken = np.take(x, inputs[1].astype(np.int64), attributes.get("axis", 0))
        return [_held(np.asarray(taken, object).reshape(-1), np.shape(inputs[1]))] if x.ndim == 1 else [taken]
    if name == "Concat":
        flat = [value for part in inputs for value in part.reshape(-1)]
        return [_held(flat, [len(flat)])]
    if name in ("Unsqueeze", "Squeeze", "Reshape"):
        # Shapes have at most one dim.
        scalar = name == "Squeeze" or (name == "Reshape" and inputs[1].size == 0)
        return [_held(x.reshape(-1), [] if scalar and x.size == 1 else [x.size])]
    if name == "Slice":
        start, stop = int(inputs[1].reshape(-1)[0]), int(inputs[2].reshape(-1)[0])
        step = int(inputs[4].reshape(-1)[0]) if len(inputs) > 4 and inputs[4] is not None else 1
        part = x[start:stop:step]
        return [_held(part, [len(part)])]
    if name == "Equal":
        a, b = np.broadcast_arrays(inputs[0], inputs[1])
        pairs = zip(a.reshape(-1), b.reshape(-1), strict=True)
        return [np.array([_same(p, q) for p, q in pairs], bool).reshape(a.shape)]
    if name == "Where":
        condition, a, b = np.broadcast_arrays(*inputs)
        chosen = [p if c else q for c, p, q in zip(condition.reshape(-1), a.reshape(-1), b.reshape(-1), strict=True)]
        return [_held(chosen, condition.shape)]
    if name == "ReduceProd":
        total: Any = 1
        for value in x.reshape(-1):
            total = total * _plain(value)
        return [_held([total], [1] if attributes.get("keepdims", 1) else [])]
    raise Refused(f"a shape with symbolic dims is computed with {name}: give the sizes in dims")
