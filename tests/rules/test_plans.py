"""Random plans of whole graphs, and the program that runs the harness."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hidet_dist.errors import PlanError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.partitioning.proof import with_conversions
from hidet_dist.rules.rule import RuleTable
from hidet_dist.simulate import simulate
from hidet_dist.soundness.__main__ import main
from hidet_dist.soundness.graphs import GRAPHS, MODELS, PATTERNS, WITHOUT_KERNELS
from hidet_dist.soundness.plans import check_stage, evaluate_graph, graph_inputs, random_stage
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView

# resnet50 has the blocks of resnet18.
SMALL, LARGE = list(PATTERNS), [name for name in MODELS if name != "resnet50"]


@pytest.mark.parametrize(
    ("name", "mesh", "plans"),
    [
        *((name, (2, 2), 2) for name in SMALL),
        *(pytest.param(name, (2,), 2, marks=pytest.mark.slow) for name in SMALL),
        *((name, (2, 2), 1) for name in LARGE if name != "resnet18"),
        *(pytest.param(name, mesh, 3, marks=pytest.mark.slow) for name in LARGE for mesh in ((2,), (2, 2))),
    ],
)
def test_random_plans_compute_what_the_whole_graph_does(name, mesh, plans):
    rng = np.random.default_rng(1)
    traced = GRAPHS[name](rng)
    graph, inputs = normalize(traced), graph_inputs(traced, rng)
    view, whole = GraphView(graph), evaluate_graph(traced, inputs)
    table = RuleTable(DeviceMesh(mesh))
    for _ in range(plans):
        assert check_stage(graph, random_stage(view, DeviceMesh(mesh), table, rng), inputs, whole) == ""


def test_a_plan_whose_reduce_function_is_missing_is_refused():
    rng = np.random.default_rng(2)
    graph, mesh = normalize(GRAPHS["mlp"](rng)), DeviceMesh((2,))
    view, inputs = GraphView(graph), graph_inputs(graph, rng)
    table = RuleTable(mesh)
    stage = random_stage(view, mesh, table, rng)
    operators = list(stage.operators)
    last = next(i for i, op in reversed(list(enumerate(view.operators))) if op.name == "Matmul")
    partial = next(c.spec for c in table(view.operators[last])[1] if any(c.spec.reduce_fns))
    operators[last] = replace(operators[last], spec=partial)
    stage = with_conversions(view, replace(stage, operators=tuple(operators)), builtin("cpu", mesh))
    assert check_stage(graph, stage, inputs, evaluate_graph(graph, inputs)) == ""
    operators = list(stage.operators)
    operators[last] = replace(operators[last], spec=replace(partial, reduce_fns=((),)))
    with pytest.raises(PlanError, match=f"Operator {last}, Matmul, cannot run as"):
        partition_graph(graph, replace(stage, operators=tuple(operators)))


def test_a_fused_projection_in_compiled_kernels_equals_the_oracle():
    """Linear, split, linear from end to end, with hidet's own kernels: every way to shard the two projections."""
    rng = np.random.default_rng(3)
    traced, mesh = GRAPHS["fused_projection"](rng), DeviceMesh((2,))
    graph, inputs = normalize(traced), graph_inputs(traced, rng)
    stage = random_stage(GraphView(graph), mesh, RuleTable(mesh), rng)
    (got,) = simulate(partition_graph(graph, stage), [x.astype(np.float32) for x in inputs])
    np.testing.assert_allclose(got, evaluate_graph(traced, inputs)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT_KERNELS and "resnet" not in name])
def test_a_random_plan_of_a_model_in_compiled_kernels_equals_the_oracle(name):
    """With hidet's own kernel for each local operator, a sample of what the oracle checks in bulk."""
    rng = np.random.default_rng(4)
    traced, mesh = MODELS[name](rng), DeviceMesh((2,))
    graph, inputs = normalize(traced), graph_inputs(traced, rng)
    program = partition_graph(graph, random_stage(GraphView(graph), mesh, RuleTable(mesh), rng))
    dtypes = [x.dtype.name for x in graph.inputs]
    got = simulate(program, [x.astype(dtype) for x, dtype in zip(inputs, dtypes, strict=True)])
    for y, want in zip(got, evaluate_graph(traced, inputs), strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-4)


def test_the_program_ends_with_one_line_of_json(capsys):
    assert main(["--instances", "1", "--plans", "4", "--only", "Softmax", "--jobs", "1"]) == 0
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(counts) == [
        "operators",
        "replicate_only",
        "instances",
        "choices",
        "plans",
        "families",
        "cuts",
        "failures",
    ]
    assert counts["operators"] == counts["instances"] > 0
    assert counts["choices"] > counts["instances"]
    assert counts["failures"] == 0


@pytest.mark.slow
def test_processes_share_the_work(capsys):
    assert main(["--plans", "4", "--only", "mlp", "--jobs", "2"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["plans"] == 1


def test_the_program_counts_failures(capsys, monkeypatch):
    import hidet_dist.soundness.work as program

    monkeypatch.setattr(program, "check_stage", lambda *_: "it differs")
    assert main(["--plans", "8", "--only", "mlp", "--jobs", "1"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failures"] == 2
