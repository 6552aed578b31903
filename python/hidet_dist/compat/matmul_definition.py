"""hidet 0.6.1 defines products with a transposed operand wrongly: each operand is indexed with the other one's index.

``matmul_nt(a, b)[i, j]`` is written as ``sum_k a[i, k] * b[i, k]``, for ``b[j, k]``. CUDA kernels do not go by the
definition; the generic CPU kernel does, and so do the sharding rules. It is set right for the whole process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hidet.ir.compute import TensorNode, compute, cops, reduce
from hidet.ir.expr import is_constant
from hidet.ir.utils import broadcast_indices, broadcast_shape

hidet_matmul = cops.matmul


def matmul(a: TensorNode, b: TensorNode, allow_1d: bool = False, ta: bool = False, tb: bool = False) -> TensorNode:
    """The definition of ``a @ b``, the last two dims of a (``ta``) or b (``tb``) swapped."""
    if not (ta or tb) or len(a.shape) < 2 or len(b.shape) < 2:
        return hidet_matmul(a, b, allow_1d=allow_1d, ta=ta, tb=tb)
    m, k = _swapped(a.shape[-2:], ta)
    other_k, n = _swapped(b.shape[-2:], tb)
    if is_constant(k, other_k) and int(k) != int(other_k):
        raise ValueError(f"Cannot multiply matrices with shape {a.shape} and {b.shape}.")
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])

    def element(*indices: Any) -> Any:
        *stack, row, column = indices

        def product(inner: Any) -> Any:
            left = broadcast_indices(stack, a.shape[:-2], batch) + _swapped([row, inner], ta)
            right = broadcast_indices(stack, b.shape[:-2], batch) + _swapped([inner, column], tb)
            return a[left] * b[right]

        return reduce([k], product, "sum")

    return compute("c", [*batch, m, n], element)


def _swapped(pair: Sequence[Any], swap: bool) -> list[Any]:
    return list(reversed(pair)) if swap else list(pair)


def install() -> None:
    """Use the right definition from now on."""
    cops.matmul = matmul
