"""Models of transformers, traced from PyTorch and read from ONNX, as ``make models`` checks them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hidet_dist.testing.model_zoo import CASES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "models.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES if case.library == "transformers"])
def test_a_model_is_right_in_the_simulator_and_over_two_processes(name: str):
    command = [sys.executable, "-m", "benchmarks.models", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["by_name"]["right"] == [name]


@pytest.mark.slow
def test_no_model_of_the_published_table_is_wrong():
    outcomes = json.loads(RESULTS.read_text())["results"]
    assert list(outcomes) == [case.name for case in CASES if case.name in outcomes]
    assert {own["verdict"] for own in outcomes.values()} <= {"right", "refused"}
    assert all(own["reason"] for own in outcomes.values() if own["verdict"] == "refused")
