"""Stages on meshes with shares: given, searched, simulated; refused where they are not offered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster, Device, DeviceGroup, Link, unequal_cluster
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph, stage_graphs
from hidet_dist.pipeline import PipelineOptions, search_pipeline
from hidet_dist.pipeline.constraints import parse_stages
from hidet_dist.simulate import simulate_pipeline
from hidet_dist.spec import DeviceMesh, Plan
from hidet_dist.weights import weight

from .conftest import M, X, expected, traced

# Columns in shares 5:3 on two ranks; one rank; rows in shares 1:2 on two replicas each.
STAGES: list[dict[str, Any]] = [
    {
        "operators": [0, 3],
        "mesh_shape": [2],
        "shares": {"axis0": [5, 3]},
        "pins": {"w0": "(R, S0)", "y0": "(R, R, S0)"},
    },
    {"operators": [3, 5], "mesh_shape": [1]},
    {
        "operators": [5, 8],
        "mesh_shape": [2, 2],
        "mesh_axis_names": ["gpu", "copy"],
        "shares": {"gpu": [1, 2]},
        "pins": {"x0": "(R, S0, R)", "x1": "(R, S0, R)"},
    },
]
RATE = 1e10


def _simulated(plan: Plan, graph: hidet.FlowGraph, inputs: list[np.ndarray]) -> list[np.ndarray]:
    assert plan.pipeline is not None
    graphs = stage_graphs(plan, normalize(graph))
    programs = [partition_graph(own, stage) for own, stage in zip(graphs, plan.stages, strict=True)]
    return simulate_pipeline(plan.pipeline, programs, inputs)


@pytest.fixture(scope="module")
def plan(graph: hidet.FlowGraph) -> Plan:
    return hidet_dist.make_plan(graph, {"mesh_shape": [1, 7]}, {"stages": STAGES, "micro_batches": 2})


def test_given_stages_have_their_shares_and_compute_the_graph(plan: Plan, graph: hidet.FlowGraph) -> None:
    assert [str(stage.mesh) for stage in plan.stages] == ["[axis0=5:3]", "[axis0=1]", "[gpu=1:2, copy=2]"]
    assert str(plan.stages[0].outputs[0].spec) == "(R, R, S0)"
    assert [str(x.spec) for x in plan.stages[2].inputs] == ["(R, S0, R)"] * 2
    for got, want in zip(_simulated(plan, graph, [X, M]), expected(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert Plan.from_json(plan.to_json()) == plan
    columns = [str(cell) for column in plan.table().columns for cell in column.cells]
    assert "[gpu=1:2, copy=2]" in columns
    assert plan.stages[0].weight_bytes_of(0) * 3 == plan.stages[0].weight_bytes_of(1) * 5


def test_stages_whose_pins_have_parts_send_them_as_stages_with_shares_do(plan: Plan, graph: hidet.FlowGraph) -> None:
    pins = [{"w0": "(R, S0[5,3])", "y0": "(R, R, S0[5,3])"}, {}, {f"x{n}": "(R, S0[1,2], R)" for n in range(2)}]
    stages = [{**one, "pins": own} for one, own in zip(STAGES, pins, strict=True)]
    for stage in stages:
        stage.pop("shares", None)
    found = hidet_dist.make_plan(graph, {"mesh_shape": [1, 7]}, {"stages": stages, "micro_batches": 2})
    assert [str(stage.mesh) for stage in found.stages] == ["[axis0=2]", "[axis0=1]", "[gpu=2, copy=2]"]
    for got, want in zip(_simulated(found, graph, [X, M]), expected(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    ranks = range(2)
    assert list(map(found.stages[0].weight_bytes_of, ranks)) == list(map(plan.stages[0].weight_bytes_of, ranks))
    assert found.pipeline is not None
    assert plan.pipeline is not None
    assert [one.nbytes for one in found.pipeline.boundaries] == [one.nbytes for one in plan.pipeline.boundaries]


def test_a_given_plan_with_shares_is_proven_and_costed_anew(plan: Plan) -> None:
    hidet_dist.validate_plan(plan, traced())
    first = plan.stages[0]
    other = replace(plan, stages=(replace(first, mesh=DeviceMesh((2,), ("axis0",), ((7, 2),))), *plan.stages[1:]))
    with pytest.raises(hidet_dist.errors.PlanError, match="does not divide"):
        hidet_dist.validate_plan(other, traced())


def _machine(*rates: float, memory: int = 2**30, shares: tuple[int, ...] = ()) -> Cluster:
    """Devices of these rates, each alone in its group, over a link that is quick within a stage's sizes."""
    mesh = DeviceMesh((len(rates),), ("gpu",), (shares,) if shares else ())
    groups = [DeviceGroup(1, Device(f"{rate:g}", {"default": rate}, 1e30, memory, 0.0)) for rate in rates]
    return unequal_cluster(mesh, [Link(1e-6, 1e12)], groups)


