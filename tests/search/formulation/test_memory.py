from __future__ import annotations

import hidet

from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView


def test_an_unsharded_program_holds_what_its_tensors_need() -> None:
    """x -> relu -> exp -> sum with x: between the operators as many tensors as are still to be read."""
    x = hidet.symbol([8, 4], "float32", "cpu")
    a = hidet.ops.relu(x)
    b = hidet.ops.reshape(hidet.ops.exp(a), [4, 8])  # a view
    y = hidet.ops.reshape(b, [8, 4]) + a
    graph = normalize(hidet.trace_from(y, [x]))
    view = GraphView(graph)
    plan = search(graph, builtin("cpu", DeviceMesh((1,)))).plan
    size = 8 * 4 * 4
    # The input and the output are there throughout; then a; a and exp(a); the views hold nothing more.
    names = [op.name for op in view.operators]
    assert names.index("Add") == len(names) - 1
    held = dict(zip(names, live_bytes(view, plan.stages[0]), strict=False))
    assert held["Relu"] == 3 * size
    assert held["Exp"] == held["Reshape"] == held["Add"] == 4 * size
    assert live_bytes(view, plan.stages[0])[-1] == 2 * size
