"""The page as a file: it is whole, it fetches nothing, and no text in it breaks out of where it stands."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace

import hidet
import pytest

from hidet_dist.errors import PlanError
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.report import Report, render
from hidet_dist.report.collect import collect
from hidet_dist.report.measured import Trace, read_traces
from hidet_dist.runtime.profile import OperatorTime, Profile, merge_traces
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes
from hidet_dist.weights import weight

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>\u2028&<!--"
MOST_BYTES = 2 * 2**20


@pytest.fixture(scope="module")
def report() -> Report:
    """The report on a plan whose names try to break out of the page."""
    x = hidet.symbol([8, 32])
    up, down = weight(f"layers.0.{HOSTILE}", [32, 64]), weight("layers.1.down", [64, 32])
    graph = normalize(hidet.trace_from(hidet.ops.relu(x @ up) @ down, [x]))
    cluster = builtin("cpu", DeviceMesh((2,)))
    return collect(search(graph, cluster, mem_budget=20_000).plan.stages[0], graph, cluster, HOSTILE)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1])


def test_no_text_breaks_out_of_the_page(report):
    page = render(report, [Trace(0, 1.0, ())])
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert "\u2028" not in page.partition("</title>")[2]
    assert f"<title>{html.escape(HOSTILE)}</title>" in page
    assert any(HOSTILE in text for text in data_of(page)["report"]["texts"])


def test_marks_of_the_template_in_texts_stay_texts(report):
    page = render(replace(report, title="%%DATA%%"))
    assert "<title>%%DATA%%</title>" in page
    assert data_of(page)["report"]["texts"][0] == "%%DATA%%"


def test_the_page_draws_the_columns_that_fields_say_they_are(report):
    page = render(report)
    columns = data_of(page)["columns"]
    assert ["compute_seconds", "kernel", "time"] in columns
    forms = re.findall(r"^  (\w+): \{", page.partition("const FORMS = {")[2].partition("};")[0], re.MULTILINE)
    assert {form for _, _, form in columns} <= set(forms)


def test_the_page_asks_the_network_for_nothing_and_runs_only_its_own_program(report):
    page = render(report)
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    for tag, source in (("style", "style-src"), ("script", "script-src")):
        content = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)[-1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{source} 'sha256-{digest}'" in policy
    without_data = page.replace(re.search(r'<script id="data".*?</script>', page, re.S)[0], "")
    assert re.findall(r"https?://[^'\"\s]+", without_data) == ["http://www.w3.org/2000/svg"]  # a name, not fetched
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", page)
    assert not re.search(r"""(src|href)=["'](?!#)""", without_data)


def test_measured_times_are_on_the_page(report, tmp_path):
    def profile(rank: int) -> Profile:
        operators = (
            OperatorTime(0, "matmul", 0, "float32[8, 32]", "", 0.001, 0.002),
            OperatorTime(1, "all_reduce", 1, "float32[8, 32]", "all_reduce(sum)", 0.003, 0.001),
        )
        return Profile(rank, 2, 100.0, 0.005, operators, process_bytes=5 * 2**20 if rank else None)

    profile(1).save(tmp_path / "one.json")
    merge_traces([profile(0), profile(1)], tmp_path / "both.json")
    (one,) = read_traces([tmp_path / "one.json"])
    assert (one.rank, one.seconds) == (1, pytest.approx(0.005))
    assert [(s.stream, s.what, round(s.begin_seconds, 6), round(s.seconds, 6)) for s in one.spans] == [
        ("compute", "", 0.001, 0.002),
        ("communication", "all_reduce(sum)", 0.003, 0.001),
    ]
    both = read_traces([tmp_path / "both.json"])
    assert [(trace.rank, trace.process_bytes) for trace in both] == [(0, None), (1, 5 * 2**20)]
    assert len(data_of(render(report, both))["traces"]) == 2
    with pytest.raises(PlanError, match="a second trace of rank 1"):
        read_traces([tmp_path / "one.json", tmp_path / "both.json"])
    for text, says in (
        ('{"traceEvents": [1]}', "event 0 is 1, not an object"),
        ('{"traceEvents": {"a": 1}}', "not an object with a list 'traceEvents'"),
        ("[]", "not an object with a list 'traceEvents'"),
        ("", "not JSON"),
        ('{"traceEvents": [{"ph": "M", "pid": 0}, {"ph": "X", "ts": 1}]}', "event 1 has no pid, which must be a rank"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(PlanError, match=rf"bad\.json is not a trace of a profile: .*{says}"):
            read_traces([tmp_path / "bad.json"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ts", "1e999"),
        ("ts", "1" + "0" * 400),
        ("ts", "true"),
        ("ts", '"1"'),
        ("dur", "-1"),
        ("dur", "NaN"),
        ("dur", "null"),
        ("dur", "1e300"),
        ("cat", "3"),
        ("name", "null"),
        ("args", "[]"),
        ("pid", "-1"),
        ("pid", "1" + "0" * 400),
        ("pid", "1.0"),
        ("args", '{"process bytes": "5"}'),
        ("args", '{"process bytes": 1e300}'),
    ],
)
def test_traces_with_odd_numbers_are_refused(tmp_path, key, value):
    event = {"ph": '"X"', "pid": "0", "ts": "0", "dur": "1", "cat": '"call"', "name": '"a"', key: value}
    text = ", ".join(f'"{name}": {entry}' for name, entry in event.items())
    (tmp_path / "odd.json").write_text(f'{{"traceEvents": [{{{text}}}]}}')
    says = "rank 0 grew by" if "process" in value else f"event 0 has the {key} "
    with pytest.raises(PlanError, match=rf"odd\.json is not a trace of a profile: {says}"):
        read_traces([tmp_path / "odd.json"])


@pytest.mark.slow
def test_the_page_of_a_model_of_eight_billion_parameters_is_small():
    graph = normalize(shapes.llama(shapes.LLAMA3_8B))
    cluster = builtin("dgx-h100", DeviceMesh((2, 4)))
    page = render(collect(search(graph, cluster, mem_budget=8 * 2**30).plan.stages[0], graph, cluster, "LLaMA-3-8B"))
    assert len(page.encode()) < MOST_BYTES
