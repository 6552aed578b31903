"""A graph's operators are analysed once for all that differ only in their data."""

from __future__ import annotations

from typing import Any

import hidet
import pytest
from hidet import ops

from hidet_dist.rules import rule, templates
from hidet_dist.rules.rule import RuleTable
from hidet_dist.spec import DeviceMesh


def symbol(shape: list[int], dtype: str = "float32") -> hidet.Tensor:
    return hidet.symbol(shape, dtype, "cpu")


def test_twins_share_their_rule_and_choices():
    table = RuleTable(DeviceMesh((2, 2)))
    first, second = (ops.matmul(symbol([8, 8]), symbol([8, 8])).op for _ in range(2))
    assert table(first)[1] is table(second)[1]


def test_operators_of_other_shapes_dtypes_or_attributes_do_not():
    table = RuleTable(DeviceMesh((2,)))
    operators = [
        ops.strided_slice(symbol([4, 8]), [0], [4], [1]).op,
        ops.strided_slice(symbol([4, 8]), [0], [8], [1]).op,
        ops.strided_slice(symbol([6, 8]), [0], [4], [1]).op,
        ops.strided_slice(symbol([4, 8], "float16"), [0], [4], [1]).op,
        ops.strided_slice(symbol([4, 8]), [0], [4], [0]).op,
    ]
    rules = [table(op)[0] for op in operators]
    assert len({id(rule) for rule in rules}) == len(operators)


def test_a_deep_model_is_analysed_as_fast_as_a_shallow_one():
    table = RuleTable(DeviceMesh((8, 8)))
    x = symbol([1, 64, 512])
    rules = []
    for _ in range(24):
        hidden = ops.gelu(ops.matmul(x, symbol([512, 2048])))
        projected = ops.matmul(hidden, symbol([2048, 512]))
        x = ops.add(x, projected)
        for y in (hidden.op.inputs[0], hidden, projected, x):
            rules.append(table(y.op)[0])
    assert len(rules) == 4 * 24
    assert len({id(rule) for rule in rules}) == 4


def test_few_choices_reduce_over_all_axes_of_a_factor_at_once():
    """Of a product on (2, 2, 2): one replicated, one for each dim of the result, and those that split the inner dim.

    Of these, all three axes or one of five shorter runs split it, the rest one of two dims. Three ways reduce each.
    """
    mesh = DeviceMesh((2, 2, 2))
    op = ops.matmul(symbol([64, 64]), symbol([64, 64])).op
    choices = RuleTable(mesh).joint(op)
    assert len(choices) == len({choice.spec for choice in choices}) == 1 + 2 + 3 + 5 * 2 * 3
    assert max(len(choice.spec.reduce_fns[0]) for choice in choices) == 1
    rule = RuleTable(mesh).rule(op)
    assert all(rule.choice(choice.spec, mesh) == choice for choice in choices)
    assert RuleTable(mesh).joint(op, proven=False) == choices
    assert RuleTable(mesh).replicated(op) == choices[:1]


def test_tables_of_other_meshes_share_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices are those of a table of its own, and no local operator is proven twice."""
    rebuilt: list[str] = []
    real = rule.rebuild

    def counted(*arguments: Any) -> list[hidet.Tensor]:
        rebuilt.append(arguments[0].name)
        return real(*arguments)

    monkeypatch.setattr(rule, "rebuild", counted)
    monkeypatch.setattr(templates, "_proofs", {})
    op = ops.matmul(symbol([8, 8]), symbol([8, 8])).op
    whole = RuleTable(DeviceMesh((2, 2)))
    whole(op)
    before = len(rebuilt)
    assert before > 0
    slices = [RuleTable(DeviceMesh((size,)), whole) for size in (1, 2, 4)]
    choices = [table(op)[1] for table in slices]
    assert len(rebuilt) == before
    assert choices == [RuleTable(table.mesh)(op)[1] for table in slices]
