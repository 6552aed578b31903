"""Explanations: the figures agree with the plan, the search and each other, and the schedule says the whole plan."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from dataclasses import replace

import hidet
import numpy as np
import pytest

import hidet_dist  # noqa: F401
from hidet_dist.codec import encode
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.spec import DeviceMesh, Plan, TensorShardSpec
from hidet_dist.spec.report import SearchReport
from hidet_dist.view import GraphView

HIDDEN, INNER = 64, 256


def block(seed: int = 0):
    """x -> fc1 with bias -> relu -> fc2, and the user's names of its weights."""
    rng = np.random.default_rng(seed)
    names = {
        name: hidet.asarray(rng.standard_normal(shape).astype(np.float32))
        for name, shape in (("fc1.weight", (HIDDEN, INNER)), ("fc1.bias", (INNER,)), ("fc2.weight", (INNER, HIDDEN)))
    }
    x = hidet.symbol([8, HIDDEN], "float32", "cpu")
    y = hidet.ops.relu(hidet.ops.matmul(x, names["fc1.weight"]) + names["fc1.bias"])
    return normalize(hidet.trace_from(hidet.ops.matmul(y, names["fc2.weight"]), [x])), names


MEGATRON = {"fc1.weight": "(R, S1)", "fc2.weight": "(S1, R)", "op:0": "?, (R, S1) -> ?", "op:3": "?, (S1, R) -> (R, R)"}


def planned(**more):
    graph, names = block()
    cluster = builtin("dgx-a100", DeviceMesh((2, 2), ("node", "gpu")))
    return graph, search(graph, cluster, names=names, **more).plan


def test_the_figures_add_up() -> None:
    graph, plan = planned(pins=MEGATRON)
    data = json.loads(plan.explain().to_json())
    operators = data["operators"]
    assert data["seconds"] == plan.seconds
    assert sum(op["compute_seconds"] for op in operators) == pytest.approx(data["compute_seconds"])
    at_outputs = sum(conversion.seconds for conversion in plan.stages[0].output_conversions)
    assert sum(op["communication_seconds"] for op in operators) + at_outputs == pytest.approx(
        data["communication_seconds"]
    )
    assert [op["live_bytes"] for op in operators] == live_bytes(GraphView(graph), plan.stages[0])[:-1]
    # One all-reduce of the output over both devices of a node, and nothing else.
    assert data["report"]["traffic"] == {"all_reduce": {"count": 1, "nbytes": 8 * HIDDEN * 4}}
    assert data["collectives"] == {"all_reduce": 1}
    assert data["report"]["bound_seconds"] <= data["seconds"]


def test_the_runner_up_is_the_next_best_choice() -> None:
    """Exactly: without a budget that binds, pinning the runner-up makes a plan of the time that is foretold."""
    graph, plan = planned(solver_gap=0.0)
    assert plan.stages[0].report is not None
    cluster = builtin("dgx-a100", plan.stages[0].mesh)
    for op, runner_up in zip(plan.stages[0].operators, plan.stages[0].report.runner_ups, strict=True):
        assert runner_up is not None
        assert runner_up.spec != str(op.spec)
        assert plan.seconds <= runner_up.at_least_seconds * (1 + 1e-9)
        assert runner_up.at_least_seconds <= runner_up.alone_seconds * (1 + 1e-9)
        pinned = search(graph, cluster, solver_gap=0.0, pins={f"op:{op.index}": runner_up.spec.partition("|")[0]}).plan
        assert pinned.seconds <= runner_up.at_least_seconds * (1 + 1e-9)
        forced = plan.edit({f"op:{op.index}": runner_up.spec})
        assert hidet.distributed.recost(forced, graph, cluster).seconds == pytest.approx(runner_up.alone_seconds)


def test_incumbents_end_with_the_plan() -> None:
    _, plan = planned(mem_budget=90_000)
    incumbents = plan.stages[0].report.incumbents
    assert incumbents[-1].seconds == pytest.approx(plan.seconds)
    assert all(a.seconds >= b.seconds for a, b in itertools.pairwise(incumbents))
    rows = {}
    for incumbent in incumbents:
        rows.update(incumbent.rows)
        assert incumbent.bound_seconds <= incumbent.seconds
        assert sum(row.seconds for own in rows.values() for row in own) == pytest.approx(incumbent.seconds)
    text = str(plan.explain())
    for word in ("Incumbent 0", "InSpec", "OutSpec", "Total", "Schedule", "runner-up", "fc1.bias", "Memory: "):
        assert word in text


