"""hidet 0.6.1 has graph rewrites that change results; they are removed or corrected while a program is optimized.

* ``MultiInputCompositeElementwiseLeftRightRewriteRule``: op(f(x), f(y)) becomes one operator that indexes x and y
  alike. If one is broadcast, as an additive attention mask is, the operator reads past its end.
* ``DoubleCast``: cast(cast(x)) back to x's dtype is dropped, even if the dtype between holds less than x's.
* ``AttentionRewriteRule`` and ``AttentionMaskAddRewriteRule``: matmul(softmax(matmul(q, k)), v) becomes one operator,
  also where a product takes its second operand transposed or the softmax is not along the last dim. hidet registers
  these and the next two only where it finds a GPU when it is imported, so a program would also depend on that.
* ``ReorderMulScaleRewriteRule`` and ``ReorderDivScaleRewriteRule``: matmul(q, k) * c becomes matmul(q * c, k), also
  where the product takes its second operand transposed.
* ``MatmulTransposeRewriteRule``: matmul(a, transpose(b)) becomes matmul_nt(a, b), also where the product takes its
  second operand transposed already. It is kept for the others.

``BatchedMatmulFlattenRule`` compares symbolic extents of the dim that two operands share by their truth value, which
expressions do not have. A rewrite that fails in this way is not applied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hidet.graph import Tensor
from hidet.graph.transforms.graph_patterns import base
from hidet.graph.transforms.graph_patterns.attn_patterns import (
    AttentionMaskAddRewriteRule,
    AttentionRewriteRule,
    ReorderDivScaleRewriteRule,
    ReorderMulScaleRewriteRule,
)
from hidet.graph.transforms.graph_patterns.matmul_patterns import MatmulTransposeRewriteRule
from hidet.graph.transforms.graph_patterns.transform_patterns import (
    DoubleCast,
    MultiInputCompositeElementwiseLeftRightRewriteRule,
)

ONLY_WITH_GPU = (
    AttentionRewriteRule,
    AttentionMaskAddRewriteRule,
    ReorderMulScaleRewriteRule,
    ReorderDivScaleRewriteRule,
)
UNSOUND = (MultiInputCompositeElementwiseLeftRightRewriteRule, DoubleCast, *ONLY_WITH_GPU)


class _TransposeOfPlainProducts(MatmulTransposeRewriteRule):
    def target(self, matched: Any) -> list[Tensor] | None:
        """Rewrite as hidet does, unless the product already transposes its operand."""
        if matched[self.C].op.attrs["transpose_b"]:
            return None
        rewritten: list[Tensor] | None = super().target(matched)
        return rewritten


_UNDECIDED = "does not support pythonic logical operations"


def _if_decided(rule: Any) -> Any:
    """Return a copy of a rewrite rule that is not applied where it depends on the truth of a symbolic expression."""
    decided = copy.copy(rule)

    def target(matched: Any) -> list[Tensor] | None:
        try:
            rewritten: list[Tensor] | None = rule.target(matched)
        except TypeError as error:
            if _UNDECIDED not in str(error):
                raise
            return None
        return rewritten

    decided.target = target
    return decided


@contextmanager
def sound_rewrites() -> Iterator[None]:
    """Remove or correct the unsound rewrites while the block runs."""
    rules = base._registered_rewrite_rules
    before = list(rules)
    rules[:] = [
        _if_decided(_TransposeOfPlainProducts() if type(rule) is MatmulTransposeRewriteRule else rule)
        for rule in rules
        if not isinstance(rule, UNSOUND)
    ]
    try:
        yield
    finally:
        rules[:] = before
