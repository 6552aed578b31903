"""Specs that the user decides on: what is pinned is in the plan, and what cannot be is refused."""

from __future__ import annotations

import hidet
import pytest

from hidet_dist.errors import ConfigError, InfeasibleError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh, OpShardSpec, SpecPattern, TensorShardSpec

HIDDEN, INNER = 64, 256


def spec(text):
    return TensorShardSpec.parse(text)


def test_every_kind_of_tensor_and_operator_can_be_pinned(mlp, toy) -> None:
    pins = {"w0": "(R, S0)", "t1.0": "(?, S0)", "op:2": "?, (S0, R) -> (R, R)", "x0": "(S0, R)", "y0": "(R, S0)"}
    stage = search(mlp, toy(), pins=pins).plan.stages[0]
    assert stage.weights[0].spec == spec("(R, S0)")
    assert stage.operators[1].spec.out_specs[0] == spec("(R, S0)")
    assert str(stage.operators[2].spec) == "(R, S0), (S0, R) -> (R, R) | all_reduce(sum, axes=0)"
    assert stage.inputs[0].spec == spec("(S0, R)")
    assert stage.outputs[0].spec == spec("(R, S0)")


def test_a_pin_in_part_leaves_the_rest_to_the_search(mlp, toy) -> None:
    cluster = toy((2, 2))
    free = search(mlp, cluster).plan
    for pattern in ("(S0, ?)", "(?, S0)", "(?, S01)", "(R, ?)"):
        part = search(mlp, cluster, pins={"t1.0": pattern}).plan
        own = part.stages[0].operators[1].spec.out_specs[0]
        assert SpecPattern.parse(pattern).matches(own)
        assert part.seconds >= free.seconds
        # Pinned whole to what the search chose for the free part, nothing changes.
        assert search(mlp, cluster, pins={"t1.0": own}).plan.seconds == pytest.approx(part.seconds)
    # What is wholly free is no pin for an activation, and frees how an input arrives.
    assert search(mlp, cluster, pins={"t1.0": "?"}).plan.seconds == free.seconds
    assert search(mlp, cluster, pins={"x0": "?", "y0": "?"}).plan.seconds <= free.seconds


def test_the_plan_with_pins_is_the_best_of_those_that_have_them(mlp, toy) -> None:
    """Over all specs that a weight can be pinned to, the least is what the search finds by itself."""
    cluster = toy((2,))
    free = search(mlp, cluster, solver_gap=0.0).plan.seconds
    each = [
        search(mlp, cluster, solver_gap=0.0, pins={"w1": text}).plan.seconds
        for text in ("(R, R)", "(S0, R)", "(R, S0)")
    ]
    assert min(each) == pytest.approx(free)


def test_operators_are_named_by_number_name_and_place(mlp, toy) -> None:
    rows = OpShardSpec.parse("(S0, R), (R, R) -> (S0, R)")
    for name in ("op:2", "op:Matmul#1"):
        stage = search(mlp, toy(), pins={name: rows}).plan.stages[0]
        assert stage.operators[2].spec == rows
    assert search(mlp, toy(), pins={"op:Gelu": "(S0, R) -> (S0, R)"}).plan.stages[0].operators[1].spec.in_specs[
        0
    ] == spec("(S0, R)")


