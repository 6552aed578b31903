import io

import hidet
import pytest
from hidet.graph import Operator
from hidet.graph.ops.transfer import TransferOp
from hidet.graph.ops.utils import Task, compute, input_like, reduce
from rich.console import Console

import hidet_dist
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh, Plan
from hidet_dist.testing import models


def test_a_plan_round_trips_and_tells_what_it_costs(tmp_path):
    graph = normalize(models.gpt2()[0])
    plan = search(graph, builtin("cpu", DeviceMesh((2,), ("gpu",))), mem_budget=300_000).plan
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json() == (tmp_path / "plan.json").read_text()
    assert plan.seconds == plan.stages[0].seconds > 0
    assert plan.stages[0].weight_bytes_per_device <= 300_000
    assert sum(plan.collectives().values()) == sum(not t.startswith("slice") for t in plan.stages[0].communications())

    shown = io.StringIO()
    Console(width=200, file=shown).print(plan.table())
    text = shown.getvalue()
    for operator in plan.stages[0].operators:
        assert operator.operator in text
    assert "[gpu=2]" in text
    for step in plan.stages[0].communications():
        assert step in text


def test_operators_without_a_rule_have_a_note():
    x = hidet.symbol([4, 6], "float32", "cpu")
    graph = normalize(hidet.trace_from(TransferOp(hidet.ops.exp(x), x.device).outputs[0], [x]))
    exp, transfer = search(graph, builtin("cpu", DeviceMesh((2,)))).plan.stages[0].operators
    assert exp.note == ""
    assert transfer.spec.is_replicated
    assert transfer.note == "replicated: it moves data between devices"


class Squares(Operator):
    """An operator class of a user, which states no traits."""

    def __init__(self, x: hidet.Tensor):
        node = input_like(x, "x")
        square = compute("y", node.shape, lambda i, j: node[i, j] * node[i, j])
        super().__init__([x], {}, Task("squares", [node], [square]))


class SumOfSquares(Operator):
    """The same, with a reduction."""

    def __init__(self, x: hidet.Tensor):
        node = input_like(x, "x")
        rows, columns = node.shape
        sums = compute("y", [rows], lambda i: reduce([columns], lambda k: node[i, k] * node[i, k], "sum"))
        super().__init__([x], {}, Task("sum_of_squares", [node], [sums]))


@pytest.mark.parametrize("cls, kernel", [(Squares, "elementwise"), (SumOfSquares, "reduction")])
def test_classes_without_traits_have_a_note_of_how_they_are_costed(cls, kernel):
    x = hidet.symbol([4, 6], "float32", "cpu")
    graph = hidet.trace_from(cls(hidet.ops.exp(x)).outputs[0], [x])
    config = {"mesh_shape": [2]}
    plan = hidet_dist.make_plan(graph, config)
    note = f"costed by its definition, as a kernel of the class {kernel}: {__name__}.{cls.__name__} has no traits"
    assert [op.note for op in plan.stages[0].operators] == ["", note]
    assert [op.note for op in hidet_dist.describe(plan, graph, config).operators] == ["", note]
    assert [op["note"] for op in plan.explain().to_data()["operators"]] == ["", note]
    for form in (plan.table(), plan.explain()):
        shown = io.StringIO()
        Console(width=400, file=shown).print(form)
        assert note in shown.getvalue()
    again = hidet_dist.recost(plan, graph, builtin("cpu", plan.stages[0].mesh))
    assert [op.note for op in again.stages[0].operators] == ["", note]