def _layers(count: int = 4, size: int = 256) -> hidet.FlowGraph:
    x = y = hidet.symbol([8, size], "float32", "cpu")
    for number in range(count):
        y = ops.relu(ops.matmul(y, weight(f"layers.{number}", [size, size], "float32")))
    return hidet.trace_from(y, [x])


# Stages of a fast and a slow device each: a device's memory holds half of the layers, split by a pair.
PAIRED = {"objective": "throughput", "micro_batches": 1, "stages": [{"ranks": [0, 2]}, {"ranks": [2, 4]}]}


def test_the_stages_of_a_mesh_with_shares_have_those_of_their_devices() -> None:
    cluster = _machine(3 * RATE, RATE, RATE, 3 * RATE, shares=(6, 2, 1, 3))
    plan = hidet_dist.make_plan(_layers(), {"mesh_shape": [4], "machine": cluster}, PAIRED)
    assert [str(stage.mesh) for stage in plan.stages] == ["[gpu=3:1]", "[gpu=1:3]"]
    even = replace(cluster, mesh=cluster.mesh.without_shares())
    slower = hidet_dist.make_plan(_layers(), {"mesh_shape": [4], "machine": even}, PAIRED)
    assert plan.interval_seconds < slower.interval_seconds / 1.8


def test_shares_of_each_stage_are_searched() -> None:
    """The halves of the machine are unequal pairs, whose shares are in proportion; an equal pair would have none."""
    cluster = _machine(3 * RATE, RATE, RATE, RATE)
    config = {"mesh_shape": [4], "mesh_axis_names": ["gpu"], "machine": cluster, "shares": "auto"}
    plan = hidet_dist.make_plan(_layers(), config, PAIRED)
    assert [str(stage.mesh) for stage in plan.stages] == ["[gpu=3:1]", "[gpu=2]"]
    assert plan.pipeline is not None and plan.pipeline.search is not None and plan.pipeline.search.gap < 0.02
    given = [
        {"operators": [0, 4], "mesh_shape": [2], "mesh_axis_names": ["gpu"], "shares": "auto"},
        {"operators": [4, 8], "mesh_shape": [2], "mesh_axis_names": ["gpu"]},
    ]
    by_hand = hidet_dist.make_plan(_layers(), {"mesh_shape": [4], "machine": cluster}, {"stages": given})
    assert [str(stage.mesh) for stage in by_hand.stages] == ["[gpu=3:1]", "[gpu=2]"]


def _attention(layers: int, heads: int = 4, size: int = 16, tokens: int = 64) -> tuple[hidet.FlowGraph, np.ndarray]:
    """Layers of attention over heads, with random weights, and what they compute of ones."""
    rng, width = np.random.default_rng(0), heads * size
    x = y = hidet.symbol([tokens, width], "float32", "cpu")
    z = np.ones((tokens, width), np.float32)
    for _ in range(layers):
        matrices = [rng.standard_normal((width, width), np.float32) / 8 for _ in range(4)]
        query, key, value = (
            ops.permute_dims(ops.reshape(ops.matmul(y, hidet.asarray(one)), [tokens, heads, size]), [1, 0, 2])
            for one in matrices[:3]
        )
        shares = ops.softmax(ops.matmul(query, ops.permute_dims(key, [0, 2, 1])), 2)
        merged = ops.reshape(ops.permute_dims(ops.matmul(shares, value), [1, 0, 2]), [tokens, width])
        y = ops.tanh(ops.matmul(merged, hidet.asarray(matrices[3])))
        q, k, v = ((z @ one).reshape(tokens, heads, size).transpose(1, 0, 2) for one in matrices[:3])
        scores = np.exp(q @ k.transpose(0, 2, 1))
        mixed = scores / scores.sum(2, keepdims=True) @ v
        z = np.tanh(mixed.transpose(1, 0, 2).reshape(tokens, width) @ matrices[3])
    return hidet.trace_from(y, [x]), z


