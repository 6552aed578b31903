"""``hidet-dist plan``, ``build`` and ``run`` on a small model, as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.cli.summary import summarize
from hidet_dist.report import Report

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hidet_dist.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=1000, check=False, env={**os.environ, **environment}
    )


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def planned():
    """A plan of two matrices, split over two devices, and the report on it."""
    x = hidet.symbol([8, 64])
    fc1, fc2 = hidet_dist.weight("fc1.weight", [64, 256]), hidet_dist.weight("fc2.weight", [256, 64])
    graph = hidet.trace_from(hidet.ops.relu(x @ fc1) @ fc2, [x])
    configurations = {"mesh_shape": [2]}, {"mem_budget": 100_000}
    plan = hidet_dist.make_plan(graph, *configurations)
    return plan, hidet_dist.describe(plan, graph, *configurations, title="two matrices")


def test_the_summary_agrees_with_the_plan():
    plan, report = planned()
    own = summarize(report)
    assert json.loads(json.dumps(own)) == own
    assert own["seconds"] == plan.makespan_seconds
    assert {kind: one["count"] for kind, one in own["collectives"].items()} == plan.collectives()
    memory = own["memory"]
    assert memory["weights_bytes"] == plan.stages[0].weight_bytes_per_device
    parts = ("weights_bytes", "inputs_and_outputs_bytes", "activations_bytes")
    assert sum(memory[part] for part in parts) == memory["peak_bytes"] <= memory["budget_bytes"] == 100_000
    assert own["bound_seconds"] <= own["seconds_without_overlap"]
    assert own["runner_up"]["alone_seconds"] >= own["bound_seconds"]


def test_a_plan_file_with_its_report_is_drawn(tmp_path):
    plan, report = planned()
    plan.save(tmp_path / "plan.json")
    without = run("report", str(tmp_path / "plan.json"), "--html", str(tmp_path / "out.html"))
    assert without.returncode == 1
    assert len(without.stderr.splitlines()) == 1
    assert "plan.report.json is missing" in without.stderr
    report.save(tmp_path / "plan.report.json")
    done = run("report", str(tmp_path / "plan.json"), "--html", str(tmp_path / "out.html"))
    assert done.returncode == 0, done.stderr
    assert "<title>two matrices</title>" in (tmp_path / "out.html").read_text()
    printed = run("report", str(tmp_path / "plan.json"))
    assert Report.from_json(printed.stdout) == report


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "nothing", "--mesh", "2"), "There is no model at nothing"),
        (("plan", "nothing", "--mesh", "two"), "'two' is no mesh"),
        (("plan", "nothing", "--mesh", "2", "--budget", "much"), "'much' is no size"),
        (("plan", "nothing", "--mesh", "2", "--machine", "dgx"), "Unknown machine 'dgx'"),
        (("run", "nothing", "--input", "x.npz"), "nothing"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(arguments, words, tmp_path):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_completion_knows_the_commands():
    done = run(_HIDET_DIST_COMPLETE="complete_bash", COMP_WORDS="hidet-dist pl", COMP_CWORD="1")
    assert "plan" in done.stdout.split()


@pytest.mark.slow
def test_a_configuration_is_planned_without_weights(model, tmp_path):
    out = tmp_path / "plan.json"
    arguments = ("--mesh", "2", "--machine", "dgx-h100", "--batch", "2", "--seq", "8")
    done = run("plan", str(model), *arguments, "--json", "--out", str(out), "--html", str(tmp_path / "out.html"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["title"], summary["mesh"]) == ("small", {"axis0": 2})
    assert hidet_dist.Plan.load(out).makespan_seconds == summary["seconds"]
    assert {family.prefix for family in Report.load(out).families} == {"model.layers"}
    assert (tmp_path / "out.html").exists()
    text = run("plan", str(model), *arguments)
    assert "small on 2 H100-SXM5-80GB" in text.stdout
    for name in ("predicted time", "memory of a device", "runner-up", "distance from the bound"):
        assert name in text.stdout


@pytest.mark.slow
def test_a_model_is_built_and_run(model, tmp_path):
    out = tmp_path / "artifacts"
    built = run("build", str(model), "--mesh", "2", "--batch", "2", "--seq", "8", "--random-weights", "--out", str(out))
    assert built.returncode == 0, built.stderr
    ids = np.arange(16).reshape(2, 8)
    np.savez(tmp_path / "x.npz", input_ids=ids)
    wrong = run("run", str(out), "-n", "3", "--input", str(tmp_path / "x.npz"))
    assert wrong.returncode == 1
    assert "run it with -n 2" in wrong.stderr
    done = run("run", str(out), "-n", "2", "--input", str(tmp_path / "x.npz"), "--output", str(tmp_path / "y.npz"))
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "y.npz") as arrays:
        (logits,) = (arrays[name] for name in arrays.files)
    assert logits.shape == (2, 8, 48)
    assert np.isfinite(logits).all()
    np.savez(tmp_path / "bad.npz", ids=ids)
    bad = run("run", str(out), "--input", str(tmp_path / "bad.npz"))
    assert bad.returncode == 1
    assert "has no array 'input_ids'" in bad.stderr
