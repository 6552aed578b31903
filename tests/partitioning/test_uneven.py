"""Programs on meshes with shares: random plans against the whole graph, collectives, and their costs in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import hidet
import numpy as np
import pytest
from hidet import ops

from hidet_dist.compile import optimize_program
from hidet_dist.errors import ConfigError, PlanError
from hidet_dist.machine import Cluster, Device, DeviceGroup, Link
from hidet_dist.machine.groups import unequal_cluster
from hidet_dist.normalize import NormalGraph, normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.reshard import Step, step_seconds
from hidet_dist.reshard.cost import step_parts
from hidet_dist.rules.rule import RuleTable
from hidet_dist.search import search
from hidet_dist.simulate import simulate
from hidet_dist.soundness.graphs import GRAPHS
from hidet_dist.soundness.plans import check_stage, evaluate_graph, graph_inputs, random_stage
from hidet_dist.spec import DeviceMesh, Plan, StagePlan, TensorShardSpec
from hidet_dist.spec.partial import PartialSpec
from hidet_dist.spec.symbols import SymbolSize
from hidet_dist.view import GraphView
from hidet_dist.weights import weight

MESHES = ("[gpu=3:1]", "[gpu=1:2]", "[gpu=1:2:1]", "[node=2, gpu=1:3]", "[node=2:1, gpu=2]", "[node=3:1, gpu=1:2]")


def check_random_plans(name: str, count: int, meshes: Sequence[str] = MESHES) -> None:
    """Check random plans of a graph on meshes; some operators, weights and conversions of them must be uneven."""
    rng = np.random.default_rng(0)
    graph = normalize(GRAPHS[name](rng))
    inputs = graph_inputs(graph, rng)
    whole = evaluate_graph(graph, inputs)
    view, uneven, kinds = GraphView(graph), 0, set()
    for mesh in map(DeviceMesh.parse, meshes):
        table = RuleTable(mesh)
        for _ in range(count):
            stage = random_stage(view, mesh, table, rng)
            assert check_stage(graph, stage, inputs, whole) == "", mesh
            for op, planned in zip(view.operators, stage.operators, strict=True):
                choice = table.choice(op, planned.spec)
                assert choice is not None
                uneven += bool(choice.devices)
            kinds.update(stage.collectives())
    assert uneven > 0
    assert {"all_gather", "all_to_all", "all_reduce", "reduce_scatter"} <= kinds


def test_random_plans_compute_what_the_whole_graph_does() -> None:
    check_random_plans("mlp", 4, ("[gpu=3:1]", "[node=2, gpu=1:3]"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "fused_projection",
        "attention",
        "lookup",
        "convolutions",
        "gated_decoder",
        "gpt2",
        "llama",
        "llama_grouped",
    ],
)
def test_random_plans_of_models_compute_what_the_whole_graph_does(name: str) -> None:
    check_random_plans(name, 4)


BATCH, HIDDEN, INNER = 8, 12, 48
BYTES = 4
LATENCY, BANDWIDTH = 2e-6, 1e9
RATE = 1e9


def mlp() -> hidet.FlowGraph:
    x = hidet.symbol([BATCH, HIDDEN], "float32", "cpu")
    y = ops.matmul(
        ops.relu(ops.matmul(x, weight("up", [HIDDEN, INNER], "float32"))), weight("down", [INNER, HIDDEN], "float32")
    )
    return normalize(hidet.trace_from(y, [x]))


def device(rate: float) -> Device:
    return Device(f"{rate:g}", {"default": rate}, 1e30, 2**40, 0.0)


def machine(mesh: DeviceMesh, rates: tuple[float, ...]) -> Cluster:
    groups = [DeviceGroup(1, device(rate)) for rate in rates]
    return unequal_cluster(mesh, [Link(LATENCY, BANDWIDTH)] * mesh.ndim, groups)


PINS = {"up": "(R, S0)", "down": "(S0, R)", "op:0": "?, (R, S0) -> ?", "op:2": "?, (S0, R) -> (R, R)"}


def planned(shares: tuple[int, ...], rates: tuple[float, ...]) -> StagePlan:
    mesh = DeviceMesh((2,), ("gpu",), (shares,))
    return search(mlp(), machine(mesh, rates), pins=PINS, solver_gap=0.0).plan.stages[0]


@pytest.mark.parametrize(
    ("shares", "rates", "slowest"),
    [
        ((3, 1), (3 * RATE, RATE), 1 / 4 / RATE),  # in balance
        ((1, 3), (3 * RATE, RATE), 3 / 4 / RATE),
        ((5, 3), (3 * RATE, RATE), 3 / 8 / RATE),
        ((1, 1), (3 * RATE, RATE), 1 / 2 / RATE),
    ],
)
def test_work_takes_the_longest_of_the_devices(
    shares: tuple[int, int], rates: tuple[float, float], slowest: float
) -> None:
    stage = planned(shares, rates)
    assert stage.collectives() == {"all_reduce": 1}
    assert [str(tensor.spec) for tensor in stage.weights] == ["(R, S0)", "(S0, R)"]
    products = [op for op in stage.operators if op.operator.startswith("Matmul")]
    work = 2 * BATCH * HIDDEN * INNER  # of each product
    for op in products:
        assert op.compute_seconds == pytest.approx(work * slowest, rel=1e-9)
    reduced = 2 * (LATENCY + BATCH * HIDDEN * BYTES / (2 * BANDWIDTH))
    assert products[1].reduce_seconds == pytest.approx(reduced, rel=1e-9)
    relu = next(op for op in stage.operators if op.operator == "Relu")
    assert stage.seconds == pytest.approx(2 * work * slowest + reduced + relu.seconds, rel=1e-9)
    parts = np.array(shares) * INNER // sum(shares)
    assert [stage.weight_bytes_of(rank) for rank in range(2)] == [2 * HIDDEN * part * BYTES for part in parts]


def test_unequal_parts_are_gathered_and_scattered_as_fast_as_the_busiest_rank_is() -> None:
    mesh = DeviceMesh((2,), ("gpu",), ((5, 3),))
    cluster = machine(mesh, (RATE, RATE))
    split, whole = TensorShardSpec.parse("(R, S0)"), TensorShardSpec.parse("(R, R)")
    shape = (BATCH, 16)
    gather = step_seconds(Step("all_gather", (0,), 1), split, whole, shape, BYTES, cluster)
    assert gather == pytest.approx(LATENCY + BATCH * 10 * BYTES / BANDWIDTH, rel=1e-6)
    scatter = Step("reduce_scatter", (0,), 1, op="sum")
    partial = PartialSpec(whole, "sum", (0,))
    scattered = step_seconds(scatter, partial, split, shape, BYTES, cluster)
    assert scattered == pytest.approx(LATENCY + BATCH * 10 * BYTES / BANDWIDTH, rel=1e-6)


def test_a_program_cuts_its_weights_by_shares_and_says_where_they_are_not_offered() -> None:
    mesh = DeviceMesh((2,), ("gpu",), ((7, 5),))
    graph = mlp()
    stage = search(graph, machine(mesh, (RATE, RATE)), pins={"up": "(R, S0)"}).plan.stages[0]
    program = partition_graph(graph, stage)
    assert "up: float32[12, (part_of_gpu__7_5 * 4)]" in program.text().replace("w0", "up")
    attention = normalize(GRAPHS["attention"](np.random.default_rng(0)))
    notes = [op.note for op in search(attention, machine(mesh, (RATE, RATE))).plan.stages[0].operators]
    assert "not split by gpu: no factor of it has 12 equal parts" in notes
    assert "[gpu=7:5]" in str(Plan((stage,)).table().title)


ROWS, COLUMNS = "(S0, R)", "(R, S0)"
MOVES = {"up": COLUMNS, "down": "(R, R)", "op:0": f"?, {COLUMNS} -> {COLUMNS}", "op:2": f"{ROWS}, ? -> {ROWS}"}


def test_the_text_of_a_program_has_the_parts_that_are_cut_moved_and_joined() -> None:
    graph, mesh = mlp(), DeviceMesh((2,), ("gpu",), ((3, 1),))

    def lines(pins: dict[str, str]) -> dict[str, str]:
        stage = search(graph, machine(mesh, (RATE, RATE)), pins=pins).plan.stages[0]
        written = [line.partition(" = ")[2] for line in partition_graph(graph, stage).text().splitlines()]
        return {line.partition("(")[0]: line for line in written}

    cut = lines({"x0": "(R, R)", "op:0": f"{ROWS}, ? -> {ROWS}", "y0": "(R, R)"})
    assert "extent=(2 * part_of_gpu__3_1)" in cut["CutPart"]
    assert "JoinParts" not in cut  # parts of the first dim arrive one after the other
    moved = lines(MOVES)
    assert "all_to_all" in moved
    assert "dim=1, split=0[3,1], shape=[(2 * part_of_gpu__3_1), 48]" in moved["JoinParts"]


def test_moving_unequal_parts_takes_as_long_as_the_busiest_rank() -> None:
    """The first rank has 3/4 of 8 x 48 elements, of which it sends 1/4; the second one sends 3/4 of its quarter."""
    mesh = DeviceMesh((2,), ("gpu",), ((3, 1),))
    step, whole = Step("all_to_all", (0,), 1, 0), BATCH * INNER * BYTES
    of_columns, of_rows = map(TensorShardSpec.parse, (COLUMNS, ROWS))
    seconds = step_parts(step, of_columns, of_rows, (BATCH, INNER), BYTES, machine(mesh, (RATE, RATE)))
    assert seconds.communicate == pytest.approx(LATENCY + whole * 3 / 16 / BANDWIDTH, rel=1e-6)


def test_averages_are_not_split_unevenly() -> None:
    x = hidet.symbol([4, 12], "float32", "cpu")
    op = normalize(hidet.trace_from(ops.mean(x, [1]), [x])).nodes[0]
    specs = [str(choice.spec) for choice in RuleTable(DeviceMesh((2,), (), ((2, 1),)))(op)[1]]
    even = [str(choice.spec) for choice in RuleTable(DeviceMesh((2,)))(op)[1]]
    assert any("average" in spec for spec in even)
    assert not any("average" in spec for spec in specs)


def test_averages_of_equal_parts_are_scattered_into_unequal_ones() -> None:
    x = hidet.symbol([6, 5, 4], "float32", "cpu")
    graph = normalize(hidet.trace_from(ops.mean(x, [0]), [x]))
    pins = {"op:0": "(S0, R, R) -> (S0[2,2,1], R)"}
    stage = search(graph, Cluster(DeviceMesh((3,)), (Link(LATENCY, BANDWIDTH),), device(RATE)), pins=pins).plan.stages[
        0
    ]
    assert str(stage.operators[0].spec).endswith("reduce_scatter(average, axes=0[2,2,1], dim=0)")
    inputs = graph_inputs(graph, np.random.default_rng(0))
    assert check_stage(graph, stage, inputs, evaluate_graph(graph, inputs)) == ""


def symbolic_mlp() -> NormalGraph:
    x = hidet.symbol(["batch", HIDDEN], "float32", "cpu")
    inner = ops.relu(ops.matmul(x, weight("up", [HIDDEN, INNER], "float32")))
    return normalize(hidet.trace_from(ops.matmul(inner, weight("down", [INNER, HIDDEN], "float32")), [x]))


@pytest.mark.parametrize(("text", "uneven"), [("[gpu=2:1]", 0), ("[node=2, gpu=2:1]", 1), ("[gpu=3, node=2:1]", 1)])
def test_axes_with_shares_split_all_dims_but_symbolic_ones(text: str, uneven: int) -> None:
    """On the last mesh the even axis does not split the batch either: 3 parts are a multiple of 2 + 1."""
    mesh, graph = DeviceMesh.parse(text), symbolic_mlp()
    cluster = Cluster(mesh, (Link(LATENCY, BANDWIDTH),) * mesh.ndim, device(RATE))
    pins = {"up": f"(R, S{uneven})", "down": f"(S{uneven}, R)", "op:0": f"?, (R, S{uneven}) -> ?"}
    if text == "[node=2, gpu=2:1]":
        pins["op:0"] = "(S0, R), (R, S1) -> (S0, S1)"
    stage = search(graph, cluster, pins=pins, symbols={"batch": SymbolSize(12, 6)}).plan.stages[0]
    for op in stage.operators:
        for spec in (*op.spec.in_specs[:1], *op.spec.out_specs):
            assert spec.mesh_axes_per_dim[0] in (((), (0,)) if mesh.ndim == 2 and mesh.shape[0] == 2 else ((),))
    program = partition_graph(graph, stage)
    assert program.parts
    assert "batch" in {symbol.name for symbol in program.symbols}


def test_specs_that_split_symbolic_dims_by_shares_are_refused() -> None:
    cluster = machine(DeviceMesh((2,), ("gpu",), ((2, 1),)), (RATE, RATE))
    symbols = {"batch": SymbolSize(6, 3)}
    with pytest.raises(ConfigError, match=r"symbolic dim batch into unequal parts on the mesh \[gpu=2:1\]"):
        search(symbolic_mlp(), cluster, symbols=symbols, input_specs=[TensorShardSpec.parse("(S0, R)")])
    with pytest.raises(ConfigError, match=r"pin x0 = \(S0, R\) does not fit input 0"):
        search(symbolic_mlp(), cluster, symbols=symbols, pins={"x0": "(S0, R)"})


def test_a_plan_for_other_shares_is_not_taken_for_a_proven_one() -> None:
    graph = mlp()
    mesh = DeviceMesh((2,), ("gpu",), ((3, 1),))
    text = Plan((search(graph, machine(mesh, (RATE, RATE)), pins=PINS).plan.stages[0],)).to_json()
    stage = Plan.from_json(text).stages[0]
    assert stage.mesh == mesh
    partition_graph(graph, stage)
    with pytest.raises(PlanError, match="into 11, which does not divide it"):
        Plan.from_json(text.replace("[gpu=3:1]", "[gpu=7:4]"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [("attention", "[gpu=3:1]"), ("gpt2", "[node=2, gpu=3:1]"), ("llama", "[gpu=3:1]")]
)
def test_compiled_kernels_compute_what_the_whole_graph_does(name: str, mesh: str) -> None:
    rng = np.random.default_rng(0)
    graph = normalize(GRAPHS[name](rng))
    parsed = DeviceMesh.parse(mesh)
    free = [Link(0.0, 1e18)] * parsed.ndim
    stage = search(graph, Cluster(parsed, tuple(free), device(RATE))).plan.stages[0]
    used = {axis for op in stage.operators for spec in op.spec.in_specs for axis in spec.mesh_axes}
    assert used == set(range(parsed.ndim))
    inputs = [x.astype(own.dtype.name) for x, own in zip(graph_inputs(graph, rng), graph.inputs, strict=True)]
    doubles = [x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs]
    program = partition_graph(graph, stage)
    for optimized in (None, optimize_program(program)):
        for got, want in zip(simulate(program, inputs, optimized), evaluate_graph(graph, doubles), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
