"""The values from a traced graph to artifacts: each step is taken once, and each value says what it is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
from hidet.graph import FlowGraph

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.errors import ConfigError, InfeasibleError, OverBudgetError
from hidet_dist.machine import builtin
from hidet_dist.partitioning import proof
from hidet_dist.phases import staged, values
from hidet_dist.phases.budget import build_within_budget
from hidet_dist.phases.dump import NAMES
from hidet_dist.rules import rule
from hidet_dist.spec import DeviceMesh

MESH = {"mesh_shape": [2]}


def mlp() -> FlowGraph:
    """Three operators, each with a rule of its own."""
    rng = np.random.default_rng(0)
    w_in, w_out = (hidet.asarray(rng.standard_normal(shape, "float32")) for shape in ([64, 128], [128, 32]))
    x = hidet.symbol([8, 64], "float32", "cpu")
    return hidet.trace_from(hidet.ops.relu(x @ w_in) @ w_out, [x])


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often rules are derived, stages proven and graphs normalized."""
    found: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(module, name)

        def counting(*arguments: Any, **named: Any) -> Any:
            found[name] += 1
            return call(*arguments, **named)

        monkeypatch.setattr(module, name, counting)

    counted(rule, "derive")
    counted(proof, "prove_specs")
    monkeypatch.setattr(staged, "prove_specs", proof.prove_specs)
    counted(values, "normalize")
    return found


@pytest.mark.parametrize("given", [False, True], ids=["searched", "given"])
def test_a_build_derives_each_rule_proves_the_plan_and_normalizes_the_graph_once(
    given: bool, counts: Counter[str], tmp_path: Path
) -> None:
    graph = mlp()
    plan = hidet_dist.make_plan(graph, MESH) if given else None
    counts.clear()
    hidet_dist.auto_parallel(graph, MESH, {}, tmp_path / "out", plan=plan)
    assert counts == {"derive": 3, "prove_specs": 1, "normalize": 1}


def test_a_pipeline_derives_each_rule_once_for_all_cuts(counts: Counter[str]) -> None:
    hidet_dist.make_plan(mlp(), MESH, {"objective": "latency", "stages": 2})
    assert counts["derive"] == 3


def test_plans_with_other_pins_share_the_rules(counts: Counter[str]) -> None:
    prepared = hidet_dist.Traced.of(mlp(), MESH).prepare()
    by_rows = prepared.with_pins({"w0": "(S0, R)"}).plan().plan
    by_columns = prepared.with_pins({"w0": "(R, S0)"}).plan().plan
    assert [str(plan.stages[0].weights[0].spec) for plan in (by_rows, by_columns)] == ["(S0, R)", "(R, S0)"]
    assert counts == {"derive": 3, "normalize": 1}


def test_the_values_make_the_artifacts_that_auto_parallel_makes(tmp_path: Path) -> None:
    graph = mlp()
    hidet_dist.auto_parallel(graph, MESH, {"mem_budget": 40_000}, tmp_path / "at_once")
    traced = hidet_dist.Traced.of(graph, MESH, {"mem_budget": 40_000})
    compiled = traced.prepare().plan().partition().compile()
    manifest = compiled.save(tmp_path / "step_by_step")
    assert manifest == Manifest.load(tmp_path / "at_once")
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("at_once", "step_by_step")]
    assert plans[0] == plans[1]


def test_each_value_prints_what_it_has_and_has_what_it_was_made_from() -> None:
    graph = mlp()
    traced = hidet_dist.Traced.of(graph, MESH, {"mem_budget": 40_000})
    prepared = traced.prepare()
    planned = prepared.plan()
    partitioned = planned.partition()
    compiled = partitioned.compile()
    assert compiled.partitioned is partitioned
    assert partitioned.planned is planned
    assert planned.prepared is prepared
    assert prepared.traced is traced
    assert repr(traced) == "Traced(operators: 3, inputs: 1, outputs: 1; for [axis0=2] on cpu)"
    assert str(prepared).splitlines()[0] == "v0: float32[8, 128] = Matmul(x0, float32[64, 128] constant)"
    assert "Matmul: (R, R), (R, S0) -> (R, S0)" in str(planned).splitlines()
    assert str(partitioned) == partitioned.programs[0].text().rstrip()
    assert str(compiled).endswith("all_reduce(sum, axes=0) float32[8, 32] -> [8, 32]")
    chain = repr(compiled)
    assert [chain.index(name) for name in ("Compiled(", "Partitioned(", "Planned(", "Prepared(", "Traced(")] == sorted(
        chain.index(name) for name in ("Compiled(", "Partitioned(", "Planned(", "Prepared(", "Traced(")
    )


