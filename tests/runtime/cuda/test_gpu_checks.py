"""The checks of GPUs, from end to end on the stand-ins: that they build, serve, compare and report what they should."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import on_one_gpu, run_on_one_gpu

PROGRAM = Path(__file__).with_name("checks_on_stand_ins.py")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def checks(stand_ins: Path, folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run_on_one_gpu(stand_ins, folder, PROGRAM, *arguments, **more)


@pytest.mark.parametrize(
    ("only", "steps"),
    [("gpt2", 20), ("llama", 20)],  # emulated kernels have quick ones
)
@pytest.mark.slow
def test_models_are_built_served_and_compared(stand_ins: Path, tmp_path: Path, only: str, steps: int) -> None:
    done = checks(stand_ins, tmp_path, "--ranks", "1", "2", "--only", only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{steps} ok, 0 failed, 0 not run" in done.stdout
    assert "off by " in done.stdout


@pytest.mark.slow
def test_collectives_are_checked(stand_ins: Path, tmp_path: Path) -> None:
    done = checks(stand_ins, tmp_path, "--ranks", "4", "--only", "collectives")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "collectives of each rank are right" in done.stdout


@pytest.mark.slow
def test_a_wrong_answer_fails_and_is_reported(stand_ins: Path, tmp_path: Path) -> None:
    done = checks(stand_ins, tmp_path, "--ranks", "1", "--only", "gpt2, float32, 1 ranks, plain", WRONG="1")
    assert done.returncode == 1
    assert "rounding explains" in done.stdout
    assert "failed: serve gpt2, float32, 1 ranks, plain" in done.stdout


@pytest.mark.slow
def test_cases_that_crash_or_hang_do_not_stop_the_others(stand_ins: Path, tmp_path: Path) -> None:
    ends = {"ENDS": "plain=crash,graph=hang"}
    done = checks(stand_ins, tmp_path, "--ranks", "1", "--only", "gpt2, float32, 1 ranks", **ends)
    assert done.returncode == 1
    assert "4 ok, 2 failed, 0 not run" in done.stdout, done.stdout
    for variant, why in (("plain", "rank 0 was ended by SIGSEGV"), ("graph", "the time limit of 8 s is over")):
        assert f"failed: serve gpt2, float32, 1 ranks, {variant}" in done.stdout
        assert why in done.stdout
    assert "ok   serve gpt2, float32, 1 ranks, candidates" in done.stdout


@pytest.mark.slow
def test_nothing_is_begun_once_the_time_is_over(stand_ins: Path, tmp_path: Path) -> None:
    arguments = ("--ranks", "1", "--only", "gpt2, float32, 1 ranks", "--seconds", "0")
    done = checks(stand_ins, tmp_path, *arguments, ENDS="plain=crash")
    assert done.returncode == 1
    assert "0 ok, 0 failed, 6 not run" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_named(stand_ins: Path, tmp_path: Path) -> None:
    done = checks(stand_ins, tmp_path, "--only", "gpt2", FAKE_CUDA_DEVICES="0")
    assert done.returncode == 2
    assert "no GPU, nothing was checked" in done.stdout


@pytest.mark.slow
def test_what_a_check_runs_ends_with_it(stand_ins: Path, tmp_path: Path) -> None:
    """The launcher and its ranks are in sessions of their own, which no signal to the program's group reaches."""
    started = tmp_path / "pid"
    only = ("--ranks", "1", "--only", "gpt2, float32, 1 ranks, plain", "--patience", "100")
    hangs = {"ENDS": "plain=hang", "STARTED": str(started)}
    command, environment = on_one_gpu(stand_ins, tmp_path, PROGRAM, *only, **hangs)
    program = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        assert eventually(started.exists)
        rank = Path("/proc") / started.read_text()
        assert rank.exists()
    finally:
        program.terminate()
        assert program.wait(300) == 128 + signal.SIGTERM
    assert eventually(lambda: not rank.exists())


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()
