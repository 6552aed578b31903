"""Plans derived from pins alone: what a person who pins means, and always a plan that computes the graph."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist import validate_plan
from hidet_dist.errors import ConfigError, InfeasibleError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.soundness.graphs import GRAPHS
from hidet_dist.soundness.plans import check_stage, evaluate_graph, graph_inputs, random_spec
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView

LAYER = normalize(GRAPHS["gated_decoder"](np.random.default_rng(0)))
INPUTS = graph_inputs(LAYER, np.random.default_rng(0))
WHOLE = evaluate_graph(LAYER, INPUTS)


def test_one_pinned_weight_makes_the_plan_of_megatron(mlp, toy) -> None:
    stage = search(mlp, toy((4,)), pins={"w0": "(R, S0)"}, mode="propagate").plan.stages[0]
    assert [str(op.spec) for op in stage.operators] == [
        "(R, R), (R, S0) -> (R, S0)",
        "(R, S0) -> (R, S0)",
        "(R, S0), (S0, R) -> (R, R) | all_reduce(sum, axes=0)",
    ]
    assert [str(weight.spec) for weight in stage.weights] == ["(R, S0)", "(S0, R)"]
    assert stage.communications() == ("all_reduce(sum, axes=0)",)


def test_specs_spread_backward_too(mlp, toy) -> None:
    pinned = search(mlp, toy(), pins={"t2.0": "(S0, R)", "y0": "(S0, R)", "x0": "?"}, mode="propagate").plan
    assert pinned.collectives() == {}
    assert str(pinned.stages[0].inputs[0].spec) == "(S0, R)"
    assert all(weight.spec.is_replicated for weight in pinned.stages[0].weights)


def test_two_mesh_axes_spread_side_by_side(mlp, toy) -> None:
    plan = search(mlp, toy((2, 2)), pins={"x0": "(S0, R)", "w0": "(R, S1)", "y0": "(S0, R)"}, mode="propagate").plan
    assert [str(op.spec) for op in plan.stages[0].operators] == [
        "(S0, R), (R, S1) -> (S0, S1)",
        "(S0, S1) -> (S0, S1)",
        "(S0, S1), (S1, R) -> (S0, R) | all_reduce(sum, axes=1)",
    ]


def test_without_pins_everything_stays_replicated(mlp, toy) -> None:
    plan = search(mlp, toy(), mode="propagate").plan
    assert all(op.spec.is_replicated for op in plan.stages[0].operators)
    assert plan.collectives() == {}


def test_the_smaller_tensor_is_converted_between_conflicting_pins(toy) -> None:
    """Rows of x and rows of w are split by the one axis: the smaller of the two is gathered."""
    for rows, kept in (
        (512, "(S0, R), (R, R) -> (S0, R)"),
        (2, "(R, S0), (S0, R) -> (R, R) | all_reduce(sum, axes=0)"),
    ):
        x = hidet.symbol([rows, 64], "float32", "cpu")
        graph = normalize(hidet.trace_from(hidet.ops.matmul(x, hidet.randn([64, 64], device="cpu")), [x]))
        plan = search(graph, toy(), pins={"x0": "(S0, R)", "w0": "(S0, R)"}, mode="propagate").plan
        assert str(plan.stages[0].operators[0].spec) == kept
        assert str(plan.stages[0].weights[0].spec) == "(S0, R)"


def test_a_pin_in_part_is_kept(mlp, toy) -> None:
    plan = search(mlp, toy(), pins={"w0": "(R, ?)", "x0": "(R, S0)"}, mode="propagate").plan
    assert plan.stages[0].weights[0].spec.mesh_axes_per_dim[0] == ()
    op = search(mlp, toy(), pins={"op:1": "(R, S0) -> ?"}, mode="propagate").plan.stages[0].operators
    assert str(op[1].spec) == "(R, S0) -> (R, S0)"
    assert str(op[0].spec) == "(R, R), (R, S0) -> (R, S0)"


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_a_layer_whose_columns_are_pinned_is_sharded_by_heads(mesh: tuple[int, ...]) -> None:
    """Of a LLaMA's layer the projections are pinned by columns; what comes after them follows, by rows."""
    view, axis = GraphView(LAYER), len(mesh) - 1
    matrices = [view.names[op.inputs[1]] for op in view.operators if op.name == "Matmul"]
    query, key, value, out, gate, up, down = (name for name in matrices if name in view.weights)
    pins = dict.fromkeys((query, key, value, gate, up), f"(R, S{axis})")
    plan = search(LAYER, builtin("cpu", DeviceMesh(mesh)), pins=pins, mode="propagate").plan
    assert plan.collectives() == {"all_reduce": 2}
    assert [str(plan.param_specs[name]) for name in (out, down)] == [f"(S{axis}, R)"] * 2
    assert check_stage(LAYER, plan.stages[0], INPUTS, WHOLE) == ""


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(2,), (4,), (2, 2)]))
def test_any_pins_make_a_plan_that_computes_the_graph(seed: int, mesh: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    view, cluster = GraphView(LAYER), builtin("cpu", DeviceMesh(mesh))
    names = rng.permutation([*view.weights, *view.inputs])[: rng.integers(1, 6)]
    pins = {str(name): random_spec(view.shape(name), cluster.mesh, rng) for name in names}
    plan = search(LAYER, cluster, pins=pins, mode="propagate").plan
    again = {t.name: t.spec for t in (*plan.stages[0].weights, *plan.stages[0].inputs)}
    assert {name: again[name] for name in pins} == pins
    validate_plan(plan, LAYER)
    assert check_stage(LAYER, plan.stages[0], INPUTS, WHOLE) == ""


def test_a_budget_that_the_pins_do_not_keep_is_refused(mlp, toy) -> None:
    held = 2 * 64 * 256 * 4
    with pytest.raises(InfeasibleError, match="Pin more weights") as refused:
        search(mlp, toy(), mem_budget=held // 2, mode="propagate")
    assert refused.value.least_budget >= held
    search(mlp, toy(), mem_budget=refused.value.least_budget, mode="propagate")
    with pytest.raises(ConfigError, match="mode must be one of search, propagate; got 'guess'"):
        search(mlp, toy(), mode="guess")
