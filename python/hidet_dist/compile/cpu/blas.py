"""Matrix products by OpenBLAS: hidet's generic CPU schedules of them are two orders of magnitude slower.

The operands are read through the reshapes, permutes and slices before them wherever BLAS can: a matrix with one unit
stride is what its leading dimension and transpose arguments describe, so that neither a transposed key nor an im2col'ed
filter is ever written out.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hidet
from hidet.graph import Operator, PassContext, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.transforms import ResolveRule, register_resolve_rule
from hidet.ir.expr import Constant
from hidet.utils import prod

from hidet_dist.compat.native_call import NativeCall, NativeCallOp
from hidet_dist.compile.cpu.views import View, contiguous, view_of
from hidet_dist.runtime.openblas import openblas_dir
from hidet_dist.symbolic.extents import Extent, extents_of, factors_of, same_extent, same_shape

_SWITCH = "hidet_dist.blas"
_INT_MAX = 2**31 - 1  # BLAS counts with 32 bit integers


@dataclass(frozen=True)
class Operand:
    """A stack of matrices in memory: strides of the stack's dims, whether they lie transposed, leading dimension."""

    batch_strides: tuple[Extent, ...]
    transposed: bool
    leading: Extent
    offset: Extent


class BlasMatmulOp(NativeCallOp):
    """``c[..., m, n] = a[..., m, k] @ b[..., k, n]`` in float32, for operands that BLAS can read as they lie.

    Parameters
    ----------
    a, b: Tensor
        The memory of the operands, in whatever shape.
    operands: sequence of (batch_strides, transposed, leading, offset)
        How ``a`` and ``b`` are read, in elements: numbers, or expressions of symbolic dims.
    shape: sequence of int or expression
        The shape of ``c``.
    k: int or expression
        The length of the products.
    """

    def __init__(self, a: Tensor, b: Tensor, operands: Sequence[Sequence[Any]], shape: Sequence[Extent], k: Extent):
        left, right = (Operand(tuple(o[0]), bool(o[1]), _plain_int(o[2]), _plain_int(o[3])) for o in operands)
        how = "_".join(
            f"{'t' if o.transposed else 'n'}{o.leading}o{o.offset}s{'x'.join(map(str, o.batch_strides))}"
            for o in (left, right)
        )
        folder = openblas_dir()
        values: dict[str, Extent] = {}
        statement = _sgemm(left, right, shape, k, values)
        super().__init__(
            f"hidet_dist_sgemm_{_name(f'k{k}_{how}')}",
            {"a": a, "b": b},
            shape,
            NativeCall(statement, "cblas.h", str(folder / "include"), str(folder / "lib"), "scipy_openblas", values),
            {"operands": [list(o) for o in operands], "shape": list(shape), "k": k},
        )
        self.name = "BlasMatmul"


def _plain_int(value: Any) -> Extent:
    return int(value) if isinstance(value, Constant) else value


def _name(how: str) -> str:
    """A name for a file and a function: expressions of symbolic dims are not."""
    return how if how.replace("_", "").isalnum() else hashlib.sha256(how.encode()).hexdigest()[:16]


def _sgemm(left: Operand, right: Operand, shape: Sequence[Extent], k: Extent, values: dict[str, Extent]) -> str:
    """Loops over the stack around one call of sgemm. Expressions that it uses are put in ``values``, by name."""

    def text(value: Extent) -> str:
        if isinstance(value, int):
            return str(value)
        return next((name for name, known in values.items() if known is value), None) or added(value)

    def added(value: Extent) -> str:
        name = f"v{len(values)}"
        values[name] = value
        return name

    *batch, m, n = shape
    loops = "".join(f"for (int64_t i{d} = 0; i{d} < {text(size)}; ++i{d}) " for d, size in enumerate(batch))
    strides = [prod(shape[d + 1 :]) for d in range(len(batch))]

    def address(constant: Extent, steps: Sequence[Extent]) -> str:
        moves = "".join(
            f" + i{d} * INT64_C({step})" if isinstance(step, int) else f" + i{d} * {text(step)}"
            for d, step in enumerate(steps)
            if not (isinstance(step, int) and step == 0)
        )
        return f"{{}} + {text(constant)}{moves}"

    flags = ", ".join("CblasTrans" if o.transposed else "CblasNoTrans" for o in (left, right))
    return (
        f"{loops}scipy_cblas_sgemm(CblasRowMajor, {flags}, {text(m)}, {text(n)}, {text(k)}, 1.0f, "
        f"(const float *){address(left.offset, left.batch_strides)}, {text(left.leading)}, "
        f"(const float *){address(right.offset, right.batch_strides)}, {text(right.leading)}, 0.0f, "
        f"(float *){address(0, strides)}, {text(n)});"
    )


@contextmanager
def blas_matmuls() -> Iterator[None]:
    """Resolve matrix products on the CPU to OpenBLAS while the block runs."""
    current = PassContext.current()
    with PassContext() as context:
        context.instruments = current.instruments
        context.configs = {**current.configs, _SWITCH: True}
        yield


@register_resolve_rule(MatmulOp)
class _BlasRule(ResolveRule):
    def resolve(self, op: Operator) -> list[Tensor] | None:
        if not self.get_config(_SWITCH, False) or op.build_target != "cpu":
            return None
        if op.inputs[0].dtype.name != "float32" or any(len(x.shape) < 2 for x in op.inputs):
            return None
        shape = extents_of(op.outputs[0])
        # Through what lies before an operand if BLAS can read it so, or else as it is, which it always can.
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
    """The product, first as one tall one where a stack is multiplied by a single matrix."""
    rows = prod(shape[:-1])
    if same_extent(prod(right.shape[:-2]), 1) and same_extent(prod(left.shape[:-1]), rows):
        tall, flat = left.reshaped((rows, left.shape[-1])), right.reshaped(right.shape[-2:])
        if tall is not None and flat is not None:
            yield _Product(tall, flat, (rows, shape[-1]))
    yield _Product(left, right, shape)


def _build(product: _Product, operands: Sequence[Operand], shape: tuple[Extent, ...]) -> Tensor:
    how = [[list(o.batch_strides), o.transposed, o.leading, o.offset] for o in operands]
    left, right = product.left, product.right
    c = BlasMatmulOp(left.source, right.source, how, list(product.shape), left.shape[-1]).outputs[0]
    return c if same_shape(product.shape, shape) else hidet.ops.reshape(c, list(shape))


def _operand(view: View, batch: tuple[Extent, ...]) -> Operand | None:
    """How BLAS reads a view, its leading dims broadcast to ``batch``; None where it cannot."""
    *stack, rows, columns = view.shape
    *steps, down, across = view.strides
    missing = len(batch) - len(stack)
    strides = (0,) * missing + tuple(0 if _is_one(size) else step for size, step in zip(stack, steps, strict=True))
    # A stride along one entry is never taken, so it may be whatever suits.
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
    """Whether BLAS takes a leading dimension for rows of ``extent``: whatever the sizes of symbolic dims, all >= 1."""
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
    """A product's number, and its other factors."""
    factors = factors_of(extent)
    number = prod([factor for factor in factors if isinstance(factor, int)])
    return number, [str(factor) for factor in factors if not isinstance(factor, int)]


def _transposed(view: View) -> View:
    def swapped(values: tuple[Extent, ...]) -> tuple[Extent, ...]:
        return (*values[:-2], values[-1], values[-2])

    return View(view.source, swapped(view.shape), swapped(view.strides), view.offset)
