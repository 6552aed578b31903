"""Plans of several stages, each a graph of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import hidet
import numpy as np
import pytest

from hidet_dist.artifacts import Manifest
from hidet_dist.cli.explaining import load
from hidet_dist.errors import ConfigError, InfeasibleError, PlanError
from hidet_dist.machine import builtin
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.partitioning import stage_graphs
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec import DeviceMesh, Plan, TensorShardSpec
from hidet_dist.spec.explanation import StageExplanation
from hidet_dist.view import GraphView

CLUSTER = builtin("cpu", DeviceMesh((2,)))
X = np.random.default_rng(0).uniform(-1, 1, (4, 8)).astype(np.float32)


@cache
def traced() -> hidet.FlowGraph:
    """Matmul, relu, matmul, exp."""
    x, rng = hidet.symbol([4, 8], "float32", "cpu"), np.random.default_rng(1)
    up, down = (hidet.asarray(rng.uniform(-1, 1, shape).astype(np.float32)) for shape in ((8, 12), (12, 8)))
    return hidet.trace_from(hidet.ops.exp(hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(x, up)), down)), [x])


GIVEN = [
    {"operators": [0, 2], "mesh_shape": [2], "pins": {"w0": "(R, S0)"}},
    {"operators": [2, 4], "mesh_shape": [2], "pins": {"w0": "(S0, R)"}},
]


@cache
def planned() -> Plan:
    """Two stages of two operators each, on two ranks each: the weight by columns, then by rows."""
    return hidet.distributed.make_plan(traced(), {"mesh_shape": [4]}, {"stages": GIVEN})


def normal() -> NormalGraph:
    return normalize(traced())


def test_stages_have_the_operators_that_their_pipeline_says() -> None:
    graphs = stage_graphs(planned(), normal())
    assert [[op.name for op in graph.nodes] for graph in graphs] == [["Matmul", "Relu"], ["Matmul", "Exp"]]
    assert [GraphView(graph).fingerprint() for graph in graphs] == [stage.fingerprint for stage in planned().stages]
    hidet.distributed.validate_plan(planned(), traced())


def test_stages_that_nothing_joins_are_refused(tmp_path: Path) -> None:
    plan, says = Plan(planned().stages), "has 2 stages and no pipeline that joins them"
    with pytest.raises(PlanError, match=says):
        hidet.distributed.validate_plan(plan, traced())
    with pytest.raises(PlanError, match=says):
        hidet.distributed.auto_parallel(traced(), {"mesh_shape": [2]}, {}, tmp_path / "out", plan=plan)
    with pytest.raises(PlanError, match=says):
        Plan.from_json(plan.to_json())
    assert not (tmp_path / "out").exists()


def test_each_stage_is_a_program_and_all_of_them_compute_the_graph() -> None:
    plan, values = planned(), [X]
    for number in range(2):
        values = simulate(hidet.distributed.partition(traced(), plan, stage=number), values)
    np.testing.assert_allclose(values[0], evaluate_graph(traced(), [X])[0], rtol=1e-5)
    with pytest.raises(PlanError, match="stages 0 to 1; there is no stage 2"):
        hidet.distributed.partition(traced(), plan, stage=2)


def test_parts_of_stages_are_edited_by_the_number_of_the_stage() -> None:
    plan = planned()
    assert {name: str(spec) for name, spec in plan.param_specs.items()} == {"0:w0": "(R, S0)", "1:w0": "(S0, R)"}
    edited = plan.edit({"1:w0": "(R, R)", "0:op:1": plan.stages[0].operators[1].spec})
    assert str(edited.stages[1].weights[0].spec) == "(R, R)"
    assert edited.stages[0] == plan.stages[0]
    anew = hidet.distributed.recost(edited, traced(), CLUSTER)
    assert anew.stages[0] == plan.stages[0] and anew.stages[1] != edited.stages[1]
    assert anew == hidet.distributed.recost(edited, traced(), [CLUSTER, CLUSTER])
    for name, says in (("w0", "stages 0, 1 have 'w0'; write 0:w0"), ("2:w0", "no '2:w0'; it has op:0, 0:op:0")):
        with pytest.raises(PlanError, match=says):
            plan.edit({name: TensorShardSpec.parse("(R, R)")})
    with pytest.raises(ConfigError, match="2 stages; recost was given 1 machines"):
        hidet.distributed.recost(plan, traced(), [CLUSTER])
    labelled = replace(plan.stages[1], weights=(replace(plan.stages[1].weights[0], label="down"),))
    assert (
        str(replace(plan, stages=(plan.stages[0], labelled)).edit({"down": "(R, R)"}).param_specs["down"]) == "(R, R)"
    )


def test_stages_are_built_and_explained_each(tmp_path: Path) -> None:
    out = tmp_path / "artifacts"
    result = hidet.distributed.auto_parallel(traced(), {"mesh_shape": [4]}, {"stages": GIVEN}, out)
    plan = result.plan
    assert [stage.size for stage in Manifest.load(out).program().stages] == [2, 2]
    assert result.weight_bytes_per_rank == [8 * 6 * 4] * 4
    bare = Plan.load(out / "plan.json")
    assert [stage.report for stage in bare.stages] == [None, None]
    explained = load(out)
    stages = (replace(one, report=one.report.without_times()) for one in plan.stages if one.report is not None)
    assert str(explained) == str(replace(plan, stages=tuple(stages)).explain())
    assert [stage.schedule for stage in explained.stages] == [StageExplanation(one).schedule for one in plan.stages]
    data = json.loads(explained.to_json())
    assert [stage["fingerprint"] for stage in data["stages"]] == [stage.fingerprint for stage in plan.stages]
    assert explained.schedule == [*explained.stages[0].schedule, *explained.stages[1].schedule]
    assert 'shard("w0", dim=1)' in explained.stages[0].schedule and 'shard("w0", dim=0)' in explained.stages[1].schedule
    with pytest.raises(InfeasibleError, match="mem_budget is 300"):
        hidet.distributed.auto_parallel(traced(), {"mesh_shape": [4]}, {"mem_budget": 300}, out, plan=plan)


def test_a_table_tells_stages_apart() -> None:
    table = planned().table()
    assert list(table.columns[0].cells)[1:3] == ["0:0", "0:1"]  # behind the line of the stage
    assert "1:0" in table.columns[0].cells
