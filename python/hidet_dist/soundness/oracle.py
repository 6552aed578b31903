"""The oracle: it evaluates a task's compute definition in NumPy, independently of the derivation of rules.

It shares no code with the access analysis, so that each checks the other. Floating point is evaluated in double
precision whatever the dtype, so that wrong choices stand out from rounding errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
import torch
from hidet.ir import expr as ir
from hidet.ir.compute import ArgReduceCompute, GridCompute, ReduceCompute, TensorInput
from hidet.ir.task import Task
from hidet.ir.type import DataType

Array = np.ndarray[Any, Any]


class NotEvaluable(Exception):
    """A definition that the oracle cannot evaluate, or a missing one."""


class OutOfRange(Exception):
    """A definition that reads outside a tensor, where its conditions do not exclude that."""


@functools.cache
def numpy_dtype(dtype: DataType) -> np.dtype[Any]:
    """Return the NumPy dtype for values of a hidet dtype: double precision for all floating point."""
    if dtype.is_complex():
        return np.dtype(np.complex128)
    if dtype.is_float():
        return np.dtype(np.float64)
    if dtype.is_boolean():
        return np.dtype(np.bool_)
    try:
        return np.dtype(dtype.name)
    except TypeError:
        raise NotEvaluable(f"the dtype {dtype.name} has no NumPy peer") from None


def evaluate(task: Task, inputs: Sequence[Array], sizes: Mapping[str, int] | None = None) -> list[Array]:
    """Evaluate a task on whole inputs, with these ``sizes`` of its symbolic dims.

    Raises
    ------
    NotEvaluable
        When the oracle cannot evaluate the definition.
    OutOfRange
        When it reads outside a tensor.
    """
    evaluator = _Evaluator(dict(zip(task.inputs, inputs, strict=True)), sizes or {})
    outputs = []
    with np.errstate(all="ignore"):  # values of branches that are not taken may be anything
        for output in task.outputs:
            if not isinstance(output, GridCompute):
                raise NotEvaluable("it has no compute definition")
            outputs.append(evaluator.grid(output))
    return outputs


def _erf(x: Array) -> Array:
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x, np.float64))).numpy().reshape(np.shape(x))


_CALLS: dict[str, Callable[..., Any]] = {
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "erf": _erf,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "round": np.rint,
    "abs": np.abs,
    "ceil": np.ceil,
    "floor": np.floor,
    "trunc": np.trunc,
    "isfinite": np.isfinite,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "min": np.minimum,
    "max": np.maximum,
    "pow": np.power,
    "mod": np.fmod,
    "atan2": np.arctan2,
    "fma": lambda a, b, c: a * b + c,
    "real": np.real,
    "imag": np.imag,
    "conj": np.conj,
    "make_complex": lambda a, b: a + 1j * b,
}

# The order of the two classes of a test in Python does not matter; these map one to one to NumPy.
_BINARY: dict[type[ir.Expr], Callable[[Any, Any], Any]] = {
    ir.Add: np.add,
    ir.Sub: np.subtract,
    ir.Multiply: np.multiply,
    ir.Mod: np.fmod,  # the sign of the dividend, as in C
    ir.LessThan: np.less,
    ir.LessEqual: np.less_equal,
    ir.Equal: np.equal,
    ir.NotEqual: np.not_equal,
    ir.BitwiseAnd: np.bitwise_and,
    ir.BitwiseOr: np.bitwise_or,
    ir.BitwiseXor: np.bitwise_xor,
    ir.LeftShift: np.left_shift,
    ir.RightShift: np.right_shift,
}

_REDUCE: dict[str, Callable[[Array, tuple[int, ...]], Any]] = {
    "sum": lambda x, axes: np.sum(x, axis=axes, dtype=x.dtype),
    "product": lambda x, axes: np.prod(x, axis=axes, dtype=x.dtype),
    "max": lambda x, axes: np.max(x, axis=axes),
    "min": lambda x, axes: np.min(x, axis=axes),
    "average": lambda x, axes: np.mean(x, axis=axes),
    "and": lambda x, axes: np.all(x, axis=axes),
    "or": lambda x, axes: np.any(x, axis=axes),
}

_Env = dict[ir.Var, Array]


def _integral(*values: Any) -> bool:
    return all(np.asarray(v).dtype.kind in "iub" for v in values)


def _divide(a: Any, b: Any) -> Any:
    if not _integral(a, b):
        return np.true_divide(a, b)
    # Integer division truncates, as in C; a divisor of zero is in a branch that is not taken.
    divisor = np.where(np.asarray(b) == 0, 1, b)
    return (a - np.fmod(a, divisor)) // divisor


def _reduce_within(op: str, value: Array, within: Array, axes: tuple[int, ...]) -> Any:
    """Reduce only the values ``within`` the extent, which varies over the iteration space."""
    if op in ("sum", "average"):
        total = np.sum(np.where(within, value, 0), axis=axes, dtype=value.dtype)
        return total if op == "sum" else total / np.maximum(np.sum(within, axis=axes), 1)
    if op in ("max", "min") and value.dtype.kind == "f":
        neutral = -np.inf if op == "max" else np.inf
        return _REDUCE[op](np.where(within, value, neutral), axes)
    raise NotEvaluable(f"it has a reduction by {op} of varying extent")


class _Evaluator:
    """The evaluator. Values are arrays that broadcast over the iteration space; a reduction prepends its axes to it."""

    def __init__(self, inputs: dict[TensorInput, Array], sizes: Mapping[str, int]):
        self.inputs = inputs
        self.sizes = sizes
        self.grids: dict[GridCompute, Array] = {}

    def grid(self, node: GridCompute) -> Array:
        if node not in self.grids:
            shape = self.shape(node.shape)
            env: _Env = {}
            for dim, axis in enumerate(node.axes):
                env[axis] = self.iota(shape[dim], dim, len(shape))
            value = self.value(node.value, env, len(shape), np.True_)
            values = np.broadcast_to(value, shape)
            self.grids[node] = self.cast(values, node.type.dtype)
        return self.grids[node]

    def shape(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        try:
            return tuple(size if isinstance(size, int) else int(self.value(size, {}, 0, np.True_)) for size in sizes)
        except (NotEvaluable, TypeError, ValueError):
            raise NotEvaluable("a dim of it is symbolic") from None

    def iota(self, extent: int, dim: int, ndim: int) -> Array:
        return np.arange(extent, dtype=np.int64).reshape([extent if d == dim else 1 for d in range(ndim)])

    def cast(self, value: Any, dtype: DataType) -> Array:
        target = numpy_dtype(dtype)
        array = np.asarray(value)
        if array.dtype.kind == "c" and target.kind != "c":
            array = array.real
        return array.astype(target)

    def value(self, e: Any, env: _Env, ndim: int, live: Any) -> Any:
        """Evaluate ``e`` at every point of the iteration space; ``live`` is false where the value is not used."""
        if isinstance(e, bool | int | float | complex):
            return np.asarray(e)
        if isinstance(e, ir.Constant):
            if not isinstance(e.type, DataType):
                raise NotEvaluable(f"it has a constant of type {e.type}")
            return self.cast(e.value, e.type)
        if isinstance(e, ir.SymbolVar) and e.name in self.sizes:
            return np.asarray(self.sizes[e.name])
        if isinstance(e, ir.Var):
            if e not in env:
                raise NotEvaluable(f"it uses the variable {e.hint or e.name}")
            return env[e]
        if isinstance(e, ir.TensorElement):
            return self.element(e, env, ndim, live)
        if isinstance(e, ReduceCompute):
            return self.reduce(e, env, ndim, live)
        if isinstance(e, ArgReduceCompute):
            _, inner = self.bind([e.axis], [e.extent], env, ndim)
            value = np.asarray(self.value(e.value, inner, ndim + 1, live))
            pick = {"max": np.argmax, "min": np.argmin}[str(e.reduce_operation)]
            return self.cast(pick(value, axis=0), e.index_dtype)
        if isinstance(e, ir.IfThenElse):
            condition = np.asarray(self.value(e.cond, env, ndim, live)).astype(bool)
            then = self.value(e.then_expr, env, ndim, np.logical_and(live, condition))
            other = self.value(e.else_expr, env, ndim, np.logical_and(live, ~condition))
            return np.where(condition, then, other)
        if isinstance(e, ir.Cast):
            if not isinstance(e.target_type, DataType):
                raise NotEvaluable(f"it casts to {e.target_type}")
            return self.cast(self.value(e.expr, env, ndim, live), e.target_type)
        return self.arithmetic(e, env, ndim, live)

    def reduce(self, e: ReduceCompute, env: _Env, ndim: int, live: Any) -> Any:
        # An extent may depend on outer indices (cumulative sums): the reduction then runs to the greatest extent.
        sizes = [np.asarray(self.value(size, env, ndim, live)) for size in e.shape]
        extents = [max(int(size.max()), 0) for size in sizes]
        axes, inner = self.bind(e.axes, extents, env, ndim)
        within: Any = np.True_
        for axis, size in zip(e.axes, sizes, strict=True):
            within = np.logical_and(within, inner[axis] < size)
        value = self.cast(
            self.value(e.value, inner, ndim + len(axes), np.logical_and(live, within)), e.accumulate_dtype
        )
        # An axis that the value does not depend on still repeats it.
        lead = (1,) * (ndim + len(axes) - value.ndim) + value.shape
        value = np.broadcast_to(value.reshape(lead), (*extents, *lead[len(axes) :]))
        op = str(e.reduce_operation)
        if np.all(within):
            return _REDUCE[op](value, axes)
        within = np.broadcast_to(within, np.broadcast_shapes(np.shape(within), value.shape))
        value = np.broadcast_to(value, within.shape)
        return _reduce_within(op, value, within, axes)

    def arithmetic(self, e: Any, env: _Env, ndim: int, live: Any) -> Any:
        if isinstance(e, ir.LogicalAnd | ir.LogicalOr):
            a = np.asarray(self.value(e.a, env, ndim, live)).astype(bool)
            decides = ~a if isinstance(e, ir.LogicalAnd) else a
            b = np.asarray(self.value(e.b, env, ndim, np.logical_and(live, ~decides))).astype(bool)
            return a & b if isinstance(e, ir.LogicalAnd) else a | b
        if isinstance(e, ir.LogicalNot):
            return np.logical_not(self.value(e.a, env, ndim, live))
        if isinstance(e, ir.Neg):
            return np.negative(self.value(e.a, env, ndim, live))
        if isinstance(e, ir.BitwiseNot):
            return np.invert(self.value(e.a, env, ndim, live))
        if isinstance(e, ir.BinaryExpr):
            a, b = self.value(e.a, env, ndim, live), self.value(e.b, env, ndim, live)
            if isinstance(e, ir.Div | ir.FloorDiv):
                return _divide(a, b)
            if isinstance(e, ir.Mod) and _integral(b):
                b = np.where(np.asarray(b) == 0, 1, b)
            if type(e) in _BINARY:
                return _BINARY[type(e)](a, b)
        if isinstance(e, ir.Call):
            name = (e.func_var.name or e.func_var.hint).removeprefix("generic_")
            if name in _CALLS:
                return _CALLS[name](*(self.value(arg, env, ndim, live) for arg in e.args))
            raise NotEvaluable(f"it calls {name}")
        raise NotEvaluable(f"its definition has a {type(e).__name__}")

    def bind(self, axes: Sequence[ir.Var], sizes: Sequence[Any], env: _Env, ndim: int) -> tuple[tuple[int, ...], _Env]:
        inner = dict(env)
        for dim, (axis, extent) in enumerate(zip(axes, self.shape(sizes), strict=True)):
            inner[axis] = self.iota(extent, dim, ndim + len(axes))
        return tuple(range(len(axes))), inner

    def element(self, e: ir.TensorElement, env: _Env, ndim: int, live: Any) -> Any:
        if isinstance(e.base, TensorInput):
            data = self.inputs[e.base]
        elif isinstance(e.base, GridCompute):
            data = self.grid(e.base)
        elif isinstance(e.base, ir.Constant) and e.base.is_tensor():
            data = np.asarray(e.base.value)
        else:
            raise NotEvaluable(f"it reads from a {type(e.base).__name__}")
        indices = [np.asarray(self.value(index, env, ndim, live), np.int64) for index in e.indices]
        for place, (index, size) in enumerate(zip(indices, data.shape, strict=True)):
            wrong = (index < 0) | (index >= size)
            if wrong.any():
                used = wrong & live
                if np.any(used):
                    raise OutOfRange(f"{e} reads index {np.broadcast_to(index, used.shape)[used].flat[0]} of {size}")
                indices[place] = np.clip(index, 0, size - 1)
        if not data.size:  # nothing reads it, as where a symbolic dim has the size 0 in a concatenation
            return np.zeros(np.broadcast_shapes(*(index.shape for index in indices)), data.dtype)
        return data[tuple(indices)]


def index_bounds(task: Task) -> dict[int, int]:
    """Map each input that is used to index a tensor to the least extent that it indexes, which bounds its values."""
    bounds: dict[int, int] = {}
    numbers = {tensor: i for i, tensor in enumerate(task.inputs)}

    def reads(e: Any) -> set[int]:
        if isinstance(e, ir.TensorElement):
            numbers_read = {numbers[e.base]} if e.base in numbers else set()
            return fold(set.union, (reads(index) for index in e.indices), numbers_read)
        return fold(set.union, map(reads, _children(e)), set())

    def walk(e: Any) -> None:
        if isinstance(e, ir.TensorElement):
            shape = np.shape(e.base.value) if isinstance(e.base, ir.Constant) else e.base.shape
            for index, size in zip(e.indices, shape, strict=True):
                for number in reads(index):
                    bounds[number] = min(bounds.get(number, int(size)), int(size))
                walk(index)
            if isinstance(e.base, GridCompute):
                walk(e.base.value)
        for child in _children(e):
            walk(child)

    for output in task.outputs:
        if isinstance(output, GridCompute):
            walk(output.value)
    return bounds


def _children(e: Any) -> tuple[Any, ...]:
    if isinstance(e, ReduceCompute | ArgReduceCompute):
        return (e.value,)
    if isinstance(e, ir.BinaryExpr):
        return (e.a, e.b)
    if isinstance(e, ir.UnaryExpr):
        return (e.a,)
    if isinstance(e, ir.Cast):
        return (e.expr,)
    if isinstance(e, ir.IfThenElse):
        return (e.cond, e.then_expr, e.else_expr)
    return tuple(e.args) if isinstance(e, ir.Call) else ()
