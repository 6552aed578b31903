"""The page in a headless Chromium: it draws itself, answers its questions, and is used by mouse and by keyboard."""

from __future__ import annotations

import re
import time

import hidet
import pytest
from tests.report.browser import IS_THERE, browser

from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.report import render
from hidet_dist.report.collect import collect
from hidet_dist.report.live import serving
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes
from hidet_dist.view import GraphView
from hidet_dist.weights import weight
from hidet_dist.weights.named import mark_of

pytestmark = [
    pytest.mark.skipif(not IS_THERE, reason="needs chromium and chromedriver"),
    pytest.mark.slow,
]
DOWN, RIGHT, LEFT, HOME = "\ue015", "\ue014", "\ue012", "\ue011"
SECTIONS = ("answers", "model", "weights", "collectives", "memory", "timeline", "search", "operators")
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def chromium():
    with browser() as session:
        yield session


@pytest.fixture(scope="module")
def report():
    """The report on a LLaMA of which layer 1 is planned otherwise than the others."""
    config = shapes.LlamaConfig(4, 32, 4, 4, 64, 48, batch=2, sequence=8, dtype="float32")
    graph, cluster = normalize(shapes.llama(config)), builtin("dgx-a100", DeviceMesh((2,)))
    pins = {f"layers.{n}.{name}": "(R, S0)" for n in range(4) for name in ("up", "query")}
    for number, op in enumerate(GraphView(graph).operators):
        if any(str(mark_of(x)).endswith(".gate") for x in op.inputs):
            pins[f"op:{number}"] = "?, (R, S0) -> ?"
    plan = search(graph, cluster, pins=pins | {"layers.1.up": "(R, R)"}).plan
    return collect(plan.stages[0], graph, cluster, "a small LLaMA")


@pytest.fixture
def page(chromium, report, tmp_path):
    (tmp_path / "out.html").write_text(render(report))
    chromium.open((tmp_path / "out.html").as_uri())
    yield chromium
    assert chromium.complaints() == []


def test_every_section_is_drawn_and_nothing_is_fetched(page, report):
    for section in SECTIONS:
        assert page.text(f"#{section} > .body")
    assert page.text("h1") == report.title
    assert page.run("return performance.getEntriesByType('resource').length") == 0


def test_the_five_questions_are_answered(page, report):
    answers = page.text("#answers")
    point = report.memory.peak
    held = [one for one in report.memory.holdings if one.begin <= point <= one.end]
    cause = max((one for one in held if one.what not in ("weight", "input", "output")), key=lambda one: one.nbytes)
    (tensor,) = (tensor for tensor in report.tensors if tensor.name == cause.tensor)
    assert (tensor.label or tensor.name) in answers
    most = max(report.communications, key=lambda one: one.seconds)
    assert most.kind in answers
    assert "The best plan without it makes" in answers
    # A weight that the pins leave open, and that is split.
    weight = next(
        tensor for tensor in report.tensors if any(set(choice.spec) <= set("(R, )") for choice in tensor.alternatives)
    )
    page.run(
        "const select = document.querySelector('#answers select'); select.value = arguments[0];"
        "select.dispatchEvent(new Event('change'))",
        re.sub(r"\.\d+\.", ".*.", weight.label),
    )
    assert f"{(weight.nbytes - weight.shard_nbytes) / 1024:.2f} KiB more per device" in page.text("#answers")
    assert any(text in answers for text in ("At most", "optimal", "The search found one within"))
    assert "layers.1: up is (R, R), not (R, S0)" in answers


def test_the_tree_is_used_by_keyboard(page):
    page.run("document.querySelector('[role=treeitem][tabindex=\"0\"]').focus()")
    assert page.run("return document.querySelectorAll('[role=treeitem][tabindex=\"0\"]').length") == 1
    before = page.run("return document.querySelectorAll('[role=treeitem]').length")
    # The first row that can be opened below the model: its children come, and go again.
    page.press(HOME)
    for _ in range(30):
        page.press(DOWN)
        if page.run("return document.activeElement.getAttribute('aria-expanded')") == "false":
            break
    page.press(RIGHT)
    assert page.run("return document.activeElement.getAttribute('aria-expanded')") == "true"
    assert page.run("return document.querySelectorAll('[role=treeitem]').length") > before
    page.press(DOWN)
    inner = page.run("return document.activeElement.getAttribute('aria-label')")
    assert inner
    assert page.text("aside.panel h3")
    page.press(LEFT)
    page.press(LEFT)
    assert page.run("return document.querySelectorAll('[role=treeitem]').length") == before


