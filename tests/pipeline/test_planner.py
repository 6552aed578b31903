"""Pipelines beside exhaustive search: every cut, every sequence of slices, every arriving spec."""

from __future__ import annotations

import itertools
import math
from functools import cache

import hidet
import pytest
from hidet import ops

from hidet_dist.errors import InfeasibleError
from hidet_dist.machine import Cluster, Device, DeviceGroup, Link, unequal_cluster
from hidet_dist.machine.slices import MeshSlice, link_between, slices_at, sub_cluster
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.pipeline import PipelineOptions, search_pipeline
from hidet_dist.pipeline.constraints import StageConstraint
from hidet_dist.pipeline.messages import delivery_seconds, message_seconds
from hidet_dist.search import SearchOptions, search
from hidet_dist.search.formulation.formulate import stored_specs
from hidet_dist.spec import DeviceMesh, Plan, TensorShardSpec
from hidet_dist.view import GraphView
from hidet_dist.weights import weight

FAST, SLOW = Link(1e-12, 100e9), Link(1e-12, 2e9)


def device(speed: float = 1.0, memory: int = 10**9) -> Device:
    return Device(f"x{speed:g}", {"default": speed * 1e12}, speed * 1e11, memory, 1e-6)


@cache
def chain(widths: tuple[int, ...], rows: int = 64) -> NormalGraph:
    """A product and a ReLU for each width but the first."""
    x = y = hidet.symbol([rows, widths[0]], "float32", "cpu")
    for n, (one, other) in enumerate(itertools.pairwise(widths)):
        y = ops.relu(ops.matmul(y, weight(f"layers.{n}", [one, other])))
    return normalize(hidet.trace_from(y, [x]))


def exhaustive(
    graph: NormalGraph,
    cluster: Cluster,
    objective: str,
    outputs: str,
    budget: int | None = None,
    stages: int | None = None,
) -> float:
    """The least value of all pipelines of one micro-batch: all cuts, slices and arriving specs, each stage searched.

    Of pipelines of any number of stages, unless one is given.
    """
    view, count, devices = GraphView(graph), len(graph.nodes), cluster.mesh.size

    @cache
    def stage(begin: int, end: int, part: MeshSlice, arrival: TensorShardSpec | None) -> float:
        own = view.subgraph(range(begin, end)).graph
        pins = {} if end == count else {"y0": "?"}
        memory = budget
        if arrival is not None and objective != "latency":
            whole = sub_cluster(cluster, part)
            held = arrival.local_nbytes(view.shape(f"t{begin - 1}.0"), 4, whole.mesh)
            memory = (whole.device.memory_bytes if budget is None else budget) - held
        elif objective != "latency":
            memory = (sub_cluster(cluster, part).device.memory_bytes if budget is None else budget) - view.nbytes("x0")
        options = SearchOptions(mem_budget=memory, pins=pins, input_specs=[arrival], solver_gap=1e-6)
        try:
            return search(own, sub_cluster(cluster, part), options, report=False, overlap=False).plan.seconds
        except InfeasibleError:
            return math.inf

    def sequences(start: int) -> list[list[MeshSlice]]:
        if start == devices:
            return [[]]
        return [[part, *rest] for part in slices_at(cluster.mesh, start) for rest in sequences(part.stop)]

    best = math.inf
    for parts in sequences(0):
        if len(parts) > count or (stages is not None and len(parts) != stages):
            continue
        delivery = delivery_seconds(cluster, parts[-1], view.nbytes(view.outputs[0])) if outputs == "all" else 0.0
        for cuts in itertools.combinations(range(1, count), len(parts) - 1):
            places = (0, *cuts, count)
            arrivals = [
                stored_specs(view.shape(f"t{cut - 1}.0"), sub_cluster(cluster, part).mesh, False)
                for cut, part in zip(cuts, parts[1:], strict=True)
            ]
            for specs in itertools.product(*arrivals):
                own = [stage(places[k], places[k + 1], part, ((None, *specs)[k])) for k, part in enumerate(parts)]
                for k, spec in enumerate(specs):
                    link = link_between(cluster, parts[k], parts[k + 1])
                    target = sub_cluster(cluster, parts[k + 1])
                    sent = message_seconds(view, f"t{cuts[k] - 1}.0", parts[k].size, target, spec, link)
                    own[k] += sent
                    if objective == "throughput":
                        own[k + 1] += sent
                own[-1] += delivery
                best = min(best, sum(own) if objective == "latency" else max(own))
    return best


