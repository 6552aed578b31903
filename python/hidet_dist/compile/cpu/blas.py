"""Matrix products by OpenBLAS: hidet's generic CPU schedules of them are two orders of magnitude slower.

Float16 and bfloat16 operands are converted to float32 panel by panel, and summed in float32. Where BLAS can express it,
operands are read through the reshapes, permutes and slices before them: its leading dimension and transpose arguments
describe any matrix with one unit stride. So neither a transposed key nor an im2col'ed filter is ever written to memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hidet.graph import Operator, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.transforms import ResolveRule, register_resolve_rule
from hidet.ir.expr import Constant
from hidet.utils import prod

from hidet_dist.compat.native_call import STORE, Values
from hidet_dist.compile.cpu.active import is_active, known_kernels
from hidet_dist.compile.cpu.tiled import ELEMENT_TYPES, Epilogue, TiledOp
from hidet_dist.compile.cpu.views import View, contiguous, view_of
from hidet_dist.rewriting import copy_operator
from hidet_dist.spec.extents import Extent, extents_of, factors_of, same_extent

_INT_MAX = 2**31 - 1  # BLAS counts with 32 bit integers


@dataclass(frozen=True)
class Operand:
    """A stack of matrices in memory: its strides, whether the matrices are transposed, and the leading dimension."""

    batch_strides: tuple[Extent, ...]
    transposed: bool
    leading: Extent
    offset: Extent


class BlasMatmulOp(TiledOp):
    """``c[..., m, n] = a[..., m, k] @ b[..., k, n]``, summed in float32, with operands that BLAS can read in place.

    Parameters
    ----------
    a, b: Tensor
        The memory of the operands, in any shape: float32, float16 or bfloat16. ``others`` are the epilogue's inputs.
    operands: sequence of (batch_strides, transposed, leading, offset)
        The access to ``a`` and ``b``, in elements: numbers, or expressions of symbolic dims.
    product: sequence of int or expression
        The shape of the stack of products.
    shape: sequence of int or expression
        The shape of ``c``: that of the products, or another one with the same number of elements and the same last dim.
    k: int or expression
        The length of the products.
    epilogue: Epilogue, optional
        The computation on each element of ``c``.
    """

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        *others: Tensor,
        operands: Sequence[Sequence[Any]],
        product: Sequence[Extent],
        shape: Sequence[Extent],
        k: Extent,
        epilogue: Epilogue | None = None,
    ):
        left, right = operands_of(operands)
        stores = epilogue is not None or a.dtype.name != "float32"
        text = Values()
        statement = product_statement(
            "matmul", left, right, product, k, (ELEMENT_TYPES[a.dtype.name],) * 2, stores, text
        )
        super().__init__(
            "matmul",
            a,
            b,
            others,
            shape,
            len(shape) - 1,
            "matmul.h",
            statement,
            text.values,
            stores,
            epilogue,
            {"operands": [list(o) for o in operands], "product": list(product), "shape": list(shape), "k": k},
        )
        self.name = "BlasMatmul"

    def reshaped(self, shape: Sequence[Extent]) -> dict[str, Any] | None:
        """Accept any shape with the same number of elements and the same length of rows."""
        if len(shape) < 2 or not same_extent(shape[-1], self.attrs["shape"][-1]):
            return None
        return {"shape": list(shape)}


def operands_of(operands: Sequence[Sequence[Any]]) -> tuple[Operand, Operand]:
    """Read the attribute ``operands`` of a product: the access to the left and the right operand."""
    left, right = (Operand(tuple(o[0]), bool(o[1]), _plain_int(o[2]), _plain_int(o[3])) for o in operands)
    return left, right


def _plain_int(value: Any) -> Extent:
    return int(value) if isinstance(value, Constant) else value


def product_statement(
    function: str,
    left: Operand,
    right: Operand,
    product: Sequence[Extent],
    k: Extent,
    elements: tuple[str, str],
    stores: bool,
    text: Values,
) -> str:
    """Write the call of a function of ``hidet_dist::kernels`` that multiplies two stacks of matrices."""
    *stack, m, n = product
    statement = [
        text.array("sizes", stack),
        text.array("left_steps", left.batch_strides),
        text.array("right_steps", right.batch_strides),
        f"const hidet_dist::kernels::Product product = {{{{ {len(stack)}, sizes, {text(m)}, {text(n)}, {text(k)} }}}};",
    ]
    for name, operand, element in zip(("left", "right"), (left, right), elements, strict=True):
        transposed = "true" if operand.transposed else "false"
        statement.append(
            f"const hidet_dist::kernels::Matrices<{element}> {name} = {{{{ (const {element} *)({{}}) + "
            f"{text(operand.offset)}, {transposed}, {text(operand.leading)}, {name}_steps }}}};"
        )
    statement.append(f"hidet_dist::kernels::{function}(left, right, product, {STORE if stores else '(float *)({})'});")
    return " ".join(statement)


@register_resolve_rule(MatmulOp)
class _BlasRule(ResolveRule):
    def resolve(self, op: Operator) -> list[Tensor] | None:
        dtype = op.outputs[0].dtype
        if not is_active(op) or dtype.name not in ELEMENT_TYPES:
            return None
        if any(x.dtype != dtype or len(x.shape) < 2 for x in op.inputs):
            return None
        shape = extents_of(op.outputs[0])
        # Read through the operators before an operand if BLAS can; the operand itself can always be read.
        lefts, rights = ([view_of(x), contiguous(x)] for x in op.inputs)
        if op.attrs["transpose_b"]:
            rights = [_transposed(right) for right in rights]
        for left, right in itertools.product(lefts, rights):
            for product in _products(left, right, shape):
                how = [_operand(view, product.shape[:-2]) for view in (product.left, product.right)]
                if None not in how:
                    return [_build(product, [o for o in how if o is not None], shape)]
        return None


@dataclass(frozen=True)
class _Product:
    left: View
    right: View
    shape: tuple[Extent, ...]


def _products(left: View, right: View, shape: tuple[Extent, ...]) -> Iterator[_Product]:
    """Yield forms of the product: first a single tall product where a stack is multiplied by one matrix."""
    rows = prod(shape[:-1])
    if same_extent(prod(right.shape[:-2]), 1) and same_extent(prod(left.shape[:-1]), rows):
        tall, flat = left.reshaped((rows, left.shape[-1])), right.reshaped(right.shape[-2:])
        if tall is not None and flat is not None:
            yield _Product(tall, flat, (rows, shape[-1]))
    yield _Product(left, right, shape)


def _build(product: _Product, operands: Sequence[Operand], shape: tuple[Extent, ...]) -> Tensor:
    how = [[list(o.batch_strides), o.transposed, o.leading, o.offset] for o in operands]
    sources, k, known = (product.left.source, product.right.source), product.left.shape[-1], known_kernels()
    types = [(x.dtype.name, str(x.device), extents_of(x)) for x in sources]
    key = (BlasMatmulOp, str([*types, how, product.shape, shape, k]))
    if key not in known:
        y = BlasMatmulOp(*sources, operands=how, product=list(product.shape), shape=list(shape), k=k).outputs[0]
        known[key] = y.op
        return y
    return copy_operator(known[key], sources)[0]


def _operand(view: View, batch: tuple[Extent, ...]) -> Operand | None:
    """Describe a view, its leading dims broadcast to ``batch``, as an operand of BLAS; None if BLAS cannot read it."""
    *stack, rows, columns = view.shape
    *steps, down, across = view.strides
    missing = len(batch) - len(stack)
    strides = (0,) * missing + tuple(0 if _is_one(size) else step for size, step in zip(stack, steps, strict=True))
    # The stride of a dim of one entry is never used, so any value will do.
    if _is_one(across) or _is_one(columns):
        leading = columns if _is_one(rows) else down
        if _covers(leading, columns):
            return Operand(strides, False, leading, view.offset)
    if _is_one(down) or _is_one(rows):
        leading = rows if _is_one(columns) else across
        if _covers(leading, rows):
            return Operand(strides, True, leading, view.offset)
    return None


def _is_one(value: Extent) -> bool:
    return isinstance(value, int) and value == 1


def _covers(leading: Extent, extent: Extent) -> bool:
    """Whether BLAS accepts a leading dimension for rows of ``extent``, for all sizes >= 1 of symbolic dims."""
    if isinstance(leading, int) and isinstance(extent, int):
        return extent <= leading <= _INT_MAX
    number, symbols = _split(leading)
    at_most, among = _split(extent)
    for symbol in among:
        if symbol not in symbols:
            return False
        symbols.remove(symbol)
    return at_most <= number


def _split(extent: Extent) -> tuple[int, list[str]]:
    """Split a product into its number and its other factors."""
    factors = factors_of(extent)
    number = prod([factor for factor in factors if isinstance(factor, int)])
    return number, [str(factor) for factor in factors if not isinstance(factor, int)]


def _transposed(view: View) -> View:
    def swapped(values: tuple[Extent, ...]) -> tuple[Extent, ...]:
        return (*values[:-2], values[-1], values[-2])

    return View(view.source, swapped(view.shape), swapped(view.strides), view.offset)
