"""hidet 0.6.1 chooses a kernel for products in half precision that is none for small ones: building it fails.

The kernel takes at least two steps of 32 along k, and tiles of 128 columns of which no more than three in four may be
idle. Products that it cannot take, shards of few columns or short heads for the most part, are computed in float32
here, from operands that are cast as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import hidet
from hidet.graph import Operator, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.transforms import ResolveRule, get_resolve_chain
from hidet.ir.expr import is_constant

_STEP = 32
_LEAST_COLUMNS = 32


def is_taken(op: MatmulOp) -> bool:
    """Whether hidet's kernel for half precision takes a product of this shape."""
    (a, b), (c,) = op.inputs, op.outputs
    if len(a.shape) < 2 or len(b.shape) < 2 or not is_constant(a.shape[-1], *b.shape[-2:]):
        return False
    k, n = int(a.shape[-1]), int(c.shape[-1])
    return k % 2 == 0 and n % 2 == 0 and k > _STEP and n >= _LEAST_COLUMNS


class _SmallProducts(ResolveRule):
    def resolve(self, op: Operator) -> list[Tensor] | None:
        a, b = op.inputs
        if not a.dtype.is_any_float16() or is_taken(op):
            return None
        inputs = [hidet.ops.cast(x, "float32") for x in (a, b)]
        return [hidet.ops.cast(op.reforward(inputs)[0], a.dtype)]


@contextmanager
def small_products_in_float32() -> Iterator[None]:
    """Keep hidet from choosing the kernel where there is none, while the block runs."""
    rules = get_resolve_chain(MatmulOp).rules
    rule = _SmallProducts()
    rules.append(rule)  # the last one is asked first
    try:
        yield
    finally:
        rules.remove(rule)
