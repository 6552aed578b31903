"""The benchmark of GPUs, from end to end on the stand-ins: that it finds, compares, times and writes what it should."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import run_on_one_gpu

PROGRAM = Path(__file__).with_name("benchmark_on_stand_ins.py")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def benchmark(stand_ins: Path, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    exchange = folder / "exchange"
    exchange.mkdir(exist_ok=True)
    return run_on_one_gpu(stand_ins, exchange, PROGRAM, str(folder / "results"), **more)


@pytest.mark.parametrize(("cases", "peers"), [("gpt", {"EAGER": "1"}), ("gpt,llama", {})])
@pytest.mark.slow
def test_it_measures_every_variant(stand_ins: Path, tmp_path: Path, cases: str, peers: dict[str, str]) -> None:
    done = benchmark(stand_ins, tmp_path, CASES=cases, **peers)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said.pop("failed"), said.pop("not_run")) == ([], [])
    (file,) = (tmp_path / "results").iterdir()
    assert file.name == "gpu-stand-in.json"
    result = json.loads(file.read_text())
    assert set(said) == set(result["cases"]) == set(cases.split(","))
    for own in result["cases"].values():
        graphs = {"hidet_1_graph", "hidet_2_graph"}
        peers_of = {"torch_eager", "torch_compile", "torch_compile_graph"}
        assert set(own["median_seconds"]) == {"hidet_1", "hidet_2", *graphs, *peers_of}
        assert all(seconds > 0 for seconds in own["median_seconds"].values())
        assert own["ratios"]["over_compile"] == pytest.approx(
            own["median_seconds"]["hidet_1"] / own["median_seconds"]["torch_compile"]
        )
        assert own["built"]["2"]["collectives"] > 0
        for variant in ("hidet_1", "hidet_2"):
            profile, built = own["profile"][variant], own["built"][variant[-1]]
            assert profile["kernel_seconds"] > 0
            assert (profile["collective_seconds"] > 0) == (variant == "hidet_2")
            assert profile["device_bytes"] >= built["weight_bytes"] + built["workspace_bytes"]
        # Each rank holds about half of the weights, and what is not split.
        held = [own["built"][ranks]["weight_bytes"] for ranks in "12"]
        assert held[1] < 0.8 * held[0]
    for word in ("Median time of a call", "Memory of a rank", "hidet_2_graph", "Kernels of small gpt"):
        assert word in done.stderr


@pytest.mark.slow
def test_cases_that_crash_or_hang_are_skipped_and_the_rest_is_measured(stand_ins: Path, tmp_path: Path) -> None:
    done = benchmark(stand_ins, tmp_path, CASES="gpt", EAGER="1", ENDS="gpt-1-graph=crash,gpt-2-graph=hang")
    assert done.returncode == 1, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["failed"]) == 2
    assert "hidet_1_graph has ended" in said["failed"][0]
    assert "hidet_2_graph did not answer" in said["failed"][1]
    assert {"over_compile", "two_ranks_over_one"} <= set(said["gpt"])
    assert "graph_over_compile" not in said["gpt"]


@pytest.mark.slow
def test_cases_that_fail_are_skipped_and_the_rest_is_measured(stand_ins: Path, tmp_path: Path) -> None:
    """Two ranks on one device, which NCCL refuses."""
    done = benchmark(stand_ins, tmp_path, CASES="gpt", EAGER="1", FAKE_NCCL_VERSION="22907")
    assert done.returncode == 1, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert any("hidet_2" in failure for failure in said["failed"])
    assert "over_compile" in said["gpt"]
    assert "two_ranks_over_one" not in said["gpt"]


def test_a_machine_without_a_gpu_is_named(stand_ins: Path, tmp_path: Path) -> None:
    done = benchmark(stand_ins, tmp_path, CASES="gpt", FAKE_CUDA_DEVICES="0")
    assert done.returncode == 2
    assert "no GPU, nothing was measured" in done.stderr
    assert not (tmp_path / "results").exists()
