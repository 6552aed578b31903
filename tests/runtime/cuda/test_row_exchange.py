"""Rows that go to experts of other GPUs and back: emulated kernels, and messages of NCCL's stand-in."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tests.dispatch import build, case
from tests.emulator.emulated import Emulator

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import run_on_one_gpu

from hidet_dist import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).with_name("checks_emulated.py")


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 40), (3, 6)])
def test_rows_go_to_experts_and_back(
    emulator: Emulator, stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, tokens: int
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))
    # Graphs are asked for, which the program cannot be.
    options = {"target": "cuda", "arch": "sm_90", "cuda": {"cublas": False, "cuda_graph": True}}
    artifacts = tmp_path / "artifacts"
    build(artifacts, ranks, "float32", tokens, options, "dgx-h100")
    x, chosen, expected = case(ranks, tokens, 0)
    np.savez(tmp_path / "artifacts.npz", x, chosen, expected=expected, tolerance=0, rms=0)
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    launched = ("-n", str(ranks), str(PROGRAM), "serve", str(artifacts))
    done = run_on_one_gpu(stand_ins, exchange, Path(launch.__file__), *launched, seconds=1700)
    assert done.returncode == 0, done.stdout + done.stderr