def test_layers_that_are_planned_alike_are_one_row(page):
    rows = page.run(
        "return [...document.querySelectorAll('[role=treeitem]')].map(row => row.getAttribute('aria-label'))"
    )
    assert any(row.startswith("2 to 3, 2 layers planned alike") for row in rows)
    assert any(row.startswith("1, differs: up is (R, R), not (R, S0)") for row in rows)


def test_a_weight_is_drawn_on_every_device(page):
    page.run("document.querySelector('#weights button.link').click()")
    assert page.run("return document.querySelectorAll('aside.panel .devices li').length") == 2
    assert page.text("aside.panel .alternatives")


def test_tables_are_sorted_and_filtered(page, report):
    def column(number: int) -> list[str]:
        return page.run(
            "return [...document.querySelectorAll('#operators tbody tr:not(.details)')]"
            ".map(row => row.children[arguments[0]].innerText)",
            number,
        )

    first = column(0)
    page.run("document.querySelectorAll('#operators thead button')[2].click()")
    assert page.run("return document.querySelector('#operators th[aria-sort]').ariaSort") == "descending"
    assert column(0) != first
    page.run(
        "const input = document.querySelector('#operators input'); input.value = 'Matmul';"
        "input.dispatchEvent(new Event('input'))"
    )
    assert len(column(0)) == sum(operator.kind == "Matmul" for operator in report.operators)
    assert all(text.startswith("Matmul") for text in column(0))


def test_memory_is_read_out_at_any_point(page, report):
    assert "the peak" in page.text("#memory .readout")
    page.run(
        "const slider = document.querySelector('#memory input[type=range]'); slider.value = 0;"
        "slider.dispatchEvent(new Event('input'))"
    )
    assert "Take 0" in page.text("#memory .readout")
    assert page.run("return document.querySelector('#memory input[type=range]').getAttribute('aria-valuetext')")


def test_the_timeline_is_walked_by_keyboard(page):
    page.run("document.querySelector('#timeline canvas').focus()")
    page.press(RIGHT)
    first = page.text("#timeline .readout")
    page.press(RIGHT)
    assert first
    assert page.text("#timeline .readout") not in ("", first)


PIN_WEIGHTS = """
const real = window.fetch;
let asked = 0;
window.answers = [];
window.fetch = (...request) => {
  const number = asked++;
  return new Promise(resolve => real(...request).then(answer => { answers[number] = () => resolve(answer); }));
};
for (const row of [0, 1]) {
  document.querySelectorAll('#weights button.link')[row].click();
  document.querySelectorAll('form.pin input')[0].checked = true;
  document.querySelector('form.pin').requestSubmit();
}
"""


def test_the_latest_pins_are_shown_whatever_order_answers_come_in(chromium):
    x = hidet.symbol([8, 64])
    y = hidet.ops.relu(x @ weight("up", [64, 256])) @ weight("down", [256, 64])
    graph, cluster = normalize(hidet.trace_from(y, [x])), builtin("cpu", DeviceMesh((2,)))

    def searched(pins, clock=time.perf_counter):
        return collect(search(graph, cluster, pins=pins, clock=clock).plan.stages[0], graph, cluster, "served")

    with serving(searched({}), searched) as address:
        chromium.open(address)
        chromium.run(PIN_WEIGHTS)
        chromium.wait("return Boolean(answers[0] && answers[1])")
        chromium.run("answers[1]()")
        chromium.wait("return document.querySelectorAll('.pins li').length === 2")
        chromium.run("answers[0]()")
        chromium.wait("return !document.body.hasAttribute('aria-busy')")
        assert {"up", "down"} == {pin.split()[0] for pin in chromium.text(".pins ul").splitlines()}
    assert chromium.complaints() == []


def test_names_do_not_break_out(chromium, tmp_path):
    x = hidet.symbol([8, 32])
    graph = normalize(hidet.trace_from(hidet.ops.relu(x @ weight(f"layers.0.{HOSTILE}", [32, 64])), [x]))
    cluster = builtin("cpu", DeviceMesh((2,)))
    made = collect(search(graph, cluster).plan.stages[0], graph, cluster, HOSTILE)
    (tmp_path / "out.html").write_text(render(made))
    chromium.open((tmp_path / "out.html").as_uri())
    assert chromium.run("return document.title") == HOSTILE
    assert chromium.text("h1") == HOSTILE
    assert chromium.run("return document.querySelectorAll('img').length") == 0
    assert chromium.complaints() == []
