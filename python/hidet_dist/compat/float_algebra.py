"""hidet 0.6.1 takes ``x * 0`` and ``x - x`` for 0. Of floats, this holds for finite ones only: others give NaN.

Such products are dropped while expressions are built, and again while they are simplified.
"""

from __future__ import annotations

from typing import Any

from hidet.ir.expr import BinaryExpr, Constant, Expr, Multiply, Sub, convert
from hidet.ir.tools import infer_type, simplifier
from hidet.transforms.rule_based_simplifier import RuleBasedSimplifier

hidet_binary = Expr._binary
hidet_visit_binary = simplifier.Simplifier.visit_Binary
hidet_apply_rule = RuleBasedSimplifier.apply_rule


def _is_known(a: Expr, b: Expr) -> bool:
    """Whether a product that hidet takes for a number is one: its factors are numbers, or integers."""
    numbers = isinstance(a, Constant) and isinstance(b, Constant)
    return numbers or not any(infer_type(factor).is_float() for factor in (a, b))


def _binary(kind: type[Expr], a: Any, b: Any) -> Any:
    """Build a binary expression as hidet does, unless it is such a product; replaces ``Expr._binary``."""
    result = hidet_binary(kind, a, b)
    if kind is not Multiply or not isinstance(result, Constant):
        return result
    factors = convert(a), convert(b)
    return result if _is_known(*factors) else Multiply(*factors)


def _visit_binary(self: Any, e: BinaryExpr) -> Any:
    """Simplify an expression as hidet does, unless it is such a product; replaces ``Simplifier.visit_Binary``."""
    result = hidet_visit_binary(self, e)
    if not isinstance(e, Multiply) or not isinstance(result, Constant):
        return result
    a, b = self(e.a), self(e.b)
    if _is_known(a, b):
        return result
    return e if a is e.a and b is e.b else Multiply(a, b)


def apply_rule(self: Any, e: Expr) -> Expr:
    """Apply a rule as hidet does, unless it drops a difference of floats; replaces ``apply_rule``."""
    result: Expr = hidet_apply_rule(self, e)
    is_zero = isinstance(e, Sub) and isinstance(result, Constant)
    return e if is_zero and infer_type(e).is_float() else result


def install() -> None:
    """Keep such products and differences of floats from now on."""
    RuleBasedSimplifier.apply_rule = apply_rule
    simplifier.Simplifier.visit_Binary = _visit_binary
    Expr._binary = staticmethod(_binary)
