"""Pipelines of several graphs that share weights: one cut, and one layout of the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.api import search_family
from hidet_dist.errors import ConfigError, InfeasibleError
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.pipeline import PipelineOptions, StageConstraint
from hidet_dist.spec import DeviceMesh

WIDTH, DEPTH = 32, 4
# Products take much longer than messages, and a collective in each layer longer than one message.
CLUSTER = Cluster(DeviceMesh((4,)), (Link(1e-6, 1e8),), Device("slow", {"default": 1e9}, 1e9, 2**30, 1e-9))
RNG = np.random.default_rng(0)
LAYERS = [RNG.uniform(-1, 1, (WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(DEPTH)]
THROUGHPUT = PipelineOptions("throughput", outputs="last")


class Model:
    """Layers of a product and a tanh; "prefill" has further operators without weights between them."""

    def __init__(self) -> None:
        self.weights = {f"layers.{n}": hidet.asarray(layer) for n, layer in enumerate(LAYERS)}

    def graph(self, rows: int, prefill: bool = False) -> hidet.FlowGraph:
        x = y = hidet.symbol([rows, WIDTH], "float32", "cpu")
        for layer in self.weights.values():
            y = ops.tanh(ops.matmul(y, layer))
            y = ops.exp(y) - 1.0 if prefill else y
        return hidet.trace_from(y, [x])


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def graphs(model: Model) -> list[hidet.FlowGraph]:
    return [model.graph(8, prefill=True), model.graph(2)]


def weights_of_stages(plan: hidet_dist.Plan) -> list[dict[str, str]]:
    """The specs of each stage's weights, by their names."""
    return [{weight.label: str(weight.spec) for weight in stage.weights} for stage in plan.stages]


def ranks(plan: hidet_dist.Plan) -> list[tuple[int, ...]]:
    assert plan.pipeline is not None
    return [tuple(stage.ranks) for stage in plan.pipeline.stages]


@pytest.mark.parametrize("decodes", [0.01, 100.0])
def test_one_cut_and_one_layout_for_all_graphs(model: Model, graphs: list[hidet.FlowGraph], decodes: float) -> None:
    factors = [1.0, decodes]
    family = search_family(graphs, CLUSTER, factors, names=model.weights, pipeline=THROUGHPUT)
    prefill, decode = family.plans
    assert weights_of_stages(prefill) == weights_of_stages(decode)
    assert ranks(prefill) == ranks(decode) and len(prefill.stages) > 1
    assert [name for stage in weights_of_stages(prefill) for name in stage] == list(model.weights)
    assert family.param_specs == {n: weight.spec for s in prefill.stages for n, weight in _labels(s)}
    values = [plan.pipeline.search.seconds for plan in family.plans if plan.pipeline and plan.pipeline.search]
    assert family.seconds == pytest.approx(sum(f * v for f, v in zip(factors, values, strict=True)))
    assert family.bound_seconds <= family.seconds


def _labels(stage: Any) -> list[tuple[str, Any]]:
    return [(weight.label, weight) for weight in stage.weights]


def test_the_better_one_of_the_graphs_own_cuts_is_taken(model: Model) -> None:
    """One graph has further products behind the first layer, the other before the last one."""

    def deeper(at: int) -> hidet.FlowGraph:
        x = y = hidet.symbol([2, WIDTH], "float32", "cpu")
        for number, layer in enumerate(model.weights.values()):
            for _ in range(3 if number == at else 0):
                y = ops.tanh(ops.matmul(y, hidet.asarray(LAYERS[0])))
            y = ops.tanh(ops.matmul(y, layer))
        return hidet.trace_from(y, [x])

    graphs = [deeper(1), deeper(3)]
    cluster = replace(CLUSTER, mesh=DeviceMesh((2,)))
    options = PipelineOptions("throughput", 1, "last", 2)
    for weights, layers in (((1, 1e-3), [1, 3]), ((1e-3, 1), [3, 1])):
        family = search_family(graphs, cluster, weights, names=model.weights, pipeline=options)
        for plan in family.plans:
            shared = [[name for name in stage if name] for stage in weights_of_stages(plan)]
            assert [len(stage) for stage in shared] == layers
        assert 0 < family.gap < 0.01


def test_a_cut_may_be_given_by_ranks_and_weights(model: Model, graphs: list[hidet.FlowGraph]) -> None:
    stages = (StageConstraint((0, 2), weights=("layers.0",)), StageConstraint((2, 4), weights=("layers.[123]",)))
    given = replace(THROUGHPUT, stages=stages)
    family = search_family(graphs, CLUSTER, names=model.weights, pipeline=given)
    for plan in family.plans:
        assert [sorted(stage) for stage in weights_of_stages(plan)] == [
            ["layers.0"],
            ["layers.1", "layers.2", "layers.3"],
        ]
        assert ranks(plan) == [(0, 1), (2, 3)]
    numbered = replace(given, stages=(StageConstraint(operators=(0, 2)), StageConstraint()))
    with pytest.raises(ConfigError, match=r"stages\[0\]\['operators'\] = \[0, 2\] number the operators of one graph"):
        search_family(graphs, CLUSTER, names=model.weights, pipeline=numbered)


def test_the_budget_is_for_the_weights_of_all_graphs(model: Model, graphs: list[hidet.FlowGraph]) -> None:
    """Shared weights are counted once, and other weights beside them."""
    other = Model()
    room = 2 * 4 * WIDTH * WIDTH + 8000  # a device has two layers
    pipeline = replace(THROUGHPUT, stages=2)
    cluster = replace(CLUSTER, mesh=DeviceMesh((2,)))
    search_family(graphs, cluster, names=model.weights, pipeline=pipeline, mem_budget=room)
    apart = [graphs[0], other.graph(2)]
    with pytest.raises(InfeasibleError):
        search_family(apart, cluster, pipeline=pipeline, mem_budget=room)
