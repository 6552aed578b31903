"""hidet 0.6.1 takes dims that are reduced in the order in which they are given; this is corrected for the process.

``sum(x, [3, 0])`` reads the first dim of ``x`` over the extent of the last one, beyond its end if that is longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from hidet.graph import Tensor
from hidet.graph.ops.reduce.reduce import ReduceBaseOp
from hidet.graph.ops.utils import normalize_dim

hidet_init: Callable[[ReduceBaseOp, Tensor, Sequence[int] | None, bool, str], None] = ReduceBaseOp.__init__


@functools.wraps(hidet_init)
def _init(
    self: ReduceBaseOp, x: Tensor, dims: Sequence[int] | None, keep_dim: bool, reduce_type: str, *options: str
) -> None:
    ordered = None if dims is None else sorted(normalize_dim(dim, len(x.shape)) for dim in dims)
    hidet_init(self, x, ordered, keep_dim, reduce_type, *options)


def install() -> None:
    """Take dims in the order of the tensor's from now on."""
    ReduceBaseOp.__init__ = _init
