"""What tasks collect of their definitions: the same as by hidet, with one walk."""

from __future__ import annotations

from typing import Any

import hidet
import pytest
from hidet import ops
from hidet.ir import tools
from hidet.ir.compute import TensorInput, TensorNode, compute, tensor_input
from hidet.ir.expr import SymbolVar, Var, var
from hidet.ir.tools.util_functors import IRCollector

from hidet_dist.compat import task_inputs

pytestmark = pytest.mark.usefixtures("quick")


def definitions() -> dict[str, list[TensorNode]]:
    """The outputs of tasks with and without symbols, functions and several tensors."""
    x, y = hidet.symbol([4, 6], "float32", "cpu"), hidet.symbol([6, 8], "float32", "cpu")
    symbolic = hidet.symbol(["n", 6], "float32", "cpu")
    results = {
        "product": ops.matmul(x, y),
        "function": ops.exp(x),
        "softmax": ops.softmax(x, 1),
        "argmax": ops.argmax(x, 1),
        "reshape": ops.reshape(x, [3, 8]),
        "concat": ops.concat([x, x * 2.0], 0),
        "where": ops.where(x < 1.0, x, x + 1.0),
        "symbolic": ops.relu(symbolic),
    }
    tasks = {name: list(result.op.task.outputs) for name, result in results.items()}
    free, a = var("free"), tensor_input("a", "float32", [4])
    tasks["free"] = [compute("b", [4], lambda i: a[i] + free)]
    tasks["nested"] = [compute("d", [4], lambda i: tasks["free"][0][i] * a[i])]
    return tasks


DEFINITIONS = definitions()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_collected_are_the_nodes_that_hidet_collects(name: str) -> None:
    outputs = DEFINITIONS[name]
    for kind in (TensorInput, SymbolVar, Var):
        ours, theirs = tools.collect(outputs, kind), task_inputs.hidet_collect(outputs, kind)
        assert [id(node) for node in ours] == [id(node) for node in theirs]
    assert tools.collect_free_vars(outputs) == task_inputs.hidet_collect_free_vars(outputs)


def test_hidet_still_walks_a_definition_for_each_kind_of_node(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[Any] = []
    collect = IRCollector.collect
    monkeypatch.setattr(IRCollector, "collect", lambda self, node: (walks.append(node), collect(self, node))[1])
    x = hidet.symbol([4, 6], "float32", "cpu")
    ops.sqrt(x + x)
    assert sum(map(bool, walks)) == 0
    monkeypatch.setattr(tools, "collect", task_inputs.hidet_collect)
    ops.sqrt(x - x)
    assert sum(map(bool, walks)) >= 2, "hidet walks definitions less often: drop task_inputs.py"
