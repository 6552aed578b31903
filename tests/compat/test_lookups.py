"""hidet's look-ups: the same results as before, found once."""

from __future__ import annotations

import hidet
import pytest
from hidet.ir.expr import Add, Constant, Expr, Var, var
from hidet.ir.functors import BaseFunctor, ExprFunctor, ExprRewriter, IRRewriter

from hidet_dist.compat import lookups

pytestmark = pytest.mark.usefixtures("quick")


class Doubled(IRRewriter):
    """Replaces numbers, and counts sums."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = 0

    def visit_Constant(self, e: Constant) -> Expr:
        return hidet.ir.dtypes.int32(2 * int(e.value))

    def visit_Add(self, e: Add) -> Expr:
        self.sums += 1
        return super().visit_Add(e)


def numbers(e: Expr) -> list[int]:
    return [int(constant.value) for constant in hidet.ir.tools.collect(e, Constant)]


def test_a_functor_visits_each_node_once_by_the_method_of_its_type() -> None:
    shared = var("x") + 3
    rewriter = Doubled()
    assert numbers(rewriter(shared * shared)) == [6]
    assert rewriter.sums == 1
    assert rewriter([shared, shared])[0] is rewriter(shared)


def test_a_method_that_an_instance_replaces_is_called() -> None:
    rewriter = Doubled()
    rewriter.visit_Add = lambda e: e.a  # type: ignore[method-assign]
    x = var("x")
    assert rewriter(x + 3) is x


def test_a_functor_that_finds_its_methods_by_itself_still_does() -> None:
    class Own(ExprFunctor):
        def visit_dispatch(self, node: object) -> object:
            return "own", node

    x = var("x")
    assert Own()(x) == ("own", x)


def test_unknown_nodes_are_refused_as_by_hidet() -> None:
    class Node:
        pass

    for visit in (BaseFunctor.visit, lookups.hidet_visit):
        with pytest.raises(ValueError, match="unsupported type"):
            visit(ExprFunctor(), Node())


def test_hidet_still_compares_nodes_with_all_types() -> None:
    class Plain(ExprRewriter):
        pass

    lookups.hidet_visit(Plain(), var("x"))
    found = getattr(Plain, "__dispatch_table")[Var]
    assert found is vars(ExprFunctor)["visit_dispatch"], "hidet finds a node's method by its type now: drop lookups.py"
