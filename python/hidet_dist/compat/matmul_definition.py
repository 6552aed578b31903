"""hidet 0.6.1 defines two kinds of matrix products wrongly; both are corrected for the whole process.

* Products with a transposed operand: each operand is indexed with the other one's index. ``matmul_nt(a, b)[i, j]`` is
  written as ``sum_k a[i, k] * b[i, k]``, for ``b[j, k]``.
* Products of a vector: ``a[k] @ b[k, n]`` has the shape ``[k]`` instead of ``[n]``, and with ``b`` transposed the
  extents that must agree are compared with the wrong dim.

CUDA kernels do not follow the first kind's definition. The generic CPU kernel and the sharding rules do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet.ir.compute import TensorNode, compute, cops, reduce
from hidet.ir.expr import is_constant
from hidet.ir.utils import broadcast_indices, broadcast_shape

hidet_matmul = cops.matmul


def matmul(a: TensorNode, b: TensorNode, allow_1d: bool = False, ta: bool = False, tb: bool = False) -> TensorNode:
    """Define ``a @ b`` as ``numpy.matmul`` does, the last two dims of a (``ta``) or b (``tb``) swapped.

    A vector is a row as the first operand and a column as the second; that dim is not in the result.

    Raises
    ------
    ValueError
        When both operands are vectors, one is though not allowed or is to be transposed, or the extents to sum
        over differ.
    """
    row, column = len(a.shape) == 1, len(b.shape) == 1
    if len(a.shape) < 1 or len(b.shape) < 1 or (row and column) or ((row or column) and not allow_1d):
        return hidet_matmul(a, b, allow_1d=allow_1d, ta=ta, tb=tb)  # raises the error
    if not (row or column or ta or tb):
        return hidet_matmul(a, b, allow_1d=allow_1d)
    if (row and ta) or (column and tb):
        raise ValueError(f"A vector cannot be transposed: the operands have the shapes {a.shape} and {b.shape}.")
    m, k = (None, a.shape[0]) if row else _swapped(a.shape[-2:], ta)
    other_k, n = (b.shape[0], None) if column else _swapped(b.shape[-2:], tb)
    if is_constant(k, other_k) and int(k) != int(other_k):
        raise ValueError(f"Cannot multiply matrices with shape {a.shape} and {b.shape}.")
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])

    def element(*indices: Any) -> Any:
        stack, rest = list(indices[: len(batch)]), list(indices[len(batch) :])

        def product(inner: Any) -> Any:
            left = [inner] if row else _swapped([rest[0], inner], ta)
            right = [inner] if column else _swapped([inner, rest[-1]], tb)
            return (
                a[broadcast_indices(stack, a.shape[:-2], batch) + left]
                * b[broadcast_indices(stack, b.shape[:-2], batch) + right]
            )

        return reduce([k], product, "sum")

    return compute("c", [*batch, *(extent for extent in (m, n) if extent is not None)], element)


def _swapped(pair: Sequence[Any], swap: bool) -> list[Any]:
    return list(reversed(pair)) if swap else list(pair)


def install() -> None:
    """Use the corrected definition from now on."""
    cops.matmul = matmul
