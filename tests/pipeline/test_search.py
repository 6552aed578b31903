"""Pipelines that are searched, wholly or around what the user gives, from the configuration on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.errors import ConfigError, InfeasibleError, SolverError
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph, stage_graphs
from hidet_dist.pipeline import PipelineOptions, chain_search, search_pipeline, stages
from hidet_dist.simulate import simulate_pipeline
from hidet_dist.spec import DeviceMesh

# Devices so slow that computing is all that counts, and a link so slow that splitting a product does not pay.
CLUSTER = Cluster(DeviceMesh((4,)), (Link(1e-6, 1e8),), Device("slow", {"default": 1e9}, 1e9, 2**30, 1e-9))
RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (8, 32)).astype(np.float32)
LAYERS = [RNG.uniform(-1, 1, (32, 32)).astype(np.float32) / 4 for _ in range(4)]


@pytest.fixture(scope="module")
def weights() -> dict[str, hidet.Tensor]:
    return {f"layers.{n}.weight": hidet.asarray(layer) for n, layer in enumerate(LAYERS)}


@pytest.fixture(scope="module")
def graph(weights: dict[str, hidet.Tensor]) -> hidet.FlowGraph:
    """Four products, each with a tanh behind it."""
    x = y = hidet.symbol(list(X.shape), "float32", "cpu")
    for layer in weights.values():
        y = ops.tanh(ops.matmul(y, layer))
    return hidet.trace_from(y, [x])


def expected() -> np.ndarray:
    y = X
    for layer in LAYERS:
        y = np.tanh(y @ layer)
    return y


def plan_of(graph: hidet.FlowGraph, config: dict[str, Any]) -> hidet_dist.Plan:
    return hidet_dist.make_plan(graph, {"mesh_shape": [4], "machine": CLUSTER}, config)


def cuts(plan: hidet_dist.Plan) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The operators and ranks of each stage, as ranges."""
    assert plan.pipeline is not None
    return [
        ((one.operators[0], one.operators[-1] + 1), (one.ranks[0], one.ranks[-1] + 1)) for one in plan.pipeline.stages
    ]


def products(plan: hidet_dist.Plan) -> list[int]:
    """How many of the products each stage has."""
    return [sum(op.operator == "Matmul" for op in stage.operators) for stage in plan.stages]


def test_a_searched_pipeline_computes_the_graph(graph: hidet.FlowGraph) -> None:
    plan = plan_of(graph, {"objective": "throughput", "stages": 4, "micro_batches": 2, "outputs": "last"})
    assert products(plan) == [1, 1, 1, 1] and [ranks for _, ranks in cuts(plan)] == [(n, n + 1) for n in range(4)]
    assert plan.pipeline is not None and plan.pipeline.micro_batches == 2
    graphs = stage_graphs(plan, normalize(graph))
    programs = [partition_graph(own, stage) for own, stage in zip(graphs, plan.stages, strict=True)]
    (got,) = simulate_pipeline(plan.pipeline, programs, [X])
    np.testing.assert_allclose(got, expected(), rtol=1e-4, atol=1e-6)


def test_the_rest_of_what_is_given_is_searched(graph: hidet.FlowGraph, weights: dict[str, hidet.Tensor]) -> None:
    common: dict[str, Any] = {"objective": "throughput", "micro_batches": 1, "outputs": "last", "names": weights}
    halves = [{"ranks": [0, 2]}, {"ranks": [2, 4]}]
    plan = plan_of(graph, {**common, "stages": halves})
    assert products(plan) == [2, 2] and [ranks for _, ranks in cuts(plan)] == [(0, 2), (2, 4)]
    pinned = [{"ranks": [0, 2], "weights": "layers.0.*"}, {"weights": ["layers.1.weight", "layers.2.weight"]}]
    plan = plan_of(graph, {**common, "stages": pinned})
    assert products(plan) == [1, 3] and [ranks for _, ranks in cuts(plan)] == [(0, 2), (2, 4)]
    by_hand = [{"operators": [0, 6], "ranks": [0, 2]}, {"ranks": [2, 4]}]
    plan = plan_of(
        graph, {**common, "stages": by_hand, "pins": {"layers.3.weight": "(S0, R)", "op:0": "?, ? -> (S0, ?)"}}
    )
    assert cuts(plan) == [((0, 6), (0, 2)), ((6, 8), (2, 4))]
    assert str(plan.stages[1].weights[0].spec) == "(S0, R)"
    assert str(plan.stages[0].operators[0].spec.out_specs[0]) == "(S0, R)"