MACHINES = {
    "two nodes": Cluster(DeviceMesh((2, 2), ("node", "gpu")), (SLOW, FAST), device()),
    "unequal": unequal_cluster(DeviceMesh((2,)), (SLOW,), [DeviceGroup(1, device(1)), DeviceGroup(1, device(3))]),
    "shares": unequal_cluster(
        DeviceMesh((4,), ("gpu",), ((1, 3, 1, 3),)), (SLOW,), [DeviceGroup(1, device(n)) for n in (1, 3, 1, 3)]
    ),
}


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize(
    ("machine", "widths", "budget"),
    [
        ("two nodes", (256, 512, 256), None),
        ("unequal", (512, 64, 1024, 128), None),
        ("unequal", (256, 512, 256), 900_000),  # the weights take 1 MiB
    ],
)
def test_no_pipeline_is_better_than_the_one_found(
    objective: str, machine: str, widths: tuple[int, ...], budget: int | None
) -> None:
    cluster, graph = MACHINES[machine], chain(widths)
    options = PipelineOptions(objective, micro_batches=1, outputs="last")
    found = search_pipeline(graph, cluster, pipeline=options, solver_gap=1e-6, mem_budget=budget)
    least = exhaustive(graph, cluster, objective, "last", budget)
    assert found.value == pytest.approx(least, rel=1e-5)
    assert found.bound_seconds <= found.value <= found.bound_seconds * (1 + 1e-5)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_no_pipeline_of_slices_with_shares_is_better_than_the_one_found(objective: str) -> None:
    cluster, graph = MACHINES["shares"], chain((512, 1024, 512))
    options = PipelineOptions(objective, micro_batches=1, outputs="last", stages=2)
    found = search_pipeline(graph, cluster, pipeline=options, solver_gap=1e-6, mem_budget=2_600_000)
    least = exhaustive(graph, cluster, objective, "last", 2_600_000, stages=2)
    assert found.value == pytest.approx(least, rel=1e-5)
    assert found.bound_seconds <= found.value <= found.bound_seconds * (1 + 1e-5)
    assert [str(stage.plan.mesh) for stage in found.stages] == ["[gpu=1:3]"] * 2


@pytest.mark.parametrize("latency_seconds", [1e-6, 1e-3])
@pytest.mark.parametrize("objective", ["throughput", "batch"])
def test_no_number_of_micro_batches_is_better_than_the_one_found(objective: str, latency_seconds: float) -> None:
    """Also where the costs of one micro-batch alone prove that more of them are worse."""
    graph = chain((64, 64, 64, 64), 8)
    slow = Device("slow", {"default": 1e9}, 1e9, 2**30, 1e-6)
    cluster = Cluster(DeviceMesh((2,)), (Link(latency_seconds, 1e8),), slow)
    found = search_pipeline(graph, cluster, pipeline=PipelineOptions(objective))
    pinned = [search_pipeline(graph, cluster, pipeline=PipelineOptions(objective, n)) for n in (1, 2, 4, 8)]
    assert found.value <= min(one.value for one in pinned) * (1 + 1e-2)
    assert found.bound_seconds <= min(one.value for one in pinned) * (1 + 1e-9)
    assert found.gap <= 1e-2


@pytest.mark.parametrize("outputs", ["all", "last"])
@pytest.mark.parametrize("objective", ["latency", "throughput", "batch"])
def test_the_plan_predicts_what_the_search_counts(objective: str, outputs: str) -> None:
    """Messages, and the delivery of outputs; one output is of the first stage."""
    x = hidet.symbol([4, 64], "float32", "cpu")
    first = ops.tanh(ops.matmul(x, weight("w0", [64, 64])))
    graph = normalize(hidet.trace_from([ops.tanh(ops.matmul(first, weight("w1", [64, 64]))), first], [x]))
    cluster = Cluster(DeviceMesh((2,)), (Link(1e-5, 1e8),), Device("slow", {"default": 1e9}, 1e9, 2**30, 1e-6))
    options = PipelineOptions(objective, 2, outputs, (StageConstraint(operators=(0, 2)), StageConstraint()))
    result = search_pipeline(graph, cluster, pipeline=options)
    plan = result.plan(cluster, options)
    assert plan.pipeline is not None and {y.source.stage for y in plan.pipeline.outputs} == {0, 1}
    assert plan.pipeline.period_seconds([stage.seconds for stage in plan.stages]) == pytest.approx(result.periods)
    assert (plan.pipeline.delivery_seconds > 0) == (outputs == "all")
    value = plan.interval_seconds if objective == "throughput" else plan.seconds
    if objective == "latency":  # of one micro-batch
        value -= plan.interval_seconds / 2
    assert value == pytest.approx(result.value)
    assert Plan.from_json(plan.to_json()) == plan
