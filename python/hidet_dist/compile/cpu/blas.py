"""Matrix products by OpenBLAS: hidet's generic CPU schedules of them are two orders of magnitude slower.

The operands are read through the reshapes, permutes and slices before them wherever BLAS can: a matrix with one unit
stride is what its leading dimension and transpose arguments describe, so that neither a transposed key nor an im2col'ed
filter is ever written out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hidet
from hidet.graph import Operator, PassContext, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.transforms import ResolveRule, register_resolve_rule

from hidet_dist.compat.native_call import NativeCall, NativeCallOp
from hidet_dist.compile.cpu.views import View, view_of
from hidet_dist.runtime.openblas import openblas_dir

_SWITCH = "hidet_dist.blas"
_INT_MAX = 2**31 - 1  # BLAS counts with 32 bit integers


@dataclass(frozen=True)
class Operand:
    """A stack of matrices in memory: strides of the stack's dims, whether they lie transposed, leading dimension."""

    batch_strides: tuple[int, ...]
    transposed: bool
    leading: int
    offset: int


class BlasMatmulOp(NativeCallOp):
    """``c[..., m, n] = a[..., m, k] @ b[..., k, n]`` in float32, for operands that BLAS can read as they lie.

    Parameters
    ----------
    a, b: Tensor
        The memory of the operands, in whatever shape.
    operands: sequence of (batch_strides, transposed, leading, offset)
        How ``a`` and ``b`` are read, in elements.
    shape: sequence of int
        The shape of ``c``.
    k: int
        The length of the products.
    """

    def __init__(self, a: Tensor, b: Tensor, operands: Sequence[Sequence[Any]], shape: Sequence[int], k: int):
        left, right = (Operand(tuple(o[0]), bool(o[1]), int(o[2]), int(o[3])) for o in operands)
        how = "_".join(
            f"{'t' if o.transposed else 'n'}{o.leading}o{o.offset}s{'x'.join(map(str, o.batch_strides))}"
            for o in (left, right)
        )
        folder = openblas_dir()
        super().__init__(
            f"hidet_dist_sgemm_k{k}_{how}",
            {"a": a, "b": b},
            shape,
            NativeCall(
                _sgemm(left, right, shape, k), "cblas.h", str(folder / "include"), str(folder / "lib"), "scipy_openblas"
            ),
            {"operands": [list(o) for o in operands], "shape": list(shape), "k": k},
        )
        self.name = "BlasMatmul"


def _sgemm(left: Operand, right: Operand, shape: Sequence[int], k: int) -> str:
    """Loops over the stack around one call of sgemm."""
    *batch, m, n = shape
    loops = "".join(f"for (int64_t i{d} = 0; i{d} < {size}; ++i{d}) " for d, size in enumerate(batch))
    strides = [math.prod(shape[d + 1 :]) for d in range(len(batch))]

    def address(constant: int, steps: Sequence[int]) -> str:
        return f"{{}} + {constant}" + "".join(f" + i{d} * INT64_C({step})" for d, step in enumerate(steps) if step)

    flags = ", ".join("CblasTrans" if o.transposed else "CblasNoTrans" for o in (left, right))
    return (
        f"{loops}scipy_cblas_sgemm(CblasRowMajor, {flags}, {m}, {n}, {k}, 1.0f, "
        f"(const float *){address(left.offset, left.batch_strides)}, {left.leading}, "
        f"(const float *){address(right.offset, right.batch_strides)}, {right.leading}, 0.0f, "
        f"(float *){address(0, strides)}, {n});"
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
        shape = tuple(int(size) for size in op.outputs[0].shape)
        # Through what lies before an operand if BLAS can read it so, or else as it is, which it always can.
        lefts, rights = ([view_of(x), _plain(x)] for x in op.inputs)
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
    shape: tuple[int, ...]


def _products(left: View, right: View, shape: tuple[int, ...]) -> Iterator[_Product]:
    """The product, first as one tall one where a stack is multiplied by a single matrix."""
    rows = math.prod(shape[:-1])
    if math.prod(right.shape[:-2]) == 1 and math.prod(left.shape[:-1]) == rows:
        tall, flat = left.reshaped((rows, left.shape[-1])), right.reshaped(right.shape[-2:])
        if tall is not None and flat is not None:
            yield _Product(tall, flat, (rows, shape[-1]))
    yield _Product(left, right, shape)


def _build(product: _Product, operands: Sequence[Operand], shape: tuple[int, ...]) -> Tensor:
    how = [[list(o.batch_strides), o.transposed, o.leading, o.offset] for o in operands]
    left, right = product.left, product.right
    c = BlasMatmulOp(left.source, right.source, how, list(product.shape), left.shape[-1]).outputs[0]
    return c if product.shape == shape else hidet.ops.reshape(c, list(shape))


def _operand(view: View, batch: tuple[int, ...]) -> Operand | None:
    """How BLAS reads a view, its leading dims broadcast to ``batch``; None where it cannot."""
    *stack, rows, columns = view.shape
    *steps, down, across = view.strides
    missing = len(batch) - len(stack)
    strides = (0,) * missing + tuple(0 if size == 1 else step for size, step in zip(stack, steps, strict=True))
    # A stride along one entry is never taken, so it may be whatever suits.
    if across == 1 or columns == 1:
        leading = columns if rows == 1 else down
        if columns <= leading <= _INT_MAX:
            return Operand(strides, False, leading, view.offset)
    if down == 1 or rows == 1:
        leading = rows if columns == 1 else across
        if rows <= leading <= _INT_MAX:
            return Operand(strides, True, leading, view.offset)
    return None


def _plain(x: Tensor) -> View:
    shape = tuple(int(size) for size in x.shape)
    return View(x, shape, tuple(math.prod(shape[d + 1 :]) for d in range(len(shape))), 0)


def _transposed(view: View) -> View:
    def swapped(values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values[:-2], values[-1], values[-2])

    return View(view.source, swapped(view.shape), swapped(view.strides), view.offset)
