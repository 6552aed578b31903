"""hidet 0.6.1 cannot fuse what reads a tensor, such as a bias, behind a product on tensor cores as it means to.

It loads the tensor's tile into registers as the result lies in them, and then asks for the type of a view of those
registers, which it has no answer for. It warns of "fallback", and writes the result element by element instead. With
the answer, both are read and written 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hidet.ir.cute.layout import TiledTensorLayout
from hidet.ir.cute.ops.tensor import TensorView
from hidet.ir.cute.type import TiledTensorType, tiled_tensor

from hidet_dist.compat.replacing import replaced

_infer_type = TensorView.infer_type


def infer_type(self: TensorView, arg_types: list[Any]) -> Any:
    """The type of a view; of registers too, whose elements are as many in each thread."""
    (x,) = arg_types
    there = x.layout if isinstance(x, TiledTensorType) else None
    if isinstance(there, TiledTensorLayout) and isinstance(self.layout, TiledTensorLayout):
        before, after = there.val_count(), self.layout.val_count()
        if before != after:
            raise TypeError(f"A view of {before} elements of each thread cannot have {after}.")
        return tiled_tensor(x.dtype, self.layout, self.scope)
    return _infer_type(self, arg_types)


@contextmanager
def fused_operands() -> Iterator[None]:
    """Let hidet fuse what reads tensors behind products on tensor cores while the block runs."""
    with replaced(TensorView, {"infer_type": infer_type}):
        yield
