"""Promotion and conversion of dtypes as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import hidet
import numpy as np
import torch
from hidet import ops
from hidet.graph import Tensor
from hidet.graph.frontend.torch.utils import dtype_to_torch
from hidet.ir.dtypes import boolean, complex64, float32, int64, promote_type
from hidet.ir.expr import Expr
from hidet.ir.tools import infer_type
from hidet.ir.type import DataType, data_type

Scalar: TypeAlias = bool | int | float | complex | Expr
"""A Python number, or one that is computed from sizes of symbolic dims."""
Operand: TypeAlias = Tensor | Scalar


def category(dtype: DataType) -> int:
    """Return the category of a dtype: 0 for bool, 1 for integers, 2 for floating point, 3 for complex numbers."""
    if dtype.is_boolean():
        return 0
    return 1 if dtype.is_integer() else 2 if dtype.is_float() else 3


def scalar_dtype(value: Scalar) -> DataType:
    """Return the default dtype of a Python number; for a number from symbolic sizes, that of its kind of number."""
    if isinstance(value, bool):
        return boolean
    if isinstance(value, Expr):
        return (boolean, int64, float32, complex64)[category(infer_type(value))]
    return int64 if isinstance(value, int) else float32 if isinstance(value, float) else complex64


def _higher(a: DataType, b: DataType) -> DataType:
    """Promote two dtypes as ``torch.promote_types`` does."""
    if a == b:
        return a
    if {a.name, b.name} == {"float16", "bfloat16"}:
        return float32
    if category(a) != category(b):
        high, low = (a, b) if category(a) > category(b) else (b, a)
        return data_type("complex128") if high.is_complex() and low.name == "float64" else high
    if {a.name, b.name} == {"complex64", "complex128"}:
        return data_type("complex128")
    if a.is_integer() and a.signedness() != b.signedness():
        unsigned, signed = (b, a) if a.signedness() else (a, b)
        nbytes = max(int(signed.nbytes), min(2 * int(unsigned.nbytes), 8))
        return data_type(f"int{8 * nbytes}")
    return promote_type(a, b)


def _highest(dtypes: Iterable[DataType]) -> DataType | None:
    result: DataType | None = None
    for dtype in dtypes:
        result = dtype if result is None else _higher(result, dtype)
    return result


def promoted_dtype(*operands: Operand) -> DataType:
    """Return the dtype in which PyTorch computes with these operands (``torch.result_type``).

    Tensors without dims count only if they are of a higher category than the others, and so do Python numbers.

    Raises ValueError when there is no operand.
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    groups = (
        [x.dtype for x in tensors if len(x.shape) > 0],
        [x.dtype for x in tensors if len(x.shape) == 0],
        [scalar_dtype(x) for x in operands if not isinstance(x, Tensor)],
    )
    result: DataType | None = None
    for highest in map(_highest, groups):
        if highest is not None and (result is None or category(highest) > category(result)):
            result = _higher(result, highest) if result is not None and highest.is_complex() else highest
    if result is None:
        raise ValueError("A dtype needs at least one operand.")
    return result


def wrapped(value: Scalar, dtype: DataType) -> Scalar:
    """Return an integer as a dtype of integers holds it: one beyond its range wraps around, as in PyTorch.

    Any other number is returned as it is.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not dtype.is_integer():
        return value
    low, count = int(dtype.min_value), 2 ** (8 * int(dtype.nbytes))
    return (value - low) % count + low


def floating(dtype: DataType) -> DataType:
    """Return the dtype in which functions such as sqrt are computed: float32 for integers and booleans."""
    return float32 if category(dtype) < 2 else dtype


def to_dtype(x: Tensor, dtype: DataType | str) -> Tensor:
    """Convert ``x`` as ``Tensor.to`` does: floats to integers towards zero; to bool, whether it is nonzero."""
    target = data_type(dtype)
    if x.dtype == target:
        return x
    if target.is_boolean() and x.dtype.is_float():
        # hidet's cast converts through integers on some targets, where 0.5 becomes 0.
        return ops.logical_not(ops.equal(x, ops.multiply(x, x.dtype.zero)))
    return ops.cast(x, target)


_COUNT: ContextVar[Callable[[int], None] | None] = ContextVar("count of the elements of constants", default=None)


@contextmanager
def counted_constants(count: Callable[[int], None]) -> Iterator[None]:
    """Have ``count`` know the elements of each constant that the block makes, before it is made.

    Whoever lowers a model from outside bounds what all of its operators make together: each of them bounds its own.
    """
    token = _COUNT.set(count)
    try:
        yield
    finally:
        _COUNT.reset(token)


def constant(value: Any, dtype: DataType | str, like: Tensor) -> Tensor:
    """Make a constant on the device of ``like``; ``value`` is anything that NumPy converts to an array."""
    if (count := _COUNT.get()) is not None:
        count(int(np.size(value)))
    array = np.array(value, order="C")
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which PyTorch does not know; float32 has all of its values
        array = array.astype(np.float32)
    if array.size:
        result = hidet.from_torch(torch.from_numpy(array).to(dtype_to_torch(data_type(dtype))))
    else:  # whose strides, all 0, hidet takes for those of a view
        result = hidet.empty(list(array.shape), dtype)
    return result if like.device.is_cpu() else result.to(device=like.device)
