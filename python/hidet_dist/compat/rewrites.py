"""hidet 0.6.1 has graph rewrites that change results; they are left out while a program is optimized.

* ``MultiInputCompositeElementwiseLeftRightRewriteRule``: op(f(x), f(y)) becomes one operator that indexes x and y
  alike, also where one is broadcast, and so reads past its end (an additive attention mask, for one).
* ``DoubleCast``: cast(cast(x)) to x's own dtype is dropped, also where the dtype between holds less than x's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hidet.graph.transforms.graph_patterns import base
from hidet.graph.transforms.graph_patterns.transform_patterns import (
    DoubleCast,
    MultiInputCompositeElementwiseLeftRightRewriteRule,
)

UNSOUND = (MultiInputCompositeElementwiseLeftRightRewriteRule, DoubleCast)


@contextmanager
def sound_rewrites() -> Iterator[None]:
    """Leave the unsound rewrites out while the block runs."""
    rules = base._registered_rewrite_rules
    before = list(rules)
    rules[:] = [rule for rule in rules if not isinstance(rule, UNSOUND)]
    try:
        yield
    finally:
        rules[:] = before
