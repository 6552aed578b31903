"""hidet 0.6.1 does not count dims from the end in ``squeeze``; this is corrected for the whole process.

``squeeze(x, [-1])`` keeps the dim: its result has the shape of ``x``, and its definition reads ``x`` with one index too
many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from hidet.graph import Tensor
from hidet.graph.ops.transform import SqueezeOp
from hidet.graph.ops.utils import normalize_dim

hidet_init: Callable[[SqueezeOp, Tensor, list[int]], None] = SqueezeOp.__init__


@functools.wraps(hidet_init)
def _init(self: SqueezeOp, x: Tensor, dims: list[int]) -> None:
    hidet_init(self, x, sorted(normalize_dim(dim, len(x.shape)) for dim in dims))


def install() -> None:
    """Count negative dims from the end from now on."""
    SqueezeOp.__init__ = _init