def test_schedule_lines_say_the_whole_plan() -> None:
    """Read back, the lines give every weight's spec and every collective, in order."""
    for pins in (MEGATRON, {"fc1.weight": "(S01, R)"}, {"x0": "(S0, R)", "y0": "(S1, R)"}):
        _, plan = planned(pins=pins)
        axes = {name: axis for axis, name in enumerate(plan.stages[0].mesh.axis_names)}
        stored = {t.label or t.name: [()] * len(t.shape) for t in (*plan.stages[0].weights, *plan.stages[0].inputs)}
        kinds = []
        for line in plan.explain().schedule:
            call = ast.parse(line, mode="eval").body
            words = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            first, *rest = map(ast.literal_eval, call.args)
            if call.func.id == "shard":
                stored[first][words["dim"]] = tuple(axes[name] for name in words["axes"])
            else:
                kinds.append(rest[0])
        for tensor in (*plan.stages[0].weights, *plan.stages[0].inputs):
            assert TensorShardSpec(tuple(stored[tensor.label or tensor.name])) == tensor.spec
        assert kinds == [text.partition("(")[0] for text in plan.stages[0].communications()]


def test_schedule_lines_are_what_a_person_would_write() -> None:
    graph, names = block()
    plan = search(
        graph, builtin("cpu", DeviceMesh((2,))), names=names, pins={"fc1.weight": "(R, S0)"}, mode="propagate"
    ).plan
    assert plan.explain().schedule == [
        'shard("fc1.weight", dim=1)',
        'shard("fc1.bias", dim=0)',
        'shard("fc2.weight", dim=0)',
        'sync("fc2", "all_reduce")',
    ]
    assert "Propagated from pins" in str(plan.explain())


def test_a_plan_without_its_search_is_explained_as_far_as_it_goes(tmp_path) -> None:
    _, plan = planned(pins=MEGATRON)
    plan.save(tmp_path / "plan.json")
    bare = Plan.load(tmp_path / "plan.json")
    assert bare.stages[0].report is None
    assert bare.explain().schedule == plan.explain().schedule
    assert "1 all_reduce" in str(bare.explain())
    assert json.loads(bare.explain().to_json())["report"] is None


def test_a_report_round_trips() -> None:
    _, plan = planned(mem_budget=90_000)
    report = plan.stages[0].report
    assert SearchReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert report.without_times() != report
    assert all(incumbent.elapsed_seconds is None for incumbent in report.without_times().incumbents)


def test_artifacts_carry_the_explanation_and_the_program_prints_it(tmp_path) -> None:
    graph, names = block()
    config = {"pins": {"fc1.weight": "(R, S0)"}, "names": names, "mem_budget": 2**26}
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        result = hidet.distributed.auto_parallel(graph, {"mesh_shape": [2]}, config, folder)
    assert str(result.plan.param_specs["fc1.weight"]) == "(R, S0)"
    first, second = (folder / "explain.json" for folder in folders)
    assert first.read_bytes() == second.read_bytes()
    assert json.loads(first.read_text())["schedule"] == result.plan.explain().schedule

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hidet_dist.cli", "explain", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)

    printed = run(str(folders[0]))
    assert printed.returncode == 0
    report = result.plan.stages[0].report.without_times()
    timeless = Plan((replace(result.plan.stages[0], report=report),))
    assert printed.stdout.split() == str(timeless.explain()).split()
    missing = run(str(tmp_path / "nothing"))
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "nothing" in missing.stderr


def test_the_explanation_says_what_is_hidden_of_each_collective() -> None:
    _, plan = planned(pins={"fc1.weight": "(S0, R)", "fc2.weight": "(S0, R)", "op:3": "?, (R, R) -> ?"})
    overlap = plan.stages[0].overlap
    data = json.loads(plan.explain().to_json())
    assert data["overlap"] == encode(overlap)
    assert data["makespan_seconds"] == plan.makespan_seconds
    collectives = [c["step"].partition("(")[0] for c in data["overlap"]["communications"]]
    assert {kind: collectives.count(kind) for kind in sorted(set(collectives))} == plan.collectives()
    # fc2's weight is gathered while the layer before it is computed.
    assert plan.makespan_seconds < plan.seconds
    assert plan.makespan_seconds == pytest.approx(plan.seconds - overlap.hidden_seconds)
    text = str(plan.explain())
    assert "With overlap: " in text
    assert "Collectives beside computation" in text
    alone = builtin("cpu", plan.stages[0].mesh)
    assert search(block()[0], alone).plan.explain().to_data()["overlap"] is None
