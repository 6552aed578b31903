"""Graphs with symbolic dims in pipelines: searched as for fixed sizes, cut into micro-batches, and refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.errors import ConfigError, InputError, PlanError, SpecError
from hidet_dist.machine import Cluster, Device, Link
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph, stage_graphs
from hidet_dist.partitioning.micro_batches import micro_batch
from hidet_dist.pipeline import PipelineOptions, search_pipeline
from hidet_dist.simulate import simulate_pipeline
from hidet_dist.spec import DeviceMesh, Plan
from hidet_dist.spec.formula import check_formula, evaluate_formula
from hidet_dist.spec.symbols import SymbolPlan, SymbolSize, micro_sizes

CLUSTER = Cluster(DeviceMesh((2,)), (Link(2e-5, 1e8),), Device("slow", {"default": 1e9}, 1e9, 2**30, 1e-9))
W = [np.random.default_rng(n).uniform(-1, 1, (32, 32)).astype(np.float32) / 4 for n in range(4)]
SYMBOLS = {"batch": {"expected": 8, "multiple_of": 1}, "seq": 4}


def _layers(batch: int | str, seq: int | str = "seq", mixes: bool = False) -> hidet.FlowGraph:
    """Four layers; the second and third see the batch and the sequence as one dim."""
    x = y = hidet.symbol([batch, seq, 32])
    rows = x.shape[0] * x.shape[1]
    for number, layer in enumerate(W):
        y = ops.tanh(ops.matmul(y.reshape([rows, 32]) if number == 1 else y, hidet.asarray(layer)))
        y = y.reshape([x.shape[0], x.shape[1], 32]) if number == 2 else y
    return hidet.trace_from(y - ops.max(y, dims=[0], keep_dim=True) if mixes else y, [x])


def _expected(x: np.ndarray) -> np.ndarray:
    for layer in W:
        x = np.tanh(x @ layer)
    return x


@pytest.mark.parametrize("objective", ["latency", "throughput", "batch"])
@pytest.mark.parametrize("mixes", [False, True])
def test_the_search_is_that_of_the_expected_sizes(objective: str, mixes: bool) -> None:
    """No dim of the graph's tensors is split by two stages of one device each, so that costs are the same."""
    pipeline = PipelineOptions(objective, stages=2)
    symbols = {"batch": SymbolSize(8), "seq": SymbolSize(4)}
    found = search_pipeline(normalize(_layers("batch", mixes=mixes)), CLUSTER, pipeline=pipeline, symbols=symbols)
    fixed = search_pipeline(normalize(_layers(8, 4, mixes)), CLUSTER, pipeline=pipeline)
    assert found.value == pytest.approx(fixed.value) and found.gap <= 1e-3
    assert found.micro.count == fixed.micro.count
    assert (found.micro.count > 1) == (objective == "batch" and not mixes)
    plan = found.plan(CLUSTER, pipeline)
    assert Plan.from_json(plan.to_json()) == plan
    assert {stage.symbols[0].size for stage in plan.stages} == {8 // found.micro.count}


@pytest.mark.parametrize("kind", [pytest.param("searched", marks=pytest.mark.slow), "given"])
def test_batches_of_any_size_are_computed(kind: str) -> None:
    graph = _layers("batch")
    config: dict[str, Any] = {"symbols": SYMBOLS, "micro_batches": 3}
    if kind == "given":
        config["stages"] = [{"operators": [0, 3], "mesh_shape": [1]}, {"operators": [3, 10], "mesh_shape": [1]}]
    else:
        config |= {"objective": "batch", "stages": 2}
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2], "machine": CLUSTER}, config)
    assert plan.pipeline is not None and plan.pipeline.micro_batches == 3
    if kind == "given":
        assert plan.stages[1].inputs[0].written == ("(batch * seq)", 32)
    graphs = stage_graphs(plan, normalize(graph))
    programs = [partition_graph(own, stage) for own, stage in zip(graphs, plan.stages, strict=True)]
    for batch, seq in ((8, 4), (7, 1), (2, 3)):
        x = np.random.default_rng(batch).uniform(-1, 1, (batch, seq, 32)).astype(np.float32)
        (y,) = simulate_pipeline(plan.pipeline, programs, [x])
        np.testing.assert_allclose(y, _expected(x), rtol=1e-4, atol=1e-5)


def test_a_plan_of_other_sizes_is_refused() -> None:
    graph = _layers("batch")
    config: dict[str, Any] = {"objective": "batch", "stages": 2, "micro_batches": 2, "symbols": SYMBOLS}
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2], "machine": CLUSTER}, config)
    other = {"symbols": {"batch": 16, "seq": 4}}
    with pytest.raises(PlanError, match="symbolic dim batch of size 4"):
        hidet_dist.auto_parallel(graph, {"mesh_shape": [2], "machine": CLUSTER}, other, "never", plan=plan)


def _x(*shape: int | str) -> hidet.Tensor:
    return hidet.symbol(list(shape))


