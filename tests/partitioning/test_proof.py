"""Plans are proven before they are used: a plan that was changed is refused by name, or computes the same."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from typing import Any

import hidet
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hidet_dist.errors import ConfigError, InfeasibleError, PlanError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import partition_graph
from hidet_dist.rules.rule import RuleTable, derive
from hidet_dist.search import search
from hidet_dist.soundness.check import check_specs, random_inputs
from hidet_dist.soundness.instances import MAKERS, instance
from hidet_dist.soundness.plans import check_stage, evaluate_graph, graph_inputs, random_stage
from hidet_dist.spec import DeviceMesh, OpShardSpec, Plan, TensorShardSpec
from hidet_dist.view import GraphView

MEGATRON = {"w0": "(R, S0)", "w1": "(S0, R)", "op:2": "(R, S0), (S0, R) -> (R, R)"}


def constant(*shape: int) -> hidet.Tensor:
    return hidet.asarray(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


@cache
def mlp() -> hidet.FlowGraph:
    x = hidet.symbol([4, 8], "float32", "cpu")
    hidden = hidet.ops.relu(hidet.ops.matmul(x, constant(8, 12)))
    return normalize(hidet.trace_from(hidet.ops.matmul(hidden, constant(12, 8)), [x]))


@cache
def planned(mesh: tuple[int, ...]) -> Plan:
    """A plan with reduce functions and conversions: of the input, between operators, and of the output."""
    pins = {**MEGATRON, "x0": "(S0, R)", "y0": "(S0, R)", "op:1": "(R, S0) -> (R, S0)"}
    plan = search(mlp(), builtin("cpu", DeviceMesh(mesh)), pins=pins).plan
    assert len(plan.stages[0].communications()) >= 2
    return plan


@cache
def expected() -> tuple[list[Any], list[Any]]:
    inputs = graph_inputs(mlp(), np.random.default_rng(1))
    return inputs, evaluate_graph(mlp(), inputs)


def edited(plan: Plan, change: Any) -> Plan:
    """The plan with its JSON form changed in place by ``change(stage)``."""
    data = json.loads(plan.to_json())
    change(data["stages"][0])
    return Plan.from_json(json.dumps(data))


def set_item(*path: Any, to: Any) -> Any:
    def change(stage: Any) -> None:
        for key in path[:-1]:
            stage = stage[key]
        stage[path[-1]] = to

    return change


def drop_reduce_fns(stage: Any) -> None:
    stage["operators"][2]["spec"] = stage["operators"][2]["spec"].partition("|")[0]


def drop_conversion(stage: Any) -> None:
    next(op for op in stage["operators"] if op["connections"])["connections"].pop()


def swap_operators(stage: Any) -> None:
    operators = stage["operators"]
    operators[0], operators[1] = operators[1], operators[0]


def swap_weights(stage: Any) -> None:
    stage["weights"].reverse()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop_reduce_fns, r"Operator 2, Matmul, cannot run as .* It can run as .*\|"),
        (drop_conversion, "lists no conversion of x0 from .* at operator 0, Matmul"),
        (swap_operators, r"operators 0 to 2 in order; it has \[1, 0, 2\]"),
        (swap_weights, r"weights are \['w1', 'w0'\]; the graph's are \['w0', 'w1'\]"),
        (set_item("operators", 1, "operator", to="Gelu"), "Operator 1 of the plan is Gelu; the graph has Relu"),
        (set_item("operators", 1, "spec", to="(S0, R) -> (R, S0)"), "Operator 1, Relu, cannot run as"),
        (set_item("fingerprint", to="0" * 16), "made for the graph 0000"),
        (set_item("mesh", to="[axis0=3]"), "does not fit: .* splits dim 0"),
        (set_item("weights", 0, "shape", to=[12, 8]), r"has w0 as float32\[12, 8\]"),
        (set_item("weights", 0, "nbytes", to=4 * 8 * 13), "does not fit: .* cannot have 416 bytes"),
        (set_item("weights", 0, "dtype", to="int32"), "has w0 as int32"),
        (set_item("weights", 0, "written", to=["n", 12]), "writes the shape of w0 as"),
        (set_item("inputs", 0, "spec", to="(R, S1)"), "spec of x0 does not fit: .* mesh axis 1"),
        (set_item("symbols", to=[{"name": "n", "multiple_of": 1, "size": 4}]), "does not fit the graph: .*'n'"),
        (
            set_item(
                "overlap",
                to={
                    "seconds": 0.0,
                    "held_bytes": 0,
                    "communications": [
                        {
                            "operator": 1,
                            "tensor": "t1.0",
                            "step": "all_reduce(sum, axes=0)",
                            "seconds": 0.0,
                            "hidden_seconds": 0.0,
                        }
                    ],
                },
            ),
            "schedule has the collective all_reduce.* of t1.0 at operator 1",
        ),
    ],
)
def test_an_edited_plan_is_refused_by_name_wherever_it_is_taken(change: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        hidet.distributed.validate_plan(edited(planned((2,)), change), mlp())
    with pytest.raises(PlanError, match=says):
        hidet.distributed.partition(mlp(), edited(planned((2,)), change))


SPEC = st.sampled_from(
    ["(R, R)", "(S0, R)", "(R, S0)", "(S1, R)", "(R, S1)", "(S01, R)", "(R, S10)", "(S0, S1)", "(R)"]
)
FN = st.sampled_from(
    ["all_reduce(sum, axes=0)", "all_reduce(max, axes=0)", "all_reduce(sum, axes=01)", "all_reduce(sum, axes=1)"]
    + [f"reduce_scatter(sum, axes={axes}, dim={dim})" for axes in ("0", "1", "10") for dim in (0, 1)]
)
STEP = st.sampled_from(
    [
        "all_gather(axes=0, dim=0)",
        "all_gather(axes=0, dim=1)",
        "slice(axes=0, dim=0)",
        "slice(axes=1, dim=1)",
        "all_to_all(axes=0, dim=0, to_dim=1)",
        "all_reduce(sum, axes=0)",
    ]
)
MESH = st.sampled_from(["[a=4]", "[a=1]", "[a=2, b=2]", "[a=4, b=1]", "[a=3]", "[b=2, a=4]"])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [own for key, one in inside for own in ((*path, key), *places(one, (*path, key)))]


KINDS = st.sampled_from(["operator", "reduce", "tensor", "conversion", "steps", "swap", "copy", "mesh"])


def mutate(data: st.DataObject, stage: Any, kind: str) -> None:
    """Change a stage's JSON form as an editor of plans might."""
    operators = stage["operators"]
    own = data.draw(st.sampled_from(operators))
    lists = [op["connections"] for op in operators] + [stage["output_connections"]]
    if kind == "operator":
        count = own["spec"].partition("->")[0].count("(")
        specs = [data.draw(SPEC) for _ in range(count + 1)]
        own["spec"] = f"{', '.join(specs[:-1])} -> {specs[-1]}"
    elif kind == "reduce":
        fns = " ".join(data.draw(st.lists(FN, max_size=2)))
        own["spec"] = own["spec"].partition("|")[0].strip() + (f" | {fns}" if fns else "")
    elif kind == "tensor":
        data.draw(st.sampled_from(stage["weights"] + stage["inputs"] + stage["outputs"]))["spec"] = data.draw(SPEC)
    elif kind == "conversion":
        conversions = data.draw(st.sampled_from([one for one in lists if one] or [[]]))
        if conversions:
            moved = conversions.pop(data.draw(st.integers(0, len(conversions) - 1)))
            if data.draw(st.booleans()):
                data.draw(st.sampled_from(lists)).append(moved)
    elif kind == "steps":
        for one in [one for conversions in lists for one in conversions]:
            one["steps"] = data.draw(st.lists(STEP, max_size=2))
    elif kind == "swap":
        other = data.draw(st.sampled_from(operators))
        own["spec"], other["spec"] = other["spec"], own["spec"]
    elif kind == "copy":
        paths = places(stage)
        source, target = data.draw(st.sampled_from(paths)), data.draw(st.sampled_from(paths))
        value: Any = stage
        for key in source:
            value = value[key]
        set_item(*target, to=copy.deepcopy(value))(stage)
    else:
        stage["mesh"] = data.draw(
            st.sampled_from(["[a=4]", "[a=1]", "[a=2, b=2]", "[a=4, b=1]", "[a=3]", "[b=2, a=4]"])
        )
    return kind


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_mutated_plan_is_refused_or_computes_the_same(data: st.DataObject) -> None:
    plan = planned(data.draw(st.sampled_from([(2,), (2, 2)])))
    changed = json.loads(plan.to_json())
    # What is copied to any place comes last: nothing is where it was after it.
    kinds = sorted(data.draw(st.lists(KINDS, min_size=1, max_size=2, unique=True)), key="copy".__eq__)
    for kind in kinds:
        mutate(data, changed["stages"][0], kind)
    inputs, whole = expected()
    try:
        assert check_stage(mlp(), Plan.from_json(json.dumps(changed)).stages[0], inputs, whole) == ""
        event(f"equal after {kinds}")
    except PlanError:
        event("refused")


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_edited_specs_are_refused_or_compute_the_same_once_recosted(data: st.DataObject) -> None:
    """Conversions follow from the specs, so that far more edits are plans."""
    mesh = data.draw(st.sampled_from([(2,), (2, 2)]))
    plan, (inputs, whole) = planned(mesh), expected()
    names = data.draw(st.lists(st.sampled_from(["w0", "w1", "x0", "y0", "op:0", "op:1", "op:2"]), min_size=1))
    changes = {}
    for name in names:
        if name.startswith("op:"):
            choices = derive(mlp().nodes[int(name[3:])]).choices(DeviceMesh(mesh))
            spec = str(data.draw(st.sampled_from(choices)).spec)
            changes[name] = spec.partition("|")[0].strip() if data.draw(st.integers(0, 9)) == 0 else spec
        else:
            changes[name] = data.draw(SPEC)
    try:
        again = hidet.distributed.recost(plan.edit(changes), mlp(), builtin("cpu", DeviceMesh(mesh)))
    except PlanError:
        event("refused")
        return
    event("taken")
    assert check_stage(mlp(), again.stages[0], inputs, whole) == ""
    hidet.distributed.validate_plan(Plan.from_json(again.to_json()), mlp())


