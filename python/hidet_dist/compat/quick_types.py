"""hidet 0.6.1 makes types, numbers and variables by general functions; the common ones are made directly here.

An operator is built from dozens of them: the types of its inputs and outputs, a number for each extent, and variables
for indices. hidet's functions import modules, look names up, and compare types with all that they may be. For dtypes,
ints, and shapes of ints, the result is known at once. The layout of a shape with symbols is made once, from its
simplified extents, where hidet simplifies the layout ten times: products of extents change each time. All other
arguments go to hidet's functions.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Hashable, Sequence
from typing import Any

from hidet.graph import tensor as graph_tensor
from hidet.ir import expr as ir
from hidet.ir import task, tools
from hidet.ir import type as ir_type
from hidet.ir.compute import GridCompute, ReduceCompute, TensorInput, primitives
from hidet.ir.dtypes import int32
from hidet.ir.expr import Constant, Expr, TensorElement, Var
from hidet.ir.layout import DataLayout, RowMajorLayout
from hidet.ir.type import DataType, TensorType

from hidet_dist.compat.replacing import Substitutes
from hidet_dist.compat.simplest_forms import closed_form_of

_type_infer: Any = importlib.import_module("hidet.ir.tools.type_infer")

hidet_convert = ir.convert
hidet_data_type = ir_type.data_type
hidet_infer_type = tools.infer_type
hidet_tensor_type = ir_type.tensor_type
hidet_var = ir.var

_MOST_LAYOUTS = 16384  # after which they are forgotten, to bound the memory that they take

_layouts: dict[Hashable, DataLayout] = {}  # simplified, by the form of a shape

_SUMS = (ir.Add, ir.Sub, ir.Multiply)


def _number(value: int) -> Constant:
    known: Constant | None = Constant._constant_pool.get((value, "int32"))
    if known is None:
        known = ir.constant(value, int32)
    return known


def _convert(obj: Any, dtype: Any = None) -> Any:
    """Convert a value to an expression; replaces ``convert`` of ``hidet.ir.expr``."""
    if isinstance(obj, Expr):
        return obj
    if type(obj) is int and dtype is None:
        return _number(obj)
    return hidet_convert(obj, dtype)


def _data_type(dtype: Any) -> Any:
    """Find a dtype by its name; replaces ``data_type`` of ``hidet.ir.type``."""
    return dtype if isinstance(dtype, DataType) else hidet_data_type(dtype)


def _var(hint: str | None = None, dtype: Any = "int32") -> Var:
    """Make a variable; replaces ``var`` of ``hidet.ir.expr`` where definitions are made."""
    if (hint is None or hint == "v") and dtype == "int32":
        return Var(hint, int32)
    made: Var = hidet_var(hint, dtype)
    return made


def _row_major(shape: Sequence[int]) -> RowMajorLayout:
    layout = RowMajorLayout.__new__(RowMajorLayout)
    layout.shape = tuple(shape)
    layout.size = sum((extent - 1) * math.prod(shape[dim + 1 :]) for dim, extent in enumerate(shape)) + 1
    layout.strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return layout


def _tensor_type(dtype: Any, shape: Sequence[Any] | None = None, layout: DataLayout | None = None) -> TensorType:
    """Make the type of a tensor; replaces ``tensor_type`` of ``hidet.ir.type`` where definitions are made."""
    if shape is None or layout is not None or not isinstance(dtype, DataType):
        return hidet_tensor_type(dtype, shape, layout)
    for extent in shape:
        if type(extent) is not int:
            return _symbolic_type(dtype, shape)
    return TensorType(dtype, tuple(map(_number, shape)), _row_major(shape))


def _symbolic_type(dtype: DataType, shape: Sequence[Any]) -> TensorType:
    form = closed_form_of(shape)
    if form is None:
        return hidet_tensor_type(dtype, shape)
    layout = _layouts.get(form)
    if layout is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        layout = _layouts[form] = RowMajorLayout([tools.simplify(extent, enable_rules=True) for extent in shape])
    return TensorType(dtype, hidet_convert(shape), layout)


def _dtype_of(e: Any) -> DataType | None:
    """Infer the dtype of an element; None for expressions that hidet's functor must visit."""
    kind = type(e)
    if kind is TensorElement:
        base = e.base
        if type(base) is TensorInput:
            dtype: DataType = base.ttype.dtype
            return dtype
        return _dtype_of(base.value) if type(base) is GridCompute else None
    if kind is ReduceCompute:
        return _dtype_of(e.value)
    if kind is Constant and isinstance(e.type, DataType):
        return e.type
    if kind in _SUMS:
        one, other = _dtype_of(e.a), _dtype_of(e.b)
        return one if one is other and one is not None and one.is_float() else None
    return None


def _infer_type(e: Any) -> Any:
    """Infer the type of an expression; replaces ``infer_type`` of ``hidet.ir.tools``."""
    if type(e) is GridCompute and e.layout is None:
        dtype = _dtype_of(e.value)
        if dtype is not None:
            return _tensor_type(dtype, e._shape)
    return hidet_infer_type(e)


SUBSTITUTES: Substitutes = (
    (ir, {"convert": _convert, "data_type": _data_type}),
    (ir_type, {"data_type": _data_type}),
    (primitives, {"convert": _convert, "data_type": _data_type, "var": _var, "tensor_type": _tensor_type}),
    (graph_tensor, {"data_type": _data_type}),
    (task, {"var": _var}),
    (_type_infer, {"tensor_type": _tensor_type}),
    (tools, {"infer_type": _infer_type}),
)
