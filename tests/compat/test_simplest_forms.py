"""Definitions in simplest form: recognized by their form, and simplified as by hidet."""

from __future__ import annotations

import operator
from typing import Any

import hidet
import pytest
from hidet.ir import tools
from hidet.ir.compute import TensorInput, compute, reduce, tensor_input
from hidet.ir.expr import Expr, if_then_else, var
from hidet.transforms import rule_based_simplifier
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.compat import float_algebra, simplest_forms, simplifier_rules

pytestmark = pytest.mark.usefixtures("quick")

VARS = [var(name) for name in "ijk"]
SYMBOLS = [hidet.symbol_var(f"forms_{name}") for name in "pq"]


def _combined(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Sums, products, quotients, remainders and selections; parts may be one and the same node."""
    binary = st.builds(
        lambda op, a, b: op(a, b), st.sampled_from([operator.add, operator.sub, operator.mul]), parts, parts
    )
    by_number = st.builds(
        lambda op, a, n: op(a, n), st.sampled_from([operator.floordiv, operator.mod]), parts, st.integers(1, 8)
    )
    twice = st.builds(lambda op, a: op(a, a), st.sampled_from([operator.add, operator.sub]), parts)
    chosen = st.builds(lambda a, b, c: if_then_else(a < b, a, c), parts, parts, parts)
    return binary | by_number | twice | chosen


NUMBERS = st.integers(1, 8).map(hidet.ir.dtypes.int32)
EXPRESSIONS = st.recursive(st.sampled_from([*VARS, *SYMBOLS]) | NUMBERS, _combined, max_leaves=8)
EXTENTS = st.recursive(st.sampled_from(SYMBOLS) | NUMBERS, _combined, max_leaves=8)


@settings(max_examples=60, deadline=None)
@given(st.lists(EXPRESSIONS | EXTENTS, min_size=1, max_size=4))
def test_expressions_are_simplified_as_by_hidet(expressions: list[Expr]) -> None:
    for expression in expressions * 2:
        ours = tools.simplify(expression, enable_rules=True)
        assert str(ours) == str(simplest_forms.hidet_simplify(expression, enable_rules=True))


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS)
def test_only_rules_that_cannot_match_are_left_out(expression: Expr) -> None:
    kind = rule_based_simplifier.RuleBasedSimplifier
    ours = str(kind()(expression))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__init__", simplifier_rules.hidet_init)
        patch.setattr(kind, "apply_rule", float_algebra.apply_rule)
        patch.setattr(kind, "apply_bound_aware_rule", simplifier_rules.hidet_apply_bound_aware_rule)
        assert ours == str(kind()(expression))


def product(m: int, n: int, k: int) -> Expr:
    """A matrix product's element."""
    a, b = tensor_input("a", "float32", [m, k]), tensor_input("b", "float32", [k, n])
    return compute("c", [m, n], lambda i, j: reduce([k], lambda r: a[i, r] * b[r, j], "sum")).value


def test_a_node_that_is_used_twice_is_another_form_than_two_nodes() -> None:
    i, j = VARS[:2]
    shared = if_then_else(i < j, i, j)
    equal = if_then_else(i < j, i, j)
    assert str(tools.simplify(shared - equal, enable_rules=True)) == str(shared - equal)
    assert str(tools.simplify(shared - shared, enable_rules=True)) == "0"


def test_hidet_still_simplifies_equal_definitions_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    rules = rule_based_simplifier.rule_based_simplify
    monkeypatch.setattr(
        rule_based_simplifier,
        "rule_based_simplify",
        lambda node, **options: (calls.append(node), rules(node, **options))[1],
    )
    first, second = product(4, 6, 8), product(12, 10, 8)
    for simplify, most in ((tools.simplify, 0), (simplest_forms.hidet_simplify, 2)):
        calls.clear()
        for node in (first, second):
            assert simplify(node, enable_rules=True, skip_node_types=[TensorInput]) is node
        assert len(calls) == most, "hidet recognizes simplest forms now: drop simplest_forms.py"
    monkeypatch.undo()