# Proving one spec, against all the choices that the rule derives.

every_class = pytest.mark.parametrize(
    "cls", MAKERS, ids=lambda cls: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
)


def reversed_axes(spec: OpShardSpec) -> OpShardSpec:
    """The spec with the mesh axes that share a dim in the opposite order."""

    def turned(own: TensorShardSpec) -> TensorShardSpec:
        return TensorShardSpec(tuple(axes[::-1] for axes in own.mesh_axes_per_dim))

    return OpShardSpec(tuple(map(turned, spec.in_specs)), tuple(map(turned, spec.out_specs)), spec.reduce_fns)


@every_class
def test_a_spec_is_proven_alone_as_among_all_choices(cls: type[hidet.Operator]) -> None:
    made = instance(cls, np.random.default_rng(1))
    rule = derive(made.op)
    for mesh in map(DeviceMesh, ((2,), (2, 3))):
        choices = {choice.spec: choice for choice in rule.choices(mesh)}
        for spec, choice in choices.items():
            assert rule.choice(spec, mesh) == choice
            for number, fns in enumerate(spec.reduce_fns):
                if fns:  # without its reduce functions the output is partial
                    without = (*spec.reduce_fns[:number], (), *spec.reduce_fns[number + 1 :])
                    assert rule.choice(replace(spec, reduce_fns=without), mesh) is None
    mesh = DeviceMesh((2, 2))
    turned = [reversed_axes(choice.spec) for choice in rule.choices(mesh)]
    proven = [spec for spec in dict.fromkeys(turned) if rule.choice(spec, mesh) is not None]
    inputs = random_inputs(made.op, np.random.default_rng(2), made.ranges)
    assert not check_specs(made.op, mesh, proven, inputs, rule).failures


