"""hidet 0.6.1 drops NaN where it takes the greater or the less of two floats; NaN is kept from now on, as in PyTorch.

For CPUs it has neither for integers other than int32 and int64, for which functions are added.

* ``max`` and ``min`` call functions of C that return the other operand of NaN. These are the maximum of elements, of a
  reduction, of clamps and of ReLU.
* The first index of an extreme is never that of NaN.
* Maxima start with the greatest negative number, which is more than minus infinity: so does the border of a maximum
  pooling.

These functions are hidet's code, which it adds to the kernels that call them, in an order that differs between
processes; here it is the order of their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hidet
from hidet.graph.ops.pool import PoolNdBaseTask
from hidet.ir.builders import FunctionBuilder
from hidet.ir.compute.reduce_operations import MaxReduce, MinReduce
from hidet.ir.dtypes import bfloat16, float16, float32, float64, int8, int16, uint8, uint16, uint32, uint64
from hidet.ir.expr import Equal, Expr, IfThenElse, LessThan, LogicalAnd, LogicalOr, NotEqual, Var, cast, if_then_else
from hidet.ir.func import Function
from hidet.ir.module import IRModule
from hidet.ir.primitives.cuda.math.float32 import CUDAFloat32MathFunctionSet
from hidet.ir.primitives.func import primitive_func_pool, register_primitive_function
from hidet.ir.primitives.math import MathFunctionSet, register_math_function_set
from hidet.ir.stmt import asm
from hidet.ir.tools import infer_type
from hidet.ir.type import DataType, data_type
from hidet.transforms.import_primitive_functions import ImportPrimitiveFunctionPass

hidet_initial_values = {kind: kind.initial_value for kind in (MaxReduce, MinReduce)}
hidet_preprocess = PoolNdBaseTask.preprocess
hidet_import = ImportPrimitiveFunctionPass.process_module

_SHORT_ON_CPU = {"cpu_f16": float16, "cpu_bf16": bfloat16}
_LONG = {"cpu_f32": float32, "cpu_f64": float64, "cuda_f32": float32, "cuda_f64": float64}
_OTHER_INTEGERS = (int8, int16, uint8, uint16, uint32, uint64)
_INTRINSICS = {"cuda_f16_{}_sm80": "__h{}_nan", "cuda_bf16_{}": "__h{}_nan"}


def _is_nan(e: Expr) -> Expr:
    return NotEqual(e, e)


def _extreme_of(name: str, dtype: DataType, before: Callable[[Expr, Expr], Expr], through: DataType) -> Function:
    """Make the function that returns the operand that comes ``before`` the other, or NaN, compared as ``through``."""
    a, b = Var("a", dtype), Var("b", dtype)
    x, y = (operand if dtype is through else cast(operand, through) for operand in (a, b))
    kind = "cuda_internal" if name.startswith("cuda") else "cpu_internal"
    is_first = LogicalOr(before(x, y), _is_nan(x)) if dtype.is_float() else before(x, y)
    with FunctionBuilder(name, kind=kind, ret_type=dtype) as builder:
        builder.extend_params([a, b])
        builder.ret(if_then_else(is_first, a, b))
    made: Function = builder.func
    return made


class _Integers(MathFunctionSet):
    """The functions of a dtype of integers on CPUs, of which there are two."""

    def __init__(self, dtype: DataType):
        self._dtype = dtype

    def register(self) -> None:
        for kind in ("max", "min"):
            name = self._name(kind)
            register_primitive_function(name, _extreme_of(name, self._dtype, _first(kind), self._dtype))
        register_math_function_set("cpu", self._dtype.name, self)

    def max(self, a: Expr, b: Expr) -> Expr:
        return self._call("max", a, b)

    def min(self, a: Expr, b: Expr) -> Expr:
        return self._call("min", a, b)

    def _name(self, kind: str) -> str:
        return f"cpu_{self._dtype.short_name}_{kind}"

    def _call(self, kind: str, a: Expr, b: Expr) -> Expr:
        called: Expr = primitive_func_pool.lookup_by_name(self._name(kind)).var(a, b)
        return called


def _by_instruction(name: str, kind: str) -> Function:
    """Make the function for GPUs that have an instruction for it."""
    a, b, extreme = (Var(hint, float32) for hint in ("a", "b", "extreme"))
    with FunctionBuilder(name, kind="cuda_internal", ret_type=float32) as builder:
        builder.extend_params([a, b])
        builder.declare(extreme)
        builder.append(asm(f"{kind}.NaN.f32 %0, %1, %2;", outputs=[extreme], inputs=[a, b]))
        builder.ret(extreme)
    made: Function = builder.func
    return made


def _on_gpus(kind: str) -> Callable[[Any, Expr, Expr], Expr]:
    """Make the method that calls the function for the GPU that is built for."""
    return lambda self, a, b: self.call(f"{kind}_sm80" if hidet.option.cuda.get_arch_pair() >= (8, 0) else kind, a, b)


def _first(kind: str) -> Callable[[Expr, Expr], Expr]:
    return (lambda a, b: LessThan(b, a)) if kind == "max" else LessThan


def _initial_value(self: Any, dtype: DataType | str) -> Any:
    """The extreme of no elements; replaces ``initial_value`` of both reductions."""
    kind = data_type(dtype)
    if kind.is_float():
        return kind(-math.inf if isinstance(self, MaxReduce) else math.inf)
    return hidet_initial_values[type(self)](self, kind)


def _arg_combine(self: Any, lhs_value: Expr, rhs_value: Expr) -> Expr:
    """Whether an element comes before the extreme of those so far; replaces ``arg_combine`` of both reductions."""
    better = _first("max" if isinstance(self, MaxReduce) else "min")(lhs_value, rhs_value)
    if not infer_type(lhs_value).is_float():
        return better
    return LogicalOr(better, LogicalAnd(_is_nan(lhs_value), Equal(rhs_value, rhs_value)))


def _preprocess(x: Any, *args: Any) -> Any:
    """Define the padded operand of a pooling; replaces the method of hidet's task."""
    *sizes, padded = hidet_preprocess(x, *args)
    if args[-1] == "max" and isinstance(padded.value, IfThenElse):
        padded.value.else_expr = MaxReduce().initial_value(x.type.dtype)
    return *sizes, padded


