"""hidet 0.6.1 has graph rewrites that change results; they are left out, or set right, while a program is optimized.

* ``MultiInputCompositeElementwiseLeftRightRewriteRule``: op(f(x), f(y)) becomes one operator that indexes x and y
  alike, also where one is broadcast, and so reads past its end (an additive attention mask, for one).
* ``DoubleCast``: cast(cast(x)) to x's own dtype is dropped, also where the dtype between holds less than x's.
* ``AttentionRewriteRule`` and ``AttentionMaskAddRewriteRule``: matmul(softmax(matmul(q, k)), v) becomes one operator,
  also where a product takes its second operand transposed or the softmax is not along the last dim. hidet registers
  these and the next two only where it finds a GPU when it is imported, so a program would also depend on that.
* ``ReorderMulScaleRewriteRule`` and ``ReorderDivScaleRewriteRule``: matmul(q, k) * c becomes matmul(q * c, k), also
  where the product takes its second operand transposed.
* ``MatmulTransposeRewriteRule``: matmul(a, transpose(b)) becomes matmul_nt(a, b), also where the product takes its
  second operand transposed already. It is kept for the others.
"""

from __future__ import annotations

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
        """hidet's, unless the product transposes its operand itself."""
        if matched[self.C].op.attrs["transpose_b"]:
            return None
        rewritten: list[Tensor] | None = super().target(matched)
        return rewritten


@contextmanager
def sound_rewrites() -> Iterator[None]:
    """Leave the unsound rewrites out, or set them right, while the block runs."""
    rules = base._registered_rewrite_rules
    before = list(rules)
    rules[:] = [
        _TransposeOfPlainProducts() if type(rule) is MatmulTransposeRewriteRule else rule
        for rule in rules
        if not isinstance(rule, UNSOUND)
    ]
    try:
        yield
    finally:
        rules[:] = before
