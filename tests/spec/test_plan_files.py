"""Plans from files: whatever a file holds, it is a plan or a PlanError, and so is what is said of the plan."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hidet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.errors import PlanError
from hidet_dist.limits import MOST_PLAN_BYTES
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh, Plan
from hidet_dist.spec.report import SearchReport
from hidet_dist.spec.symbols import SymbolSize


@cache
def planned() -> Plan:
    x = hidet.symbol(["n", 8], "float32", "cpu")
    hidden = hidet.ops.relu(hidet.ops.matmul(x, hidet.randn([8, 12], device="cpu")))
    graph = normalize(hidet.trace_from(hidet.ops.matmul(hidden, hidet.randn([12, 8], device="cpu")), [x]))
    return search(
        graph,
        builtin("dgx-a100", DeviceMesh((2, 2))),
        symbols={"n": SymbolSize(8, 4)},
        pins={"op:2": "(R, S0), (S0, R) -> ?", "x0": "(S1, R)", "y0": "(S1, R)"},
    ).plan


def say_all(plan: Plan) -> None:
    """Everything that is said of a plan."""
    explanation = plan.explain()
    str(explanation), explanation.to_json(), plan.table(), plan.collectives(), plan.to_json(), plan.param_specs


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 10**18, 2**63, 10**400, 1e308, -0.0]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["(S0, R)", "(R)", "()", "(S9, R)", "[a=2]", "[a=0]", "[a=9999999999]", "\ud800", "S", "all_reduce("]
    ),
    st.sampled_from(["all_gather(axes=9, dim=0)", "slice(axes=x, dim=1)", "f()", "all_reduce(sum, axes=²)"]),
    st.just([]),
    st.just({}),
    st.lists(st.integers(), max_size=3),
)


def containers(value: Any) -> list[Any]:
    """All lists and objects within a JSON value, itself first."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(own for one in inside for own in containers(one) if isinstance(own, dict | list))]


def damage(data: st.DataObject, value: Any) -> None:
    """Change one entry of one list or object within a JSON value, or take it out."""
    place = data.draw(st.sampled_from([one for one in containers(value) if one] or [{"": 0}]))
    key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    if data.draw(st.integers(0, 4)):
        place[key] = data.draw(ODD)
    else:
        del place[key]


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_damaged_plan_is_a_plan_or_a_plan_error(data: st.DataObject) -> None:
    value = json.loads(planned().to_json())
    for _ in range(data.draw(st.integers(1, 3))):
        damage(data, value)
    try:
        say_all(Plan.from_json(json.dumps(value)))
    except PlanError as error:
        assert str(error)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_damaged_report_is_a_report_or_a_plan_error(data: st.DataObject) -> None:
    assert planned().stages[0].report is not None
    value = json.loads(json.dumps(planned().stages[0].report.to_json()))
    for _ in range(data.draw(st.integers(1, 2))):
        damage(data, value)
    try:
        say_all(Plan((replace(planned().stages[0], report=SearchReport.from_json(value)),)))
    except PlanError as error:
        assert str(error)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.one_of(st.text(), st.recursive(ODD, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))))
def test_malformed_plans_raise_a_plan_error(value: Any) -> None:
    for text in (value if isinstance(value, str) else json.dumps(value), json.dumps({"format": 2, "stages": value})):
        with pytest.raises(PlanError):
            Plan.from_json(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested more than"),
        ('{"format": 2, "stages": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested more than"),
        ('{"format": 2, "stages": [' + "1" * 5000 + "]}", "Not a plan"),
        ('{"format": 2, "stages": []}', "it has no stage"),
        ('{"format": 3, "stages": []}', "format 2"),
        ("{", "Not a plan"),
    ],
)
def test_odd_texts_are_refused(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.from_json(text)


def test_paths_that_are_not_files_and_large_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(MOST_PLAN_BYTES + 1)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("fifo", "large", "binary", "missing", ".", "null\0byte", "/dev/zero"):
        with pytest.raises(PlanError, match="Cannot read the plan"):
            Plan.load(tmp_path / name)
