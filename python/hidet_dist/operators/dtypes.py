"""Element types as PyTorch promotes and converts them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import hidet
import numpy as np
import torch
from hidet import ops
from hidet.graph import Tensor
from hidet.graph.frontend.torch.utils import dtype_to_torch
from hidet.ir.dtypes import boolean, complex64, float32, int64, promote_type
from hidet.ir.type import DataType, data_type

Scalar: TypeAlias = bool | int | float | complex
Operand: TypeAlias = Tensor | Scalar


def category(dtype: DataType) -> int:
    """The kind of a dtype's numbers: 0 for bool, 1 for integers, 2 for floating point, 3 for complex numbers."""
    if dtype.is_boolean():
        return 0
    return 1 if dtype.is_integer() else 2 if dtype.is_float() else 3


def scalar_dtype(value: Scalar) -> DataType:
    """The dtype that a Python number has where no tensor says otherwise."""
    if isinstance(value, bool):
        return boolean
    return int64 if isinstance(value, int) else float32 if isinstance(value, float) else complex64


def _higher(a: DataType, b: DataType) -> DataType:
    """The dtype that holds the numbers of both, as ``torch.promote_types`` has it."""
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
    """The dtype in which PyTorch computes with these operands (``torch.result_type``).

    Tensors without dims, and after them Python numbers, count only where they are of a higher kind than the others.

    Raises ValueError when there is no operand.
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    groups = (
        [x.dtype for x in tensors if len(x.shape) > 0],
        [x.dtype for x in tensors if len(x.shape) == 0],
        [scalar_dtype(x) for x in operands if not isinstance(x, Tensor)],
    )
    result: DataType | None = None
    for own in map(_highest, groups):
        if own is not None and (result is None or category(own) > category(result)):
            result = _higher(result, own) if result is not None and own.is_complex() else own
    if result is None:
        raise ValueError("There is no operand to take a dtype from.")
    return result


def floating(dtype: DataType) -> DataType:
    """The dtype in which functions such as sqrt are computed: float32 for integers and booleans."""
    return float32 if category(dtype) < 2 else dtype


def to_dtype(x: Tensor, dtype: DataType | str) -> Tensor:
    """``x`` converted as ``Tensor.to`` converts: floats to integers towards zero, to bool by being nonzero."""
    target = data_type(dtype)
    if x.dtype == target:
        return x
    if target.is_boolean() and x.dtype.is_float():
        # A cast of hidet goes by way of integers on some targets, where 0.5 is 0.
        return ops.logical_not(ops.equal(x, ops.multiply(x, x.dtype.zero)))
    return ops.cast(x, target)


def constant(value: Any, dtype: DataType | str, like: Tensor) -> Tensor:
    """A tensor of known values on the device of ``like``; ``value`` is what NumPy takes for an array."""
    array = torch.from_numpy(np.array(value, order="C"))
    made = hidet.from_torch(array.to(dtype_to_torch(data_type(dtype))))
    return made if like.device.is_cpu() else made.to(device=like.device)
