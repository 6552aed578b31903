"""hidet 0.6.1 fails to fuse an operator that reads another tensor, such as a bias, with a product on tensor cores.

It loads the tensor's tile into registers in the layout of the result, and then fails to infer the type of a view of
these registers. So it warns of "fallback", and writes the result element by element. With the type inference here, both
are read and written 16 bytes at a time.
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
    """Infer the type of a view; a view of registers must keep the number of elements in each thread."""
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
    """Let hidet fuse operators that read further tensors with products on tensor cores while the block runs."""
    with replaced(TensorView, {"infer_type": infer_type}):
        yield
