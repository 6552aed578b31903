"""The data of reports: its figures agree with the plan, the search and each other, and it survives its file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hidet_dist.errors import PlanError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.report import Report
from hidet_dist.report.collect import collect
from hidet_dist.search import search
from hidet_dist.search.formulation.memory import live_bytes
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes
from hidet_dist.view import GraphView

SMALL = shapes.LlamaConfig(3, 32, 4, 4, 64, 48, batch=2, sequence=8, dtype="float32")
BUDGET = 10**9  # which does not bind
SPLIT = {f"layers.{n}.{name}": "(R, S0)" for n in range(3) for name in ("gate", "up", "query")}


@pytest.fixture(scope="module")
def graph():
    return normalize(shapes.llama(SMALL))


@pytest.fixture(scope="module", params=["cpu", "dgx-a100"])
def planned(request, graph):
    """A plan with collectives of all layers, its machine and its report."""
    cluster = builtin(request.param, DeviceMesh((2,)))
    plan = search(graph, cluster, mem_budget=BUDGET, pins=SPLIT).plan
    return plan, cluster, collect(plan.stages[0], graph, cluster, "small")


def test_memory_is_what_the_plan_holds(planned, graph):
    plan, cluster, report = planned
    held = [0] * len(report.memory.held_bytes)
    for one in report.memory.holdings:
        for point in range(one.begin, one.end + 1):
            held[point] += one.nbytes
    assert tuple(held) == report.memory.held_bytes
    assert (
        max(held)
        == max(live_bytes(GraphView(graph), plan.stages[0], cluster.device.places_shards))
        <= report.memory.budget_bytes
        == BUDGET
    )
    weights = sum(one.nbytes for one in report.memory.holdings if one.what == "weight")
    assert weights == plan.stages[0].weight_bytes_per_device
    assert weights == sum(tensor.shard_nbytes for tensor in report.tensors if tensor.kind == "weight")


def test_collectives_are_those_of_the_plan_with_its_times(planned):
    plan, _, report = planned
    kinds = [one.kind for one in report.communications]
    assert {kind: kinds.count(kind) for kind in sorted(set(kinds))} == plan.collectives() == report.collectives
    assert kinds  # else the test shows nothing
    total = sum(op.seconds - op.compute_seconds for op in plan.stages[0].operators)
    total += sum(conversion.seconds for conversion in plan.stages[0].output_conversions)
    sliced = [text for text in plan.stages[0].communications() if text.startswith("slice")]
    sent = sum(one.seconds for one in report.communications)
    assert sent == pytest.approx(total) if not sliced else sent < total
    traffic = {kind: one.nbytes for kind, one in plan.stages[0].report.traffic.items()}
    assert {kind: sum(one.nbytes for one in report.communications if one.kind == kind) for kind in kinds} == traffic
    for one in report.communications:
        assert 0 <= one.hidden_seconds <= one.seconds * (1 + 1e-9)
        assert one.why.endswith(".")
        assert ("graph output" if one.operator is None else report.operators[one.operator].label) in one.why


def test_the_timeline_has_the_plans_time_and_its_streams_do_one_thing_at_a_time(planned):
    plan, _, report = planned
    assert sum(span.seconds for span in report.timeline) == pytest.approx(plan.seconds)
    end = 0.0
    for stream in ("compute", "communication"):
        free = 0.0
        for span in (span for span in report.timeline if span.stream == stream):
            assert span.begin_seconds >= free - 1e-12
            free = span.begin_seconds + span.seconds
        end = max(end, free)
    assert end == pytest.approx(plan.makespan_seconds)


def test_the_cost_of_another_spec_of_a_weight_is_that_of_the_plan_with_it_pinned(graph):
    cluster = builtin("dgx-a100", DeviceMesh((2,)))
    plan = search(graph, cluster, solver_gap=0.0, pins={"layers.0.up": "(R, S0)"}, overlap=False).plan
    report = collect(plan.stages[0], graph, cluster)
    weights = [tensor for tensor in report.tensors if tensor.label in ("layers.1.gate", "layers.2.norm1")]
    assert len(weights) == 2
    for weight in weights:
        assert {choice.spec for choice in weight.alternatives} | {weight.spec} >= {"(R, R)", "(R, S0)"} or "norm" in (
            weight.label
        )
        for choice in weight.alternatives:
            pins = {"layers.0.up": "(R, S0)", weight.label: choice.spec}
            pinned = search(graph, cluster, solver_gap=0.0, pins=pins, overlap=False, report=False).plan
            assert choice.at_least_seconds == pytest.approx(pinned.seconds)
            assert choice.alone_seconds >= choice.at_least_seconds * (1 - 1e-9)


def test_the_alternative_to_a_collective_avoids_it_at_the_predicted_cost(planned, graph):
    plan, cluster, report = planned
    possible = [one for one in report.communications if one.without is not None]
    assert possible
    for one in possible[:2]:
        saving = one.without
        pins = SPLIT | {saving.changed: saving.spec.partition("|")[0]}
        other = search(graph, cluster, pins=pins, solver_gap=0.0, report=False, overlap=False).plan
        assert saving.at_least_seconds is None or saving.at_least_seconds <= other.seconds * (1 + 1e-9)
        if saving.changed.startswith("op:"):
            assert str(plan.stages[0].operators[int(saving.changed[3:])].spec) != saving.spec


def test_operators_belong_to_the_modules_that_their_weights_name(planned):
    report = planned[2]
    modules = {operator.module for operator in report.operators}
    assert {"layers.0", "layers.1", "layers.2"} <= modules
    by_module = [operator.module for operator in report.operators if operator.module.startswith("layers")]
    assert by_module == sorted(by_module)  # each layer's operators follow one another
    assert all(operator.module for operator in report.operators if operator.kind == "Softmax")


def test_the_layer_that_differs_is_named_with_its_difference():
    graph, cluster = normalize(shapes.llama(replace(SMALL, layers=4))), builtin("dgx-a100", DeviceMesh((2,)))
    pins = {f"layers.{n}.{name}": "(R, S0)" for n in range(4) for name in ("gate", "up")}
    plan = search(graph, cluster, pins=pins | {"layers.1.up": "(R, R)"}).plan
    (family,) = collect(plan.stages[0], graph, cluster).families
    assert (family.prefix, family.members) == ("layers", (0, 1, 2, 3))
    assert family.usual == (2, 3)
    variant = next(variant for variant in family.variants if 1 in variant.members)
    assert variant.members == (1,)
    assert "up is (R, R), not (R, S0)" in variant.differences


def test_a_report_survives_its_file_and_is_the_same_for_the_same_plan(planned, graph, tmp_path):
    plan, cluster, report = planned
    report.save(tmp_path / "plan.report.json")
    plan.save(tmp_path / "plan.json")
    assert Report.load(tmp_path / "plan.json") == Report.load(tmp_path / "plan.report.json") == report
    again = collect(plan.stages[0], graph, cluster, "small")
    assert again.to_json() == report.to_json()


def test_a_plan_that_was_not_searched_has_a_report_without_bounds(planned, graph):
    plan, cluster, _ = planned
    bare = collect(replace(plan.stages[0], report=None), graph, cluster, mem_budget=BUDGET)
    assert bare.search is None
    assert bare.memory.budget_bytes == BUDGET
    assert all(not tensor.alternatives for tensor in bare.tensors)
    assert all(one.without is None for one in bare.communications)


def test_a_report_is_refused_for_another_graph_or_mesh(planned, graph):
    plan, _, _ = planned
    with pytest.raises(PlanError, match="mesh"):
        collect(plan.stages[0], graph, builtin("cpu", DeviceMesh((4,))))
    other = normalize(shapes.llama(replace(SMALL, layers=2)))
    with pytest.raises(PlanError, match="another graph"):
        collect(plan.stages[0], other, builtin("cpu", plan.stages[0].mesh))


def test_malformed_reports_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(PlanError, match=r"plan\.report\.json is missing.*hidet-dist plan"):
        Report.load(tmp_path / "plan.json")
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(PlanError, match="format"):
        Report.load(tmp_path)


def _places(value, path=()):
    """Every place in JSON data, lists by their first elements."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, one in items:
        yield from _places(one, (*path, key))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_malformed_data_is_refused_or_read_as_it_is(planned, data):
    """Any value in any place: a PlanError, or a report that can be drawn."""
    report = planned[2]
    value = json.loads(report.to_json())
    place = data.draw(st.sampled_from(sorted(filter(None, _places(value)), key=str)))
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = data.draw(st.sampled_from([None, -1, 2**70, "</script>", [], {}, True, 1e308]))
    try:
        read = Report.from_json(json.dumps(value))
    except PlanError:
        return
    assert json.loads(read.to_json())["format"] == value["format"]
