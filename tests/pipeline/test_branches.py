"""Independent branches as stages side by side."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.machine.slices import slices_at
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph, stage_graphs
from hidet_dist.pipeline import PipelineOptions, search_pipeline
from hidet_dist.pipeline.branches import find_branches, tilings
from hidet_dist.simulate import simulate_pipeline
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView

# A link so slow that splitting a product does not pay.
CLUSTER = Cluster(DeviceMesh((4,)), (Link(1e-4, 1e8),), Device("slow", {"default": 1e9}, 1e9, 2**30, 1e-9))
RNG = np.random.default_rng(0)
WIDTH, DEPTH = 128, 3
INPUTS = [RNG.uniform(-1, 1, (1, WIDTH)).astype(np.float32) for _ in range(2)]
LAYERS = [[RNG.uniform(-1, 1, (WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(DEPTH)] for _ in range(2)]


def towers(layers: list[list[np.ndarray]] = LAYERS) -> hidet.FlowGraph:
    """The sum of two towers of products, each with a tanh behind it."""
    inputs = [hidet.symbol([1, WIDTH], "float32", "cpu") for _ in layers]
    results = []
    for x, tower in zip(inputs, layers, strict=True):
        for layer in tower:
            x = ops.tanh(ops.matmul(x, hidet.asarray(layer)))  # noqa: PLW2901
        results.append(x)
    return hidet.trace_from(ops.relu(results[0] + results[1]), inputs)


def expected() -> np.ndarray:
    results = []
    for x, tower in zip(INPUTS, LAYERS, strict=True):
        for layer in tower:
            x = np.tanh(x @ layer)  # noqa: PLW2901
        results.append(x)
    return np.maximum(results[0] + results[1], 0)


def test_towers_are_searched_side_by_side_and_compute_the_graph() -> None:
    graph = towers()
    machine = {"mesh_shape": [4], "machine": CLUSTER}
    plan = hidet_dist.make_plan(graph, machine, {"objective": "latency", "outputs": "last"})
    assert plan.pipeline is not None
    products = [sum(op.operator == "Matmul" for op in stage.operators) for stage in plan.stages]
    assert products == [DEPTH, DEPTH, 0]
    sources = {(one.source.stage, one.readers[0].stage) for one in plan.pipeline.boundaries}
    assert sources == {(0, 2), (1, 2)}  # the towers do not wait for each other
    seconds = [stage.seconds for stage in plan.stages]
    longest = max(seconds[one.source.stage] + one.seconds for one in plan.pipeline.boundaries) + seconds[2]
    assert plan.seconds == pytest.approx(longest)
    one = hidet_dist.make_plan(graph, machine, {})
    assert plan.seconds < 0.8 * one.seconds
    programs = [
        partition_graph(part, stage)
        for part, stage in zip(stage_graphs(plan, normalize(graph)), plan.stages, strict=True)
    ]
    (got,) = simulate_pipeline(plan.pipeline, programs, INPUTS)
    np.testing.assert_allclose(got, expected(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", ["latency", "throughput", "batch"])
def test_the_bound_is_below_every_given_arrangement(objective: str) -> None:
    """Plans of each order and each division of the ranks, made from given stages, are no better than the bound."""
    graph = normalize(towers([[LAYERS[0][0]], LAYERS[1]]))
    found = search_pipeline(graph, CLUSTER, pipeline=PipelineOptions(objective, outputs="last"))
    assert found.bound_seconds <= found.value <= found.bound_seconds * (1 + 1e-3)
    branches = find_branches(GraphView(graph), CLUSTER)
    assert branches is not None
    slices = {rank: slices_at(CLUSTER.mesh, rank) for rank in range(CLUSTER.mesh.size)}
    for parts in tilings(slices, 3):
        for order in (branches.branches, branches.branches[::-1]):
            stages = [
                hidet_dist.pipeline.GivenStage(numbers, DeviceMesh((part.size,)))
                for numbers, part in zip((*order, branches.join), parts, strict=True)
            ]
            plan = hidet_dist.pipeline.plan_given(graph, CLUSTER, stages, results="last").plan
            value = plan.interval_seconds if objective == "throughput" else plan.seconds
            assert value >= found.bound_seconds * (1 - 1e-6)


def test_what_is_a_branch() -> None:
    """Work of its own makes a branch; what little a branch reads, and what all share, does not."""
    one = normalize(towers([LAYERS[0]] * 1 + [[]]))
    assert find_branches(GraphView(one), CLUSTER) is None  # the other input is added as it is
    view = GraphView(normalize(towers()))
    branches = find_branches(view, CLUSTER)
    assert branches is not None and len(branches.branches) == 2
    assert sorted((*branches.branches[0], *branches.branches[1], *branches.join)) == list(range(len(view.operators)))
    x, mask = hidet.symbol([1, WIDTH], "float32", "cpu"), hidet.symbol([1, WIDTH], "float32", "cpu")
    small = ops.exp(mask)
    y = ops.tanh(ops.matmul(x, hidet.asarray(LAYERS[0][0]))) * small
    chain = ops.matmul(y, hidet.asarray(LAYERS[0][1]))
    assert find_branches(GraphView(normalize(hidet.trace_from(chain, [x, mask]))), CLUSTER) is None