def test_a_result_that_is_a_weight_is_not_padded() -> None:
    """The memory of a weight may be padded; what a caller is given is not."""
    x, weight = hidet.symbol([4, 5]), constant(5, 7)
    graph = normalize(hidet.trace_from([hidet.ops.matmul(x, weight), weight], [x]))
    mesh = DeviceMesh((2,))
    view, rng = GraphView(graph), np.random.default_rng(0)
    inputs = graph_inputs(graph, rng)
    whole, table = evaluate_graph(graph, inputs), RuleTable(mesh)
    for _ in range(12):
        drawn = random_stage(view, mesh, table, rng)
        assert check_stage(graph, drawn, inputs, whole, table) == ""
    padded = replace(drawn.outputs[1], spec=TensorShardSpec.parse("(S0, R)"))
    with pytest.raises(PlanError, match=r"w0 does not fit: .* which does not divide it"):
        partition_graph(graph, replace(drawn, outputs=(drawn.outputs[0], padded)))


# From an edited plan to artifacts


def test_a_plan_is_made_without_weights_data_edited_and_built(tmp_path: Any) -> None:
    x, w0, w1 = hidet.symbol([4, 8]), hidet.distributed.weight("a", [8, 12]), hidet.distributed.weight("b", [12, 8])
    graph = hidet.trace_from(hidet.ops.matmul(hidet.ops.relu(hidet.ops.matmul(x, w0)), w1), [x])
    plan = hidet.distributed.make_plan(graph, {"mesh_shape": [2]})
    split = {"a": "(R, S0)", "b": "(S0, R)", "op:0": "(R, R), (R, S0) -> (R, S0)", "op:1": "(R, S0) -> (R, S0)"}
    split["op:2"] = "(R, S0), (S0, R) -> (R, R) | all_reduce(sum, axes=0)"
    arguments = (mlp(), {"mesh_shape": [2]}, {}, tmp_path / "artifacts")
    other = plan.edit({**split, "op:2": "(R, S0), (S0, R) -> (R, R)"})
    other = Plan((replace(other.stages[0], weights=tuple(replace(w, label="") for w in other.stages[0].weights)),))
    with pytest.raises(PlanError, match="Operator 2, Matmul, cannot run as"):
        hidet.distributed.auto_parallel(*arguments, plan=other)
    assert not (tmp_path / "artifacts").exists()
    with pytest.raises(InfeasibleError, match="mem_budget is 100") as error:
        hidet.distributed.auto_parallel(*arguments[:2], {"mem_budget": 100}, arguments[3], plan=plan)
    assert error.value.least_budget > 100
    with pytest.raises(ConfigError, match=r"'pins'.* is for the search"):
        hidet.distributed.auto_parallel(*arguments[:2], {"pins": {"w0": "(R, S0)"}}, arguments[3], plan=plan)
    with pytest.raises(PlanError, match="takes a Plan"):
        hidet.distributed.auto_parallel(*arguments, plan=plan.to_json())
    result = hidet.distributed.auto_parallel(*arguments, plan=plan.edit(split))
    assert result.plan.collectives() == {"all_reduce": 1}
    assert result.communications == ["all_reduce(sum, axes=0) float32[4, 8] -> [4, 8]"]
    anew = hidet.distributed.recost(plan.edit(split), mlp(), builtin("cpu", DeviceMesh((2,))))
    assert result.predicted_seconds == anew.seconds > 0
    assert Plan.load(tmp_path / "artifacts" / "plan.json") == result.plan


def test_a_plan_that_was_made_builds_the_artifacts_that_its_search_would(tmp_path: Any) -> None:
    config = ({"mesh_shape": [2]}, {"mem_budget": 1000})
    plan = hidet.distributed.make_plan(mlp(), *config)
    assert plan.collectives()
    program = partition_graph(mlp(), plan.stages[0])
    assert (
        hidet.distributed.partition(mlp(), Plan.from_json(plan.to_json())).communications() == program.communications()
    )
