"""Serving for long: what a process holds does not grow, and every answer is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist

CALLS = 10_000
RANKS = 4
WARM = 2  # thousands of calls, in which all sizes have been seen
MOST_GROWTH_BYTES = 2**19  # of the heap, which is never quite the same


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_calls_over_four_ranks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal(shape).astype(np.float32) / 4 for shape in ((32, 64), (64, 32)))
    np.savez(tmp_path / "weights.npz", first=first, second=second)
    x = hidet.symbol(["batch", "seq", 32], "float32", "cpu")
    y = ops.softmax(ops.matmul(ops.relu(ops.matmul(x, hidet.asarray(first))), hidet.asarray(second)), axis=-1)
    config = {"symbols": {"batch": 8, "seq": 24}, "pins": {"w0": "(R, S0)", "w1": "(S0, R)"}}
    graph = hidet.trace_from(y, [x])
    assert hidet_dist.auto_parallel(graph, {"mesh_shape": [RANKS]}, config, tmp_path / "artifacts").communications
    soak = [str(Path(__file__).with_name("soak.py")), "artifacts", "weights.npz", str(CALLS), "."]
    done = subprocess.run(
        [sys.executable, "-m", "hidet_dist.launch", "-n", str(RANKS), *soak],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        print(f"rank {rank}: {CALLS} calls in {result['seconds']:.0f} s, {result['samples']}")
        warm, *later = result["samples"][WARM:]
        for held in later:
            assert held["bytes"] <= warm["bytes"] + MOST_GROWTH_BYTES
            assert held["descriptors"] == warm["descriptors"]
            assert held["threads"] == warm["threads"]