def _import_in_order(self: Any, module: IRModule) -> IRModule:
    """Add the functions that a module calls; replaces ``process_module`` of hidet's pass."""
    complete: IRModule = hidet_import(self, module)
    for name in sorted(complete.functions.keys() - module.functions.keys()):
        complete.functions[name] = complete.functions.pop(name)
    return complete


def install() -> None:
    """Keep NaN and minus infinity from now on, and take extremes of all integers."""
    for kind in ("max", "min"):
        for prefix, dtype in {**_LONG, **_SHORT_ON_CPU}.items():
            name = f"{prefix}_{kind}"
            through = float32 if prefix in _SHORT_ON_CPU else dtype
            primitive_func_pool.name2func[name].function = _extreme_of(name, dtype, _first(kind), through)
        for pattern, intrinsic in _INTRINSICS.items():
            primitive_func_pool.name2func[pattern.format(kind)].codegen_name = intrinsic.format(kind)
        name = f"cuda_f32_{kind}_sm80"
        register_primitive_function(name, _by_instruction(name, kind))
        setattr(CUDAFloat32MathFunctionSet, kind, _on_gpus(kind))
    for dtype in _OTHER_INTEGERS:
        _Integers(dtype).register()
    for reduction in (MaxReduce, MinReduce):
        reduction.initial_value = _initial_value
        reduction.arg_combine = _arg_combine
    PoolNdBaseTask.preprocess = staticmethod(_preprocess)
    ImportPrimitiveFunctionPass.process_module = _import_in_order