def test_what_is_no_graph_is_refused_before_anything_is_done() -> None:
    with pytest.raises(ConfigError, match="must be a hidet FlowGraph; got a str"):
        hidet_dist.make_plan("graph", MESH)  # type: ignore[arg-type]


def test_a_dump_has_what_each_pass_made_of_each_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDET_DIST_DUMP", str(tmp_path / "dump"))
    compiled = hidet_dist.Traced.of(mlp(), MESH).prepare().plan().partition().compile()
    partitioned = compiled.partitioned
    planned = partitioned.planned
    prepared = planned.prepared
    written = {path.stem: path.read_text() for path in sorted((tmp_path / "dump" / "graph0").iterdir())}
    assert list(written) == list(NAMES)
    values = [prepared.traced, prepared, planned, partitioned, compiled]
    names = ("1-traced", "2-normal-form", "5-plan", "6-program", "8-launches")
    assert [written[name] for name in names] == [f"{value}\n" for value in values]
    assert written["3-rules"].splitlines()[0] == "0 Matmul: ([i,k],[k,j])->([i,j]) {i=8,j=128,k=64} reduction={k}"
    _, choices = prepared.rules(prepared.view.operators[0])
    assert f"0 Matmul: {len(choices)} choices\n  {choices[0].spec}\n" in written["4-choices"]
    assert "BlasMatmul(x0, w0, " in written["7-fused"] and "Relu" not in written["7-fused"]

    hidet_dist.make_plan(mlp(), MESH)
    more = sorted(path.stem for path in (tmp_path / "dump" / "graph1").iterdir())
    assert more == list(NAMES[:5])

    x = hidet.symbol(["rows", 8], "float32", "cpu")
    hidet_dist.make_plan(hidet.trace_from(hidet.ops.relu(x), [x]), MESH, {"symbols": {"rows": {"expected": 4}}})
    assert "0 Relu: 2 choices\n" in (tmp_path / "dump" / "graph2" / "4-choices.txt").read_text()


def test_a_dump_without_a_folder_to_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HIDET_DIST_DUMP", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"HIDET_DIST_DUMP = .*file cannot be written to"):
        hidet_dist.make_plan(mlp(), MESH)


class Budgeted:
    """A graph whose programs hold more bytes than predicted, or fewer, and that has no plan below a number of bytes."""

    cluster = builtin("cpu", DeviceMesh((2,)))
    mem_budget = 1000

    def __init__(self, least: int, more: int = 100):
        self.least, self.more = least, more
        self.built: list[int] = []

    def plan(self, _: object = None) -> int:
        return self.plan_within(self.mem_budget)

    def plan_within(self, nbytes: int, _: object = None) -> int:
        if nbytes < self.least:
            raise InfeasibleError("no plan", self.least)
        return nbytes

    def build(self, predicted: int) -> int:
        self.built.append(predicted)
        if predicted + self.more > self.mem_budget:
            raise OverBudgetError("too much", predicted + self.more, self.more)
        return predicted + self.more


def test_a_program_that_holds_too_much_is_planned_again_with_room_for_what_was_not_predicted() -> None:
    graph = Budgeted(least=850)
    assert build_within_budget(graph, graph.build) == 1000
    assert graph.built == [1000, 900]


def test_a_refusal_names_what_the_program_of_the_plan_of_least_memory_holds() -> None:
    graph = Budgeted(least=1200, more=-100)
    with pytest.raises(OverBudgetError) as caught:
        build_within_budget(graph, graph.build)
    assert caught.value.least_budget == 1100
    graph.mem_budget = 1100
    assert build_within_budget(graph, graph.build) == 1100


def test_a_budget_that_no_program_fits_is_refused_with_one_that_does() -> None:
    graph = Budgeted(least=950)
    with pytest.raises(OverBudgetError, match="too much") as caught:
        build_within_budget(graph, graph.build)
    assert graph.built == [1000, 950]
    assert caught.value.least_budget == 1050