def test_the_users_names_stand_in_pins_and_in_the_plan(toy) -> None:
    class Block(hidet.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = hidet.randn([HIDDEN, INNER], device="cpu")
            self.fc2 = hidet.randn([INNER, HIDDEN], device="cpu")

        def forward(self, x):
            return hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(x, self.fc1)), self.fc2)

    block = Block()
    x = hidet.symbol([8, HIDDEN], "float32", "cpu")
    graph = normalize(hidet.trace_from(block(x), [x]))
    names = {**dict(block.named_parameters()), "tokens": x}
    plan = search(graph, toy(), pins={"fc1": "(?, S0)", "tokens": "(S0, R)"}, names=names).plan
    assert plan.param_specs["fc1"].mesh_axes_per_dim[1] == (0,)
    assert [tensor.label for tensor in (*plan.stages[0].weights, *plan.stages[0].inputs)] == ["fc1", "fc2", "tokens"]
    again = search(graph, toy(), pins=plan.param_specs, names=block).plan
    assert again.param_specs == plan.param_specs
    assert str(plan.edit({"fc2": "(S0, R)"}).param_specs["fc2"]) == "(S0, R)"
    with pytest.raises(ConfigError, match="did you mean fc"):
        search(graph, toy(), pins={"fc3": "(R, S0)"}, names=block)
    with pytest.raises(ConfigError, match=r"The pins fc1 = .* and w0 = .* contradict"):
        search(graph, toy(), pins={"fc1": "(R, S0)", "w0": "(S0, R)"}, names=block)
    with pytest.raises(ConfigError, match="a hidet Module"):
        search(graph, toy(), names=3)


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (
            {"t1.0": "(S0, ?)", "op:1": "(R, S0) -> (R, S0)"},
            r"t1.0 = \(S0, \?\) and op:1 = \(R, S0\) -> \(R, S0\) contra",
        ),
        ({"op:0": "(S0, ?), ? -> ?", "op:Matmul#0": "?, (R, S0) -> ?"}, "op:0 = .* and op:Matmul#0 = .* contradict"),
        ({"x0": "(S0, R)"}, r"input_specs\[0\] = \(R, S0\) and x0 = \(S0, R\) contradict"),
        ({"w9": "(R, R)"}, "nothing called 'w9'"),
        ({"t7.0": "(R, R)"}, "nothing called 't7.0'"),
        ({"y1": "(R, R)"}, "nothing called 'y1'"),
        ({"op:9": "? -> ?"}, "no operator 9"),
        ({"op:Matmul": "?, ? -> ?"}, r"2 operators called Matmul \(0, 2\)"),
        ({"op:Softmax": "? -> ?"}, "no operator 'Softmax'"),
        ({"op:1": "?, ? -> ?"}, "1 and 1"),
        ({"w0": "(R, R, R)"}, "3 dims"),
        ({"w0": "(S1, R)"}, "mesh axis 1"),
        ({"w0": "(S0, S0)"}, "only once"),
        ({"w0": "? -> ?"}, "Not a pattern"),
        ({"w0": 3}, "must be a tensor's spec"),
        ({"op:1": "(R, R)"}, "Not a pattern of an operator's spec"),
        (
            {"op:2": "(R, S0), (R, S0) -> ?"},
            r"op:2 = .* cannot be met: operator 2, Matmul, can only be .*\(R, S0\), \(S0, R\)",
        ),
    ],
)
def test_pins_that_cannot_be_met_are_refused(mlp, toy, pins, says) -> None:
    with pytest.raises(ConfigError, match=says):
        search(mlp, toy(), input_specs=[spec("(R, S0)")], pins=pins)


def test_three_pins_can_clash_where_no_two_do(mlp, toy) -> None:
    pins = {"op:0": "(S0, ?), ? -> ?", "op:Matmul#0": "?, (?, S1) -> ?", "t0.0": "(S0, S1)"}
    assert str(search(mlp, toy((2, 2)), pins=pins).plan.stages[0].operators[0].spec) == "(S0, R), (R, S1) -> (S0, S1)"


def test_a_pin_that_does_not_divide_says_so(toy) -> None:
    x = hidet.symbol([6, 6], "float32", "cpu")
    graph = normalize(hidet.trace_from(hidet.ops.relu(x), [x]))
    with pytest.raises(ConfigError, match=r"x0 .* does not fit input 0: .* splits dim 0"):
        search(graph, toy((4,)), pins={"x0": "(S0, R)"})
    with pytest.raises(ConfigError, match=r"t0.0 = \(S0, \?\) cannot be met: operator 0, Relu, can only be \(R, R\)"):
        search(graph, toy((4,)), pins={"t0.0": "(S0, ?)"})


def test_pins_count_in_the_least_budget(mlp, toy) -> None:
    whole = HIDDEN * INNER * 4
    with pytest.raises(InfeasibleError) as refused:
        search(mlp, toy((4,)), mem_budget=whole, pins={"w0": "(R, R)"})
    assert refused.value.least_budget >= whole + whole // 4


def test_weights_of_one_graph_are_pinned_to_the_layout_of_another(toy) -> None:
    """A prefill and a decode graph of the same weights: what was planned for the one is pinned in the other."""
    up, down = hidet.randn([HIDDEN, INNER], device="cpu"), hidet.randn([INNER, HIDDEN], device="cpu")

    def graph(rows: int) -> hidet.FlowGraph:
        x = hidet.symbol([rows, HIDDEN], "float32", "cpu")
        return normalize(hidet.trace_from(hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(x, up)), down), [x]))

    cluster = builtin("dgx-a100", DeviceMesh((4,)))
    decode = search(graph(1), cluster, mem_budget=2**16, names={"up": up, "down": down}).plan
    prefill = search(graph(512), cluster, names={"up": up, "down": down}, pins=decode.param_specs).plan
    assert set(decode.param_specs) == {"up", "down"}
    assert prefill.param_specs == decode.param_specs
    assert not all(own.is_replicated for own in prefill.param_specs.values())
