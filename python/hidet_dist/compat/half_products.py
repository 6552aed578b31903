"""hidet 0.6.1 chooses its half-precision kernel also for small products, where building the kernel fails.

The kernel needs at least two steps of 32 along k, and at least a quarter of a tile of 128 columns. Smaller products,
mostly shards of few columns or short heads, are computed in float32 here, from operands that are cast as they are read.

The kernel can read a weight that is stored column by column, and then the number of columns may be odd (a vocabulary of
50257, whose embeddings are also the head's weight). hidet computes such products in float32, or transposes the weight
in every run; here the kernel computes them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import hidet
from hidet.graph import Operator, Tensor
from hidet.graph.ops.matmul.matmul import MatmulOp
from hidet.graph.ops.transform import PermuteDimsOp, RearrangeOp
from hidet.graph.ops.transpose2d import TransposeOp2D
from hidet.graph.transforms import ResolveRule, get_resolve_chain
from hidet.ir.expr import is_constant

_STEP = 32
_LEAST_COLUMNS = 32


def is_taken(op: Operator) -> bool:
    """Whether hidet's half-precision kernel computes an operator: a product in half precision, of a supported shape."""
    if not isinstance(op, MatmulOp) or not op.outputs[0].dtype.is_any_float16():
        return False
    (a, b), (c,) = op.inputs, op.outputs
    if len(a.shape) < 2 or len(b.shape) < 2 or not is_constant(a.shape[-1], *b.shape[-2:]):
        return False
    k, n = int(a.shape[-1]), int(c.shape[-1])
    return k % 2 == 0 and (n % 2 == 0 or _by_columns(op) is not None) and k > _STEP and n >= _LEAST_COLUMNS


def _by_columns(op: MatmulOp) -> Tensor | None:
    """Return the second operand with rows for columns, if it is stored like that or is a transposed weight."""
    b = op.inputs[1]
    if op.attrs["transpose_b"]:
        return b
    before = b.op
    if before is None or before.inputs[0].op is not None:
        return None
    swapped = [*range(len(b.shape) - 2), len(b.shape) - 1, len(b.shape) - 2]
    if isinstance(before, PermuteDimsOp):
        is_swap = list(before.attrs["axes"]) == swapped
    elif isinstance(before, RearrangeOp):
        is_swap = [list(dims) for dims in before.attrs["plan"]] == [[dim] for dim in swapped]
    else:
        is_swap = isinstance(before, TransposeOp2D)
    return before.inputs[0] if is_swap else None


class _Products(ResolveRule):
    def resolve(self, op: Operator) -> list[Tensor] | None:
        a, b = op.inputs
        if not a.dtype.is_any_float16():
            return None
        if not is_taken(op):
            inputs = [hidet.ops.cast(x, "float32") for x in (a, b)]
            return [hidet.ops.cast(op.reforward(inputs)[0], a.dtype)]
        columns = _by_columns(op)
        if columns is None:
            return None
        # Not with the other imports: making this module's tables takes seconds.
        kernel = importlib.import_module("hidet.graph.ops.matmul.matmul_f16_cute_experimental")
        return [kernel.matmul_f16_cute(a, columns, transpose_b=True)]


@contextmanager
def half_products() -> Iterator[None]:
    """Choose a supported kernel for each product in half precision while the block runs."""
    rules = get_resolve_chain(MatmulOp).rules
    rule = _Products()
    rules.append(rule)  # the last rule is tried first
    try:
        yield
    finally:
        rules.remove(rule)