def test_stages_boundaries_and_idle_time_are_seen(graph: hidet.FlowGraph) -> None:
    plan = plan_of(graph, {"objective": "throughput", "stages": 2, "micro_batches": 4, "outputs": "last"})
    assert plan.pipeline is not None
    (boundary,) = plan.pipeline.boundaries
    table = plan.table()
    names = list(table.columns[1].cells)
    assert f"{boundary.tensor} to stage 1" in names
    assert names.index("stage 0") == 0 and names.index("stage 1") == names.index(f"{boundary.tensor} to stage 1") + 1
    data = plan.explain().to_data()["pipeline"]
    assert data["interval_seconds"] == max(stage["period_seconds"] for stage in data["stages"])
    assert data["interval_seconds"] == pytest.approx(plan.interval_seconds / 4)
    assert min(stage["idle_share"] for stage in data["stages"]) == 0
    shown = [list(table.columns[column].cells)[names.index(f"stage {n}")] for n in range(2) for column in (2, 4)]
    idle = [f"a micro-batch, idle {stage['idle_share']:.0%}" for stage in data["stages"]]
    assert shown == ["ranks 0-1", idle[0], "ranks 2-3", idle[1]]
    first = data["stages"][0]
    assert first["period_seconds"] == pytest.approx(first["seconds"] + boundary.seconds)
    text = str(plan.explain())
    assert "Pipeline of 2 stages and 4 micro-batches" in text
    assert f"{boundary.nbytes} bytes" in text and boundary.nbytes == 8 // 4 * 32 * 4


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"stages": 0}, "must be the number of stages"),
        ({"stages": ["all"]}, r"stages'\]\[0\] must be a dict"),
        ({"stages": [{"rank": [0, 1]}]}, "Unknown key 'rank'.*ranks, operators, weights"),
        ({"stages": [{"ranks": [2, 1]}]}, r"\['ranks'\] must be a first number and the one behind"),
        ({"stages": [{"weights": 3}]}, "must be a list of names"),
        ({"stages": [{"ranks": [0, 3]}, {}]}, "not a slice of the mesh"),
        ({"stages": [{"ranks": [2, 4]}, {"ranks": [0, 2]}]}, r"leaves the ranks 0 to 1 to 0 stages"),
        ({"stages": [{"ranks": [0, 2]}, {"ranks": [0, 4]}]}, r"stages\[1\]\['ranks'\] = .* contradicts stages\[0\]"),
        ({"stages": [{"ranks": [0, 2]}]}, "leave the ranks 2 to 3 .* to 0 stages"),
        ({"stages": [{"operators": [0, 9]}, {}]}, r"stages\[0\].* = \[0, 9\]: the graph has the operators 0 to 7"),
        ({"stages": [{"operators": [0, 4]}, {"operators": [2, 8]}]}, r"stages\[1\].*2, 8.* contradicts .* operator 4:"),
        ({"stages": [{"operators": [0, 2]}, {"operators": [4, 8]}]}, r"stages\[1\].*4, 8.* contradicts .* operator 2:"),
        ({"stages": [{}, {"operators": [2, 4]}]}, r"stages\[1\].* = \[2, 4\] leaves operators to no stage"),
        ({"stages": [{"operators": [0, 2], "weights": "*3*"}, {}]}, r"\*3\*.* contradicts .* operator 6, which"),
        ({"stages": [{"weights": "head"}, {}]}, "'head'; the graph has no such weight"),
        ({"stages": [{"weights": "layers.3.*"}, {"weights": "layers.0.*"}]}, r"stages\[0\]\['weights'\].*contradict"),
        ({"stages": [{"weights": "*0*"}, {"weights": "layers.0.*"}]}, "operator 0 reads weights of both"),
        ({"stages": 2, "pins": {"w0": "(S0, R)"}}, "give the ranks of every stage"),
        ({"stages": [{"ranks": [0, 2]}, {}], "pins": {"nothing": "(S0, R)"}}, "give the ranks of every stage"),
        ({"stages": 9}, r"stages = 9: the mesh .* cannot be divided into 9 slices"),
        ({"stages": [{"ranks": [0, 1]}, {}]}, r"stages\[1\]: the mesh .* cannot be divided into 2 slices"),
        ({"objective": "speed"}, "must be one of latency, throughput, batch"),
        ({"objective": "batch", "micro_batches": 3}, "cannot be cut into 3 micro-batches"),
        ({"objective": "batch", "micro_batches": 0}, "must be 1 to 65536, a whole number; got 0"),
        ({"objective": "batch", "mode": "propagate", "pins": {"w0": "(S0, R)"}}, "needs stages = 1"),
    ],
)
def test_what_contradicts_the_graph_the_machine_or_itself_is_refused(
    graph: hidet.FlowGraph, weights: dict[str, hidet.Tensor], config: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_of(graph, {"names": weights, **config})


def test_what_mixes_the_batch_stays_whole() -> None:
    x = hidet.symbol([8, 32], "float32", "cpu")
    y = ops.matmul(x, hidet.asarray(LAYERS[0]))
    graph = hidet.trace_from(ops.matmul(ops.softmax(y, axis=0), hidet.asarray(LAYERS[1])), [x])
    with pytest.raises(ConfigError, match="operator 1, ReduceMax, mixes the batch"):
        plan_of(graph, {"objective": "batch", "micro_batches": 2})
    found = search_pipeline(normalize(graph), CLUSTER, pipeline=PipelineOptions("batch"))
    assert found.micro.count == 1


def test_each_objective_picks_its_own_plan() -> None:
    """No device has room for all weights, and each message takes as long as a layer."""
    x = y = hidet.symbol([8, 128], "float32", "cpu")
    for _ in range(4):
        y = ops.tanh(ops.matmul(y, hidet.asarray(np.zeros((128, 128), np.float32))))
    normal = normalize(hidet.trace_from(y, [x]))
    cluster = Cluster(DeviceMesh((4,)), (Link(5e-5, 1e8),), Device("slow", {"default": 1e9}, 1e9, 150_000, 1e-9))
    found = {
        objective: search_pipeline(normal, cluster, pipeline=PipelineOptions(objective, outputs="last"))
        for objective in ("latency", "throughput", "batch")
    }
    plans = {o: (tuple((s.operators, s.part) for s in one.stages), one.micro.count) for o, one in found.items()}
    assert len(set(plans.values())) == 3, plans
    assert plans["batch"][1] == 2
    for one in found.values():
        assert one.bound_seconds <= one.value <= one.bound_seconds * (1 + 1e-3)


def test_a_budget_too_small_for_one_stage_is_met_by_several(graph: hidet.FlowGraph) -> None:
    normal = normalize(graph)
    one = search_pipeline(normal, CLUSTER, pipeline=PipelineOptions("latency", stages=1))
    assert len(one.stages) == 1
    found = search_pipeline(normal, CLUSTER, pipeline=PipelineOptions("throughput", outputs="last"), mem_budget=9000)
    assert len(found.stages) > 1


@pytest.mark.parametrize("stages", [None, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4))])
def test_a_budget_that_is_said_to_suffice_suffices(graph: hidet.FlowGraph, stages: int | None) -> None:
    normal, options = normalize(graph), PipelineOptions("throughput", stages=stages)
    for budget in (500, 4600):  # the first is less than the weights of a device, the second less than what it holds
        with pytest.raises(InfeasibleError, match=f"mem_budget = {budget} bytes was found") as refused:
            search_pipeline(normal, CLUSTER, pipeline=options, mem_budget=budget)
        enough = refused.value.least_budget
        assert f"{enough} bytes a device suffice" in str(refused.value) and enough > budget
        search_pipeline(normal, CLUSTER, pipeline=options, mem_budget=enough)


