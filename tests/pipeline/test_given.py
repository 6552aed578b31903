"""Pipelines whose stages are given by hand: planned, checked, simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.errors import ConfigError, PlanError
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph, stage_graphs
from hidet_dist.simulate import simulate_pipeline
from hidet_dist.spec import Plan
from hidet_dist.spec.pipeline import Boundary, PipelineInput, PipelineOutput, Port

from .conftest import BATCH, STAGES, M, X, expected, traced

CONFIG: dict[str, Any] = {"stages": STAGES, "micro_batches": 4}


@pytest.fixture(scope="module")
def plan(graph: hidet.FlowGraph) -> Plan:
    return hidet_dist.make_plan(graph, {"mesh_shape": [6]}, CONFIG)


def test_the_plan_lists_the_boundary_tensors(plan: Plan) -> None:
    pipeline = plan.pipeline
    assert pipeline is not None and pipeline.micro_batches == 4 and pipeline.results == "all"
    assert [stage.ranks for stage in pipeline.stages] == [(0, 1), (2,), (3, 4, 5)]
    nbytes = BATCH // 4 * 6 * 8 * 4
    assert [replace(one, seconds=0.0) for one in pipeline.boundaries] == [
        Boundary("t2.0", Port(0, 0), (Port(1, 0), Port(2, 1)), nbytes),
        Boundary("t4.0", Port(1, 0), (Port(2, 0),), nbytes),
    ]
    assert all(one.seconds > 0 for one in pipeline.boundaries)
    assert pipeline.inputs == (PipelineInput((Port(0, 0),), 0), PipelineInput((Port(0, 1),), None))
    assert [replace(y, seconds=0.0) for y in pipeline.outputs] == [
        PipelineOutput(Port(2, 0), 0),
        PipelineOutput(Port(1, 0), 0),
    ]
    assert [y.seconds > 0 for y in pipeline.outputs] == [False, True] and pipeline.delivery_seconds > 0
    assert str(plan.stages[0].weights[0].spec) == "(R, S0)"
    seconds = [stage.makespan_seconds for stage in plan.stages]
    assert plan.interval_seconds > 4 * max(seconds)
    assert plan.makespan_seconds > sum(seconds) + 3 * max(seconds)
    assert Plan.from_json(plan.to_json()) == plan


def test_stages_compute_the_graph(plan: Plan, graph: hidet.FlowGraph) -> None:
    assert plan.pipeline is not None
    graphs = stage_graphs(plan, normalize(graph))
    programs = [partition_graph(own, stage) for own, stage in zip(graphs, plan.stages, strict=True)]
    for got, want in zip(simulate_pipeline(plan.pipeline, programs, [X, M]), expected(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_all_but_the_stages_and_their_pins_is_propagated(graph: hidet.FlowGraph) -> None:
    """The first stage's pin splits all that depends on its weight; stages without pins are replicated."""
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [6]}, {**CONFIG, "mode": "propagate"})
    assert plan.pipeline is not None and [stage.ranks for stage in plan.pipeline.stages] == [(0, 1), (2,), (3, 4, 5)]
    first, *others = plan.stages
    assert [str(op.spec.out_specs[0]) for op in first.operators] == ["(R, R, S0)"] * 3
    specs = [spec for stage in others for op in stage.operators for spec in (*op.spec.in_specs, *op.spec.out_specs)]
    assert specs and all(spec.is_replicated for spec in specs)
    assert not any(stage.collectives() for stage in others)


def _edited(plan: Plan, change: Any) -> str:
    data = json.loads(plan.to_json())
    change(data["pipeline"])
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p["boundaries"].pop(), "Input 0 of stage 2 must be one boundary or one input of the graph; it is 0"),
        (lambda p: p["boundaries"][0].update(source=[1, 0]), "must be later ones"),
        (lambda p: p["boundaries"][0].update(source=[0, 7]), "is output 7 of stage 0, which does not exist"),
        (lambda p: p["boundaries"][1].update(readers=[[2, 9]]), "is read as input 9 of stage 2, which does not exist"),
        (lambda p: p["boundaries"][1].update(readers=[]), "must be later ones"),
        (lambda p: p["stages"][1].update(ranks=[[3, 3]]), "its ranks are 2 to 2"),
        (lambda p: p["stages"][1].update(operators=[[3, 5]]), "each of the operators 0 to 8 once"),
        (lambda p: p["stages"].pop(), "The pipeline has 2 stages; there are 3"),
        (lambda p: p.update(micro_batches=0), "micro_batches must be a whole number from 1"),
        (lambda p: p.update(results="first"), "must be one of all, last"),
        (lambda p: p["inputs"][0].update(batch_dim=3), "has no dim 3"),
        (lambda p: p["inputs"][0].update(readers=[[0, 0, 0]]), "A port must be the numbers"),
        (lambda p: p["outputs"].pop(), None),
        (lambda p: p.pop("outputs"), "has no 'outputs'"),
        (lambda p: p["stages"][0].update(operators=[[0, 10**12]]), "has more than"),
    ],
)
def test_a_pipeline_that_contradicts_itself_is_refused(plan: Plan, change: Any, says: str | None) -> None:
    if says is None:  # it is coherent, and of another graph
        with pytest.raises(PlanError, match="outputs of the plan's pipeline are not those of the graph"):
            hidet_dist.validate_plan(Plan.from_json(_edited(plan, change)), traced())
        return
    with pytest.raises(PlanError, match=says):
        Plan.from_json(_edited(plan, change))