def test_searched_stages_split_heads_nearly_evenly() -> None:
    """Four heads on stages of three devices. Work takes much longer than messages and collectives."""
    graph, wanted = _attention(2)
    cluster = Cluster(DeviceMesh((6,)), (Link(1e-9, 1e15),), Device("slow", {"default": 1e6}, 1e12, 2**30, 0.0))
    pipeline = PipelineOptions("throughput", 1, stages=2, outputs="last")
    result = search_pipeline(normalize(graph), cluster, None, pipeline)
    plan = result.plan(cluster, pipeline)
    assert [str(stage.mesh) for stage in plan.stages] == ["[axis0=3]", "[axis0=3]"]
    assert not any(stage.has_equal_shards for stage in plan.stages)
    assert result.gap <= 0.02
    even = search_pipeline(normalize(graph), cluster, None, pipeline, unequal_parts=False)
    assert result.value < even.value
    (got,) = _simulated(plan, graph, [np.ones_like(wanted)])
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_pins_of_searched_stages_may_have_parts() -> None:
    """The larger part of each stage is on another device than in near-even parts: in the first one, and in the last."""
    graph, wanted = _attention(2)
    cluster = Cluster(DeviceMesh((6,)), (Link(1e-9, 1e15),), Device("slow", {"default": 1e6}, 1e12, 2**30, 0.0))
    ranks = parse_stages([{"ranks": [0, 3]}, {"ranks": [3, 6]}])
    pipeline = PipelineOptions("throughput", 1, stages=ranks, outputs="last")
    pins = {"w0": "(R, S0[1,2,1])", "w4": "(R, S0[1,1,2])"}
    result = search_pipeline(normalize(graph), cluster, None, pipeline, pins=pins, unequal_parts=True)
    plan = result.plan(cluster, pipeline)
    parts = [{weight.spec.parts for weight in stage.weights} for stage in plan.stages]
    assert ((0, (1, 2, 1)),) in parts[0]
    assert ((0, (1, 1, 2)),) in parts[1]
    free = search_pipeline(normalize(graph), cluster, None, pipeline)
    assert free.value * (1 - 1e-6) <= result.value <= 1.5 * free.value
    assert result.gap <= 0.05
    (got,) = _simulated(plan, graph, [np.ones_like(wanted)])
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    for refused in ({"w0": "(R, S0[2,1])"}, {"w4": "(R, S0[2,1])"}):  # of a mesh of two
        with pytest.raises(ConfigError, match="parts"):
            search_pipeline(normalize(graph), cluster, None, pipeline, pins=refused)
    with pytest.raises(ConfigError, match="not offered for this target"):
        search_pipeline(normalize(graph), cluster, None, pipeline, pins=pins, unequal_parts=False)


def test_one_stage_with_shares_is_among_the_candidates() -> None:
    cluster, graph = _machine(3 * RATE, RATE), normalize(_layers())
    options = PipelineOptions("latency", searches_shares=True)
    result = search_pipeline(graph, cluster, None, options)
    assert len(result.stages) == 1
    assert str(result.plan(cluster, options).stages[0].mesh) == "[gpu=3:1]"


@pytest.mark.parametrize(
    ("distributed", "config", "says"),
    [
        ({"shares": {"axis1": [1] * 6 + [2]}}, {"stages": STAGES}, "give 'shares' in each of .*stages"),
        ({}, {"stages": [{**STAGES[0], "shares": {"gpu": [5, 3]}}]}, r"stages'\]\[0\]\['shares'\] has the axis 'gpu'"),
        ({}, {"stages": [{**STAGES[0], "shares": {"axis0": [5]}}]}, "2 coordinates but 1 shares"),
        ({}, {"stages": [{**STAGES[0], "shares": 5}]}, "must map names of mesh axes"),
    ],
)
def test_shares_that_are_not_offered_are_refused(
    graph: hidet.FlowGraph, distributed: dict[str, Any], config: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        hidet_dist.make_plan(graph, {"mesh_shape": [1, 7], **distributed}, config)


def test_a_family_has_the_shares_of_the_machine_and_none_that_are_searched() -> None:
    cluster = _machine(3 * RATE, RATE, RATE, 3 * RATE, shares=(6, 2, 1, 3))
    layers = {f"layers.{number}": weight(f"layers.{number}", [64, 64], "float32") for number in range(2)}

    def graph(rows: int) -> hidet.FlowGraph:
        x = y = hidet.symbol([rows, 64], "float32", "cpu")
        for layer in layers.values():
            y = ops.relu(ops.matmul(y, layer))
        return hidet.trace_from(y, [x])

    graphs, options = [graph(8), graph(1)], PipelineOptions("throughput", 1, stages=2)
    family = hidet_dist.search_family(graphs, cluster, names=layers, pipeline=options)
    for plan in family.plans:
        assert [str(stage.mesh) for stage in plan.stages] == ["[gpu=3:1]", "[gpu=1:3]"]
    with pytest.raises(ConfigError, match=r"layers.0 = .* has parts .* not offered for stages of several graphs"):
        pins = [{"layers.0": "(R, S0[2,1])"}, None]
        hidet_dist.search_family(graphs, cluster, names=layers, pipeline=options, pins=pins)
    with pytest.raises(ConfigError, match="Shares are not searched for a family"):
        hidet_dist.search_family(graphs, cluster, names=layers, pipeline=replace(options, searches_shares=True))


def test_an_operator_that_shares_cannot_split_says_so(graph: hidet.FlowGraph) -> None:
    """No extent of a row is a multiple of 7 parts."""
    stages = [{**STAGES[0], "shares": {"axis0": [5, 2]}, "pins": {}}, *STAGES[1:]]
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [1, 7]}, {"stages": stages})
    notes = {op.note for op in plan.stages[0].operators}
    assert notes == {"not split by axis0: no factor of it has 7 equal parts"}
