"""Near-even parts of heads that devices do not divide, and parts of pins: chosen, proven, computed, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hidet
import numpy as np
import pytest
from hidet import ops

from hidet_dist.compile import optimize_program
from hidet_dist.errors import ConfigError
from hidet_dist.machine import Cluster, Device, Link, builtin
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import FamilyMember, search
from hidet_dist.search.formulation.parts import heads_of
from hidet_dist.simulate import simulate
from hidet_dist.soundness.graphs import GRAPHS
from hidet_dist.soundness.plans import check_calls, check_stage, evaluate_graph, graph_inputs
from hidet_dist.soundness.states import STATEFUL
from hidet_dist.spec import DeviceMesh, StagePlan
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.view import GraphView
from hidet_dist.weights import weight

HEADS, SIZE = 4, 3


def machine(*shape: int) -> Cluster:
    """Devices over free links, on which work is split as far as possible."""
    links = (Link(0.0, 1e18),) * len(shape)
    return Cluster(DeviceMesh(shape), links, Device("slow", {"default": 1e6}, 1e12, 2**40, 0.0))


def block(batch: int | str = 6) -> hidet.FlowGraph:
    """Two heads' products and an MLP: heads of queries and of keys are those of one reshape each."""
    x = hidet.symbol([batch, HEADS * SIZE], "float32", "cpu")
    query = ops.reshape(ops.matmul(x, weight("query", [HEADS * SIZE] * 2, "float32")), [x.shape[0], HEADS, SIZE])
    merged = ops.reshape(ops.relu(query), [x.shape[0], HEADS * SIZE])
    y = ops.matmul(merged, weight("out", [HEADS * SIZE] * 2, "float32"))
    inner = ops.relu(ops.matmul(y, weight("up", [HEADS * SIZE, 24], "float32")))
    return hidet.trace_from(ops.matmul(inner, weight("down", [24, HEADS * SIZE], "float32")), [x])


def weights_of(stage: StagePlan) -> dict[str, str]:
    return {tensor.label: str(tensor.spec) for tensor in stage.weights}


def assert_sound(graph: NormalGraph, stage: StagePlan) -> None:
    rng = np.random.default_rng(0)
    inputs = graph_inputs(graph, rng)
    # The graph's weights have no data: other graphs check results.
    program = partition_graph(graph, stage)
    assert program.parts
    assert len(inputs) == len(program.inputs)


def test_numbers_of_heads_are_known_with_the_dims_that_they_split() -> None:
    assert heads_of([GraphView(normalize(block()))]) == {HEADS: frozenset({HEADS, HEADS * SIZE})}


@pytest.mark.parametrize(("shape", "parts"), [((3,), "0[2,1,1]"), ((2, 3), "1[2,1,1]")])
def test_heads_that_devices_do_not_divide_are_split_nearly_evenly(shape: tuple[int, ...], parts: str) -> None:
    rng = np.random.default_rng(0)
    graph = normalize(GRAPHS["attention"](rng))
    cluster = builtin("cpu", DeviceMesh(shape))
    stage = search(graph, cluster, refine_mesh=False).plan.stages[0]
    text = " ".join(str(op.spec) for op in stage.operators)
    assert not stage.has_equal_shards
    assert f"S{parts}" in text
    inputs = graph_inputs(graph, rng)
    assert check_stage(graph, stage, inputs, evaluate_graph(graph, inputs)) == ""
    even = search(graph, cluster, refine_mesh=False, unequal_parts=False).plan.stages[0]
    assert even.has_equal_shards
    assert stage.seconds <= even.seconds * (1 + 1e-9)


def test_devices_that_divide_the_heads_have_equal_parts() -> None:
    assert search(normalize(block()), machine(2)).plan.stages[0].has_equal_shards
    assert search(normalize(block()), machine(4)).plan.stages[0].has_equal_shards