def _in_groups(size: int) -> Callable[[hidet.Tensor], hidet.Tensor]:
    def softmax(x: hidet.Tensor) -> hidet.Tensor:
        """Softmax over ``size`` groups of the batch."""
        batch = x.shape[0]
        return ops.softmax(x.reshape([size, batch // size, 8]), 1).reshape([batch, 8])

    return softmax


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        (lambda x: ops.softmax(x, 0), "operator 0, ReduceMax, mixes the batch"),
        (lambda x: x - ops.mean(x, [0]), "operator 0, ReduceMean, mixes the batch"),
        (lambda x: ops.cumsum(x, 0), "CumulativeSum, mixes the batch"),
        (lambda x: ops.flip(x, [0]), "Flip, mixes the batch"),
        (lambda x: ops.relu(x[1:]), "StridedSlice, mixes the batch"),
        (_in_groups(4), "operator 0, Reshape, depends on the size of the batch"),
    ],
)
def test_an_operator_that_mixes_a_symbolic_batch_is_named(compute: Any, says: str) -> None:
    x = _x("batch", 8)
    graph = normalize(hidet.trace_from(compute(x), [x]))
    with pytest.raises(ConfigError, match=says):
        micro_batch(graph, 2, None, [SymbolPlan("batch", 4, 16)])


def test_a_symbolic_batch_that_cannot_be_cut_is_refused() -> None:
    x, y = _x("batch", 8), _x(4, "batch")
    both = normalize(hidet.trace_from([ops.relu(x), ops.relu(y)], [x, y]))
    with pytest.raises(ConfigError, match=r"input 1 has the shape \[4, batch\], and micro-batches split no dim of it"):
        micro_batch(both, 2, None, [SymbolPlan("batch", 1, 16)])
    with pytest.raises(ConfigError, match="use at most 4 micro-batches"):
        micro_batch(normalize(hidet.trace_from(ops.relu(x), [x])), 5, None, [SymbolPlan("batch", 4, 16)])
    z = _x(4, "seq")
    with pytest.raises(ConfigError, match="make the batch symbolic"):
        micro_batch(normalize(hidet.trace_from(ops.relu(z), [z])), 2, None, [SymbolPlan("seq", 1, 16)])


def test_a_stage_that_cannot_know_a_size_is_refused() -> None:
    """The first stage has no input with the rows, which the second stage's input has."""
    x, y = _x(1, 8), _x("rows", 8)
    spread = ops.broadcast(ops.relu(x), [y.shape[0], 8])
    graph = hidet.trace_from(ops.tanh(ops.exp(spread) + y), [x, y])
    stages = [{"operators": [0, 3], "mesh_shape": [1]}, {"operators": [3, 5], "mesh_shape": [1]}]
    config: dict[str, Any] = {"stages": stages, "symbols": {"rows": 4}}
    with pytest.raises(
        ConfigError, match=r"Stage 0 has tensors of the symbolic dim rows.* stage 1 is the first to read"
    ):
        hidet_dist.make_plan(graph, {"mesh_shape": [2]}, config)
    config = {"objective": "latency", "stages": 2, "symbols": {"rows": 4}}
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, config)  # the only cut left is behind the relu, or the sum
    assert plan.pipeline is not None and plan.pipeline.stages[0].operators in ((0,), (0, 1, 2, 3))


def test_micro_batches_are_as_equal_as_their_multiple_permits() -> None:
    assert micro_sizes(12, 1, 4) == (3, 3, 3, 3)
    assert micro_sizes(14, 2, 3) == (6, 4, 4)
    assert micro_sizes(2, 1, 4) == (1, 1)
    for size in range(1, 30):
        sizes = micro_sizes(3 * size, 3, 4)
        assert sum(sizes) == 3 * size and all(n > 0 and n % 3 == 0 for n in sizes) and len(sizes) <= 4


def test_a_pipeline_of_wrong_sizes_is_refused_by_the_simulator() -> None:
    graph = _layers("batch")
    config: dict[str, Any] = {"objective": "latency", "stages": 2}
    symbols = {"symbols": {"batch": {"expected": 8, "multiple_of": 2}, "seq": 4}}
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2], "machine": CLUSTER}, {**config, **symbols})
    assert plan.pipeline is not None
    graphs = stage_graphs(plan, normalize(graph))
    programs = [partition_graph(own, stage) for own, stage in zip(graphs, plan.stages, strict=True)]
    with pytest.raises(InputError, match="batch must be a positive multiple of 2"):
        simulate_pipeline(plan.pipeline, programs, [np.zeros((3, 4, 32), np.float32)])


def test_formulas_are_arithmetic_alone() -> None:
    assert check_formula("((batch * seq) / 4)") == {"batch", "seq"}
    assert evaluate_formula("(((batch * seq) * 16) / 64) + 7 % 4", {"batch": 3, "seq": 5}) == 6
    for text in ("f(x)", "x.y", "x if y else z", "(x", "1.5", "x ** 9", "'a'", "-x", "x" * 2000):
        with pytest.raises(SpecError):
            check_formula(text)
    for text, sizes in (("a / b", {"a": 1, "b": 0}), ("a + b", {"a": 1})):
        with pytest.raises(SpecError):
            evaluate_formula(text, sizes)
