"""hidet 0.6.1 builds the rules of its simplifier anew for each simplified expression; they are shared from now on.

The rules are a hundred expressions, and each definition of an operator is simplified several times. Building them took
a fifth of the time to plan a small graph. An instance does not change them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hidet.ir.expr import Expr
from hidet.ir.functors import IRRewriter
from hidet.transforms.rule_based_simplifier import BoundAnalyzer, ConstExprSimplifier, RuleBasedSimplifier

hidet_init = RuleBasedSimplifier.__init__


@functools.cache
def _rules() -> dict[str, Any]:
    """Build the rules once, as attributes of an instance."""
    first = RuleBasedSimplifier.__new__(RuleBasedSimplifier)
    hidet_init(first)
    return {name: getattr(first, name) for name in ("args", "patterns", "bound_patterns")}


def _init(self: Any, skip_node_types: Sequence[type[Expr]] | None = None) -> None:
    IRRewriter.__init__(self)
    self.analyzer = BoundAnalyzer()
    self.bound = self.analyzer.bound
    self.const_expr_simplifier = ConstExprSimplifier()
    vars(self).update(_rules())
    for kind in skip_node_types or ():
        if hasattr(self, f"visit_{kind.__name__}"):
            setattr(self, f"visit_{kind.__name__}", lambda node: node)


def install() -> None:
    """Share the rules from now on."""
    RuleBasedSimplifier.__init__ = _init