def test_another_cut_of_the_graph_is_refused(plan: Plan, graph: hidet.FlowGraph) -> None:
    assert plan.pipeline is not None
    hidet_dist.validate_plan(plan, graph)
    other = replace(plan.pipeline.boundaries[0], nbytes=1)
    pipeline = replace(plan.pipeline, boundaries=(other, *plan.pipeline.boundaries[1:]))
    with pytest.raises(PlanError, match=r"boundary t2\.0 is not t2.0, which crosses there"):
        hidet_dist.validate_plan(replace(plan, pipeline=pipeline), graph)
    dims = replace(plan.pipeline.inputs[0], batch_dim=1)
    pipeline = replace(plan.pipeline, inputs=(dims, *plan.pipeline.inputs[1:]))
    with pytest.raises(PlanError, match="cannot be cut into 4 micro-batches along dim 1"):
        hidet_dist.validate_plan(replace(plan, pipeline=pipeline), graph)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"stages": STAGES[:2]}, "3 devices together"),
        (
            {"stages": [*STAGES[:2], {"operators": [5, 7], "mesh_shape": [3]}]},
            "each of the operators 0 to 7 once; operator 7 is in no stage",
        ),
        ({"stages": [STAGES[1], STAGES[0], STAGES[2]]}, "Stage 0 reads t2.0, which stage 1 computes"),
        ({"stages": [*STAGES[:2], {"operators": [5, 8]}]}, "give all stages whole"),
        ({"stages": [{"mesh_shape": [6]}]}, "lacks 'operators'"),
        ({"stages": STAGES, "objective": "latency"}, "the stages are given whole"),
        ({"stages": [{"operators": [8, 0], "mesh_shape": [6]}]}, "must be a range such as"),
        ({"stages": []}, "a list with a dict for each stage"),
        ({"stages": STAGES, "pins": {"w0": "(R, R)"}}, "is not for a graph that is cut into stages"),
        ({"micro_batches": 2}, "give an 'objective' or 'stages' as well"),
        ({"stages": STAGES, "micro_batches": 3}, "cannot be cut into 3 micro-batches along dim 0"),
        ({"stages": STAGES, "outputs": "first"}, "must be one of all, last"),
    ],
)
def test_stages_that_do_not_fit_are_refused(graph: hidet.FlowGraph, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        hidet_dist.make_plan(graph, {"mesh_shape": [6]}, config)


def test_an_operator_that_mixes_the_batch_is_named() -> None:
    x = hidet.symbol([4, 8], "float32", "cpu")
    mixed = hidet.trace_from(hidet.ops.relu(x) - hidet.ops.mean(x, dims=[0], keep_dim=True), [x])
    config = {"stages": [{"operators": [0, len(mixed.nodes)], "mesh_shape": [1]}], "micro_batches": 2}
    with pytest.raises(ConfigError, match=r"cut into micro-batches: operator .* mixes the batch|needed both for one"):
        hidet_dist.make_plan(mixed, {"mesh_shape": [1]}, config)


@pytest.mark.parametrize("pin", ["x0", "y0"])
def test_a_batch_dim_that_ranks_split_as_well_is_refused(pin: str) -> None:
    """A rank's half of the batch is not its halves of the micro-batches."""
    x = hidet.symbol([8, 8], "float32", "cpu")
    graph = hidet.trace_from(hidet.ops.tanh(hidet.ops.relu(x)), [x])
    own = {"mesh_shape": [2], "pins": {pin: "(S0, R)"}}
    stages = [{"operators": [0, 1], "mesh_shape": [1]}, {"operators": [1, 2], "mesh_shape": [1]}]
    stages[0 if pin == "x0" else 1] |= own
    config = {"stages": stages, "micro_batches": 2, "outputs": "last"}
    with pytest.raises(PlanError, match="is split along dim 0 over the ranks of its stage"):
        hidet_dist.make_plan(graph, {"mesh_shape": [3]}, config)
    assert hidet_dist.make_plan(graph, {"mesh_shape": [3]}, {**config, "micro_batches": 1}).pipeline is not None