def test_pins_name_parts_and_two_weights_may_have_unlike_ones() -> None:
    pins = {
        "query": "(R, S0[3,1])",
        "out": "(S0[3,1], R)",
        "up": "(R, S0)",
        "down": "(S0, R)",
        "op:Matmul#0": "?, (R, S0[3,1]) -> (R, S0[3,1])",
    }
    stage = search(normalize(block()), machine(2), pins=pins).plan.stages[0]
    assert weights_of(stage)["query"] == "(R, S0[3,1])"
    assert weights_of(stage)["up"] == "(R, S0)"
    assert [stage.weight_bytes_of(rank) for rank in range(2)] == [
        4 * (2 * 144 * share // 4 + 2 * 12 * 24 // 2) for share in (3, 1)
    ]
    assert_sound(normalize(block()), stage)


@pytest.mark.parametrize(
    ("pins", "options", "says"),
    [
        ({"query": "(R, S0[1,1])"}, {}, "leave them out"),
        ({"query": "(R, S0[1,2,1])"}, {}, "has 3 parts along axis 0"),
        ({"query": "(R, S0[3,2])"}, {}, "into 5, which does not divide it"),
        ({"query": "(R, S0[3,1])"}, {"unequal_parts": False}, "not offered for this target"),
    ],
)
def test_parts_that_do_not_fit_are_refused(pins: Mapping[str, str], options: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        search(normalize(block()), machine(2), pins=pins, **options)


def test_unequal_parts_are_for_gpus_too() -> None:
    options = {"target": "cuda", "arch": "sm_90", "pins": {"query": "(R, S0[3,1])"}}
    (stage,) = hidet.distributed.make_plan(block(), {"mesh_shape": [2]}, options).stages
    assert {tensor.label: str(tensor.spec) for tensor in stage.weights}["query"] == "(R, S0[3,1])"


def gated(inner: int) -> hidet.FlowGraph:
    """A product of transposed matrices, and one that reduces its columns."""
    x = hidet.symbol([4, 64], "float32", "cpu")
    y = ops.relu(ops.matmul_nt(x, weight("up", [inner, 64], "float32")))
    return hidet.trace_from(ops.matmul_nt(y, weight("down", [64, inner], "float32")), [x])


@pytest.mark.parametrize(
    ("ranks", "inner", "group", "up", "down"),
    [
        (3, 352, 32, "(S0[4,4,3], R)", "(R, S0[4,4,3])"),
        (3, 352, 64, "(S0, R)", "(R, S0)"),  # 5.5 groups
        (2, 352, 32, "(S0, R)", "(R, S0)"),  # which divide the rows, though not the groups
        (3, 96, 32, "(S0, R)", "(R, S0)"),
    ],
)
def test_rows_of_few_bits_are_split_in_groups(ranks: int, inner: int, group: int, up: str, down: str) -> None:
    """Those that devices do not divide, where there are more groups than devices."""
    few_bits = {"precision": "int8", "group": group}
    options = {"weights": few_bits, "pins": {"up": "(S0, R)", "down": "(R, S0)"}, "arch": "x86-64-v4"}
    stage = hidet.distributed.make_plan(gated(inner), {"mesh_shape": [ranks]}, options).stages[0]
    assert weights_of(stage) == {"up": up, "down": down}
    for rank, part in enumerate([128, 128, 96] if "[" in up else [-(-inner // ranks)] * ranks):
        rows, columns = -(-part // group) * group, -(-part // 32) * 32  # groups, and panels, are whole
        assert stage.weight_bytes_of(rank) == 64 * (rows + columns) * (group + 2) // group


def test_symbolic_dims_are_split_equally_beside_heads_in_parts() -> None:
    symbols = {"batch": SymbolSize(8, 4)}
    pins = {"query": "(R, S0[3,1])", "op:Matmul#0": "?, (R, S0[3,1]) -> (R, S0[3,1])"}
    stage = search(normalize(block("batch")), machine(2), pins=pins, symbols=symbols).plan.stages[0]
    assert weights_of(stage)["query"] == "(R, S0[3,1])"
    for name in ("x0", "y0"):
        with pytest.raises(ConfigError, match="splits the symbolic dim batch into unequal parts"):
            search(normalize(block("batch")), machine(2, 2), pins={name: "(S0[3,1], R)"}, symbols=symbols)


def test_states_are_split_in_parts_of_heads_alike_in_all_graphs() -> None:
    """One graph for few tokens and for many: a pin of either plan holds for both."""
    rng = np.random.default_rng(0)
    stateful = STATEFUL["paged_attention"](rng)
    graph = normalize(stateful.graph)
    members = [
        FamilyMember(graph, pins={name: "(R, S0[2,1,1], R)"}, symbols={"tokens": SymbolSize(tokens)})
        for tokens, name in ((4, "keys"), (64, "values"))
    ]
    stages = [plan.stages[0] for plan in search(members, machine(3)).plans]
    for stage in stages:
        assert [str(state.spec) for state in stage.states] == ["(R, S0[2,1,1], R)"] * 2
        assert [weight.spec for weight in stage.weights] == [weight.spec for weight in stages[0].weights]
    assert check_calls(graph, stages, [stateful.draw(rng) for _ in range(4)]) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"), [("attention", 3), ("gpt2", 3), ("llama", 3), ("llama_grouped", 3), ("vit", 3)]
)
def test_compiled_kernels_compute_what_the_whole_graph_does(name: str, devices: int) -> None:
    rng = np.random.default_rng(0)
    graph = normalize(GRAPHS[name](rng))
    stage = search(graph, builtin("cpu", DeviceMesh((devices,)))).plan.stages[0]
    assert not stage.has_equal_shards
    inputs = [x.astype(own.dtype.name) for x, own in zip(graph_inputs(graph, rng), graph.inputs, strict=True)]
    doubles = [x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs]
    program = partition_graph(graph, stage)
    for got, want in zip(
        simulate(program, inputs, optimize_program(program)), evaluate_graph(graph, doubles), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
