"""Products that are computed tile by tile, with an epilogue on each element of a tile while it is written."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hidet.graph import Tensor
from hidet.graph.ops.utils import TensorInput
from hidet.ir.dtypes import float32, int64
from hidet.ir.expr import Call, Constant, Div, Expr, Multiply, TensorElement, Var, cast, tensor_element
from hidet.ir.func import Function
from hidet.ir.functors import IRRewriter
from hidet.ir.stmt import BufferStoreStmt, ForStmt, ForStmtAttr, LetStmt
from hidet.ir.tools import collect, infer_type, simplify
from hidet.ir.type import PointerType, VoidType, data_type
from hidet.utils import prod

from hidet_dist import native
from hidet_dist.compat.native_call import STORE, NativeCall, NativeCallOp, call_native
from hidet_dist.compile.cpu.kernels.lowering import (
    LOGISTIC,
    OWN_FUNCTIONS,
    POWERS,
    TIMES_LOGISTIC,
    logistic_argument,
    logistic_product,
)
from hidet_dist.runtime.openblas import openblas_dir
from hidet_dist.spec.extents import Extent, same_shape
from hidet_dist.weights.panels import FEW_BITS

ELEMENT_TYPES = {
    "float32": "float",
    "float16": "hidet_dist::kernels::Float16",
    "bfloat16": "hidet_dist::kernels::BFloat16",
}
"""The kernels' names of the dtypes that they multiply."""


@dataclass(frozen=True)
class Epilogue:
    """The computation from an element of a product to the written element.

    Attributes
    ----------
    axes: the indices of the element, one per dim.
    value: the element, a float32.
    inputs: the tensors that the steps read besides.
    steps: variables and their values, each in terms of the axes, the inputs, and earlier variables.
    dtype: the dtype of the output.
    """

    axes: tuple[Var, ...]
    value: Var
    inputs: tuple[TensorInput, ...]
    steps: tuple[tuple[Var, Expr], ...]
    dtype: str


class TiledOp(NativeCallOp):
    """A product of tensors as a matrix that is cut into tiles; ``row_dims`` leading dims are its rows.

    Parameters
    ----------
    kernel: str
        A word for the kernel's computation.
    a, b: Tensor
        The operands; ``others`` are the epilogue's inputs.
    shape: sequence of int or expression
        The shape of the output.
    row_dims: int
        The number of its leading dims that make the rows; the others make the columns.
    statement: str
        The C++ statement that calls a function of ``header``, with ``values``; see :class:`NativeCall`. Without an
        epilogue it writes to the output itself unless ``stores``.
    epilogue: Epilogue, optional
        The computation on each element.
    attributes: dict
        The other arguments of the operator's class.
    further: sequence of Tensor
        Operands behind the two.

    Attributes
    ----------
    calls_openblas: whether the kernel needs OpenBLAS.
    """

    calls_openblas: ClassVar[bool] = True

    def __init__(
        self,
        kernel: str,
        a: Tensor,
        b: Tensor,
        others: Sequence[Tensor],
        shape: Sequence[Extent],
        row_dims: int,
        header: str,
        statement: str,
        values: dict[str, Extent],
        stores: bool,
        epilogue: Epilogue | None,
        attributes: dict[str, Any],
        further: Sequence[Tensor] = (),
    ):
        self.row_dims = row_dims
        store = store_of(shape, row_dims, epilogue or identity_epilogue(len(shape), a.dtype)) if stores else None
        headers = (f"hidet_dist/kernels/{header}", "hidet_dist/kernels/functions.h")
        parts = [statement, str(store), headers_digest(), *(f"{name}={value}" for name, value in values.items())]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        call = NativeCall(
            statement,
            headers,
            (str(native.include_dir()),),
            str(openblas_dir() / "lib") if self.calls_openblas else None,
            "scipy_openblas" if self.calls_openblas else None,
            values,
            store,
            2 + len(further),
        )
        inputs = {"a": a, "b": b, **{f"operand{number}": x for number, x in enumerate(further)}}
        inputs.update({f"other{number}": x for number, x in enumerate(others)})
        super().__init__(
            f"hidet_dist_{kernel}_{digest}",
            inputs,
            shape,
            call,
            {**attributes, "epilogue": epilogue},
            epilogue.dtype if epilogue else None,
        )

    def reshaped(self, shape: Sequence[Extent]) -> dict[str, Any] | None:
        """Return the attributes of an operator with the same elements in this shape; None if there is none."""
        return None


