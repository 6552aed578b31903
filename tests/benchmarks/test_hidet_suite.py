"""Whether `make models-hidet` tells right, refused, wrong and other tests apart, with a clone made up for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = [sys.executable, "-m", "benchmarks.hidet_suite"]
RESULTS = ROOT / "benchmarks" / "results" / "models-hidet.json"

TESTS = """
import hidet
import numpy as np
import pytest
import torch


def test_eager():
    x, w = np.random.randn(4, 6).astype("float32"), np.random.randn(6, 8).astype("float32")
    y = hidet.ops.relu(hidet.asarray(x, device="cuda") @ hidet.asarray(w).cuda()).cpu().numpy()
    np.testing.assert_allclose(y, np.maximum(x @ w, 0), atol=1e-4)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_symbolic_graph(rows):
    x = hidet.symbol(["rows", 4])
    graph = hidet.graph.optimize(hidet.trace_from(hidet.ops.exp(x))).build()
    given = hidet.randn([rows, 4])
    np.testing.assert_allclose(graph(given).numpy(), np.exp(given.numpy()), rtol=1e-4)


def test_module():
    linear, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4, device="cuda")
    compiled = torch.compile(lambda x: linear(x), backend="hidet")
    torch.testing.assert_close(compiled(x), linear(x))


def test_module_that_is_not_supported():
    torch.compile(torch.nonzero, backend="hidet")(torch.randn(2, 4))


def test_wrong_reference():
    assert (hidet.ops.exp(hidet.ones([2])).numpy() == 0).all()


def test_module_with_a_wrong_reference():
    assert (torch.compile(torch.exp, backend="hidet")(torch.ones(2)) == 0).all()


def test_computes_nothing():
    pass
"""


@pytest.mark.slow
def test_verdicts_of_all_kinds(tmp_path: Path):
    folder = tmp_path / "hidet" / "tests" / "operators_core"
    folder.mkdir(parents=True)
    (folder / "test_kinds.py").write_text(TESTS)
    table = tmp_path / "table.json"
    chosen = ["--cases", "2", "--out", str(table), "operators_core"]
    command = [*SUITE, str(tmp_path / "hidet"), *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=ROOT, check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    names = {kind: sorted(name.partition("::test_")[2] for name in own) for kind, own in found["by_name"].items()}
    assert names == {
        "right": ["eager", "module", "symbolic_graph"],
        "refused": ["module_that_is_not_supported"],
        "wrong": ["module_with_a_wrong_reference"],
        "outside": ["computes_nothing", "wrong_reference"],
    }
    assert found["models"] == 5
    assert found["cases"] == {"right": 4, "refused": 1, "wrong": 1, "outside": 2}
    results = json.loads(table.read_text())["results"]
    assert len(results) == 7
    assert {own["wrong"] for name, own in results.items() if name.endswith("wrong_reference")} == {0, 1}
    assert done.returncode == 1


@pytest.mark.slow
def test_another_folder_is_refused(tmp_path: Path):
    done = subprocess.run([*SUITE, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "is no clone of hidet" in done.stderr


def test_no_test_of_the_published_table_is_wrong():
    outcomes = json.loads(RESULTS.read_text())["results"]
    assert all(own["wrong"] == 0 for own in outcomes.values())
    assert sum(own["right"] for own in outcomes.values()) > 0
    assert all(own["why"] for own in outcomes.values() if own["refused"] or own["outside"])
