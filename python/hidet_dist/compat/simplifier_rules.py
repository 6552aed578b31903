"""hidet 0.6.1 builds the rules of its simplifier anew for each simplified expression; they are shared here.

The rules are a hundred expressions, and each definition of an operator is simplified several times. Building them took
a fifth of the time to plan a small graph. An instance does not change them.

Each part of an expression is matched with all rules for its kind, by exceptions and context managers, and those that
depend on bounds are built once more for each part. Only rules whose kinds of nodes are found are tried here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hidet.ir.dialects.pattern import PlaceholderExpr
from hidet.ir.expr import Add, BinaryExpr, BitwiseXor, Constant, Expr, IfThenElse, LogicalAnd, LogicalOr, Multiply
from hidet.ir.functors import IRRewriter
from hidet.transforms.rule_based_simplifier import BoundAnalyzer, ConstExprSimplifier, RuleBasedSimplifier

from hidet_dist.compat import float_algebra
from hidet_dist.compat.replacing import Substitutes

hidet_init = RuleBasedSimplifier.__init__
hidet_apply_bound_aware_rule = RuleBasedSimplifier.apply_bound_aware_rule

_COMMUTATIVE = (Add, Multiply, BitwiseXor, LogicalAnd, LogicalOr)


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


def _fits(pattern: Expr, target: Expr) -> bool:
    """Tell whether a target has the nodes of a pattern, as far as their kinds; a necessary condition of a match."""
    if isinstance(pattern, PlaceholderExpr):
        constant = isinstance(target, Constant)
        return not ((pattern.require_const and not constant) or (pattern.require_non_const and constant))
    if not isinstance(target, type(pattern)):
        return False
    if isinstance(pattern, BinaryExpr):
        a, b = target.a, target.b
        if _fits(pattern.a, a) and _fits(pattern.b, b):
            return True
        return isinstance(pattern, _COMMUTATIVE) and _fits(pattern.a, b) and _fits(pattern.b, a)
    if isinstance(pattern, IfThenElse):
        return (
            _fits(pattern.cond, target.cond)
            and _fits(pattern.then_expr, target.then_expr)
            and _fits(pattern.else_expr, target.else_expr)
        )
    return True


@functools.cache
def _rules_for(kind: Any) -> list[Any]:
    """List the rules for a kind of node, in their order."""
    return [rule for rule in _rules()["patterns"] if type(rule[0]) is kind]


@functools.cache
def _bound_aware_rules_for(kind: Any) -> list[tuple[Expr, Any]]:
    """List the rules for a kind of node that depend on bounds, each with its pattern."""
    rules = [(rule[2](*rule[0]), rule) for rule in _rules()["bound_patterns"]]
    return [(pattern, rule) for pattern, rule in rules if type(pattern) is kind]


def _apply_rule(self: Any, e: Expr) -> Expr:
    """Apply the first rule that matches; replaces the simplifier's method."""
    kind: Any = type(e)
    self.patterns = [rule for rule in _rules_for(kind) if _fits(rule[0], e)]
    return float_algebra.apply_rule(self, e) if self.patterns else e


def _apply_bound_aware_rule(self: Any, e: Expr) -> Expr:
    """Apply the first rule that matches and holds within the bounds; replaces the simplifier's method."""
    kind: Any = type(e)
    self.bound_patterns = [rule for pattern, rule in _bound_aware_rules_for(kind) if _fits(pattern, e)]
    return hidet_apply_bound_aware_rule(self, e) if self.bound_patterns else e


SUBSTITUTES: Substitutes = (
    (
        RuleBasedSimplifier,
        {"__init__": _init, "apply_rule": _apply_rule, "apply_bound_aware_rule": _apply_bound_aware_rule},
    ),
)