@functools.cache
def headers_digest() -> str:
    """Digest the headers that kernels include: hidet caches compiled kernels by their names."""
    digest = hashlib.sha256()
    for path in sorted((native.include_dir() / "hidet_dist" / "kernels").glob("*.h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def identity_epilogue(dims: int, dtype: Any) -> Epilogue:
    """Make the epilogue that writes each element of a tensor of ``dims`` dims unchanged, in ``dtype``."""
    return Epilogue(tuple(Var(f"i{dim}", int64) for dim in range(dims)), Var("value", float32), (), (), dtype.name)


def wide(dtype: Any) -> Any:
    """Return the dtype in which a dtype is computed: half-precision values are rounded once, when they are written."""
    return float32 if dtype.name in ("float16", "bfloat16") else dtype


class NotInOrder(Exception):
    """An index that is not an axis of the loop over a tile."""


def store_of(shape: Sequence[Extent], row_dims: int, epilogue: Epilogue) -> Function:
    """Build the loop that writes a tile. Raises NotInOrder if an epilogue's input is not laid out as the output."""
    tile, ld, first_row, rows, first_column, columns = (
        Var("tile", ~float32),
        *(Var(name, int64) for name in ("ld", "first_row", "rows", "first_column", "columns")),
    )
    result = Var("result", PointerType(data_type(epilogue.dtype)))
    inputs = {x: Var(x.name, PointerType(x.type.dtype)) for x in epilogue.inputs}
    i, j, row, column = (Var(name, int64) for name in ("i", "j", "row", "column"))
    width = prod([int64(1), *(int64(size) for size in shape[row_dims:])])
    # The row has separate indices; the dims of the columns have one index together.
    names: list[Var] = []
    values: list[Expr] = []
    rest: Expr = row
    for dim in reversed(range(row_dims)):
        names.append(epilogue.axes[dim])
        values.append(rest % int64(shape[dim]) if dim else rest)
        rest = rest / int64(shape[dim])
    flat = _Flat(shape, row_dims, epilogue, inputs, row, column, width)
    steps = [(name, flat.visit(value)) for name, value in epilogue.steps]
    last = steps[-1][0] if steps else epilogue.value
    out_type = data_type(epilogue.dtype)
    written = last if last.type == out_type else cast(last, out_type)
    inner = LetStmt(
        [column, epilogue.value, *(name for name, _ in steps)],
        [first_column + j, tensor_element(tile, [i * ld + j]), *(value for _, value in steps)],
        BufferStoreStmt(result, [row * width + column], written),
    )
    body = LetStmt([row], [first_row + i], LetStmt(names, values, ForStmt(j, columns, inner, attr=ForStmtAttr())))
    return Function(
        STORE,
        [tile, ld, first_row, rows, first_column, columns, result, *inputs.values()],
        ForStmt(i, rows, body, attr=ForStmtAttr()),
        VoidType(),
        "cpu_kernel",
    )


def follows(indices: Sequence[Expr], axes: Sequence[Var], shape: Sequence[Extent]) -> bool:
    """Whether indices are the axes of a shape; along a dim of one entry, 0 counts as the axis."""
    return len(indices) == len(axes) and all(
        index is axis or (isinstance(size, int) and size == 1 and isinstance(index, Constant) and int(index) == 0)
        for index, axis, size in zip(indices, axes, shape, strict=True)
    )


class _Flat(IRRewriter):
    """Rewrites elements of tensors to elements of linear memory."""

    def __init__(
        self,
        shape: Sequence[Extent],
        row_dims: int,
        epilogue: Epilogue,
        inputs: dict[TensorInput, Var],
        row: Var,
        column: Var,
        width: Expr,
    ):
        super().__init__()
        self.shape = list(shape)
        self.row_dims = row_dims
        self.axes = list(epilogue.axes)
        self.inputs, self.row, self.column, self.width = inputs, row, column, width

    def visit_Var(self, v: Var) -> Var:
        if v in self.axes[self.row_dims :]:
            raise NotInOrder
        return v

    def visit_Div(self, e: Div) -> Expr:
        argument = logistic_argument(e)
        if argument is None or infer_type(argument) != float32:
            return super().visit_Div(e)
        return call_native(LOGISTIC, self.visit(argument))

    def visit_Multiply(self, e: Multiply) -> Expr:
        product = logistic_product(e)
        if product is None or any(infer_type(factor) != float32 for factor in product):
            return super().visit_Multiply(e)
        return call_native(TIMES_LOGISTIC, *(self.visit(factor) for factor in product))

    def visit_Call(self, e: Call) -> Expr:
        arguments = [self.visit(argument) for argument in e.args]
        if all(infer_type(argument) == float32 for argument in e.args):
            name = str(e.func_var.name or e.func_var.hint).removeprefix("generic_")
            power = arguments[1] if name == "pow" else None
            if isinstance(power, Constant) and float(power.value) in POWERS:
                return call_native(POWERS[float(power.value)], arguments[0])
            if name in OWN_FUNCTIONS:
                return call_native(f"hd::{name}", *arguments)
        return super().visit_Call(e)

    def visit_TensorElement(self, e: TensorElement) -> Expr:
        indices = [simplify(index) for index in e.indices]
        extents = [int(size) if isinstance(size, Constant) else size for size in e.base.type.shape]
        ours = self.axes[self.row_dims :]
        inner = len(ours)
        along = [index for index in indices if any(axis in ours for axis in collect(index, Var))]
        offset: Expr = int64(0)
        if along:
            wide = self.shape[self.row_dims :]
            if not follows(indices[-inner:], ours, wide) or not same_shape(extents[-inner:], wide):
                raise NotInOrder
            indices, extents = indices[:-inner], extents[:-inner]
            if any(axis in ours for index in indices for axis in collect(index, Var)):
                raise NotInOrder
            rows = self.shape[: self.row_dims]
            if follows(indices, self.axes[: len(rows)], rows) and same_shape(extents, rows):
                return tensor_element(self.inputs[e.base], [self.row * self.width + self.column])
            offset = self.column
        stride: Expr = self.width if along else int64(1)
        for index, size in zip(reversed(indices), reversed(extents), strict=True):
            if not (isinstance(index, Constant) and int(index) == 0):
                offset = offset + int64(index) * stride
            stride = stride * int64(size)
        return tensor_element(self.inputs[e.base], [offset])


def quantized_parameters(width: int, precision: str, group: int) -> str:
    """Write the parameters of templates that multiply by panels of few bits."""
    few = FEW_BITS[precision]
    scales = ("SYMMETRIC", "AFFINE", "WIDE", "WIDE_AFFINE")[few.affine + 2 * few.wide]
    return f"{width}, {few.bits}, {group}, HIDET_DIST_{scales}"