@pytest.mark.parametrize("places_shards", [False, True])
def test_a_budget_that_suffices_counts_copies_only_where_collectives_need_them(places_shards: bool) -> None:
    x = hidet.symbol([3, 256], "float32", "cpu")
    product = ops.matmul(x, hidet.asarray(np.zeros((256, 256), np.float32)))  # by columns, and then gathered
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, places_shards=places_shards))
    with pytest.raises(InfeasibleError) as refused:
        options = PipelineOptions("latency", stages=1)
        search_pipeline(normalize(hidet.trace_from(product, [x])), cluster, pipeline=options, mem_budget=500)
    whole, devices = 3 * 256 * 4, cluster.mesh.size
    shards = 256 * 256 * 4 // devices + whole // devices
    assert refused.value.least_budget == shards + 2 * whole + (0 if places_shards else whole)


def test_messages_that_take_longer_than_one_stage_decide_at_once(
    graph: hidet.FlowGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sub-mesh is looked at, and the result is proven all the same."""
    cluster = replace(CLUSTER, links=(Link(1.0, 1e8),))
    monkeypatch.setattr(chain_search, "StageBounds", None)  # which a search of sub-meshes calls
    for objective in ("latency", "throughput", "batch"):
        found = search_pipeline(normalize(graph), cluster, pipeline=PipelineOptions(objective))
        assert len(found.stages) == 1 and found.gap < 1e-3


@pytest.mark.parametrize("objective", ["latency", "throughput", "batch"])
def test_a_stage_that_cannot_be_planned_in_time_leaves_the_best_plan(
    graph: hidet.FlowGraph, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    normal, options = normalize(graph), PipelineOptions(objective, outputs="last")
    best = search_pipeline(normal, CLUSTER, pipeline=options)

    def out_of_time(*_: Any, **__: Any) -> None:
        raise SolverError("The time limit was reached before there was a plan.")

    monkeypatch.setattr(stages, "search", out_of_time)
    found = search_pipeline(normal, CLUSTER, pipeline=options)
    assert len(found.stages) == 1
    assert found.bound_seconds <= best.value
    with pytest.raises(SolverError, match="time limit"):
        search_pipeline(normal, CLUSTER, pipeline=replace(options, stages=2))
