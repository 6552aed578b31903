"""Plans changed by hand: checked against the graph, and costed anew."""

from __future__ import annotations

import json
from dataclasses import replace

import hidet
import numpy as np
import pytest

from hidet_dist import recost, validate_plan
from hidet_dist.errors import PlanError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.soundness.graphs import GRAPHS
from hidet_dist.spec import DeviceMesh, OpShardSpec, Plan, TensorShardSpec
from hidet_dist.view import GraphView

SPLIT = "(R, S0), (S0, R) -> (R, R) | all_reduce(sum, axes=0)"
MEGATRON = {"op:0": "(R, R), (R, S0) -> (R, S0)", "op:1": "(R, S0) -> (R, S0)", "op:2": SPLIT}


def test_an_edited_plan_is_costed_as_the_search_costs_it(mlp, toy) -> None:
    cluster = toy()
    plan = search(mlp, cluster, pins={"x0": "(S0, R)", "y0": "(S0, R)"}).plan
    assert plan.collectives() == {}
    edited = recost(
        plan.edit({**MEGATRON, "w0": "(R, S0)", "w1": "(S0, R)", "x0": "(R, R)", "y0": "(R, R)"}), mlp, cluster
    )
    validate_plan(edited, mlp)
    pinned = search(
        mlp, cluster, pins={**{n: s.partition("|")[0] for n, s in MEGATRON.items()}, **edited.param_specs}
    ).plan
    assert edited == pinned
    assert edited.seconds == pinned.seconds
    assert edited.collectives() == {"all_reduce": 1}
    assert len(partition_graph(mlp, edited.stages[0]).communications()) == 1


def test_a_plan_edited_as_json_is_validated(mlp, toy) -> None:
    plan = search(mlp, toy()).plan
    data = json.loads(plan.to_json())
    data["stages"][0]["operators"][2]["spec"] = SPLIT
    edited = Plan.from_json(json.dumps(data))
    with pytest.raises(PlanError, match=r"recost derives the conversions anew"):
        validate_plan(edited, mlp)
    again = recost(edited, mlp, toy())
    validate_plan(again, mlp)
    assert again.seconds > plan.seconds


def test_recosting_what_was_not_edited_changes_nothing(mlp, toy) -> None:
    plan = search(mlp, toy((2, 2)), mem_budget=150_000).plan
    validate_plan(plan, mlp)
    assert recost(plan, mlp, toy((2, 2))).to_json() == plan.to_json()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"op:2": "(R, S0), (S0, R) -> (R, R)"}, r"Operator 2, Matmul, cannot run as .*all_reduce"),
        ({"op:0": "(R, R), (S0, R) -> (R, S0)"}, "Operator 0, Matmul, .* does not prove"),
        ({"op:1": "(R, S0), (R, S0) -> (R, S0)"}, "Operator 1, Gelu, .* 1 inputs"),
        ({"op:1": "(S1, R) -> (S1, R)"}, "operator 1 does not fit: .* mesh axis 1"),
        ({"w1": "(S3, R)"}, "spec of w1 does not fit"),
        ({"y0": "(R, R, S0)"}, "spec of t2.0 does not fit"),
    ],
)
def test_specs_that_nothing_proves_are_refused(mlp, toy, changes, says) -> None:
    plan = search(mlp, toy()).plan.edit(changes)
    for check in (lambda: validate_plan(plan, mlp), lambda: recost(plan, mlp, toy())):
        with pytest.raises(PlanError, match=says):
            check()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"w5": "(R, R)"}, "no 'w5'"),
        ({"op:9": "(R) -> (R)"}, "no 'op:9'"),
        ({"w0": "(R, X)"}, "new spec of w0"),
        ({"op:0": TensorShardSpec.parse("(R, R)")}, "must be a OpShardSpec"),
        ({"w0": OpShardSpec.parse("(R) -> (R)")}, "must be a TensorShardSpec"),
    ],
)
def test_edits_that_name_nothing_are_refused(mlp, toy, changes, says) -> None:
    with pytest.raises(PlanError, match=says):
        search(mlp, toy()).plan.edit(changes)


def test_a_plan_must_be_of_the_graph_and_the_machine(mlp, toy) -> None:
    plan = search(mlp, toy()).plan
    x = hidet.symbol([8, 64], "float32", "cpu")
    other = normalize(hidet.trace_from(hidet.ops.relu(x), [x]))
    with pytest.raises(PlanError, match="made for the graph"):
        validate_plan(plan, other)
    with pytest.raises(PlanError, match=r"mesh \[axis0=2\]; the machine has \[axis0=4\]"):
        recost(plan, mlp, toy((4,)))
    stage = plan.stages[0]
    shorter = Plan((replace(stage, operators=stage.operators[:-1]),))
    with pytest.raises(PlanError, match="operators 0 to 2 in order"):
        validate_plan(shorter, mlp)
    wrong = Plan((replace(stage, weights=(replace(stage.weights[0], dtype="float16"), stage.weights[1])),))
    with pytest.raises(PlanError, match="float16"):
        validate_plan(wrong, mlp)


@pytest.mark.parametrize("name", ["attention", "lookup", "uneven", "experts", "fused_projection"])
@pytest.mark.parametrize("mode", ["search", "propagate"])
def test_plans_of_all_kinds_of_operators_are_valid_and_cost_what_they_say(name: str, mode: str) -> None:
    """Padded weights, lookups by rows and projections taken apart included."""
    graph = normalize(GRAPHS[name](np.random.default_rng(0)))
    cluster = builtin("dgx-a100", DeviceMesh((2,)))
    view = GraphView(graph)
    widest = max(view.weights, key=view.nbytes)
    ndim = len(view.shape(widest))
    pins = {widest: TensorShardSpec.replicated(ndim).with_dim(ndim - 1, (0,))}
    plan = search(graph, cluster, pins=pins, mode=mode).plan
    validate_plan(plan, graph)
    again = recost(plan, graph, cluster)
    assert again == plan
    assert again.seconds == plan.seconds
    assert again.to_json() == plan.to_json()
