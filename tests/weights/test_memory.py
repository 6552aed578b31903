"""Building artifacts takes memory for blocks of the weights, not for the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from hidet_dist.artifacts import Manifest

BUILD = Path(__file__).with_name("build.py")
LOAD = Path(__file__).with_name("load.py")
WIDTH = 8192
WEIGHT_BYTES = 2 * WIDTH * WIDTH * 4


def write_model(path: Path, width: int) -> np.ndarray:
    """Two matrices whose rows begin with random numbers; the file takes the disk's space for these only."""
    header = {
        name: {"dtype": "F32", "shape": [width, width], "data_offsets": [n * width**2 * 4, (n + 1) * width**2 * 4]}
        for n, name in enumerate(("first", "second"))
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(begin + 2 * width**2 * 4)
    data = np.memmap(path, np.float32, "r+", begin, (2, width, width))
    data[:, ::16, :: width // 2] = np.random.default_rng(0).standard_normal(data[:, ::16, :: width // 2].shape)
    expected = np.array(data[:, :, :: width // 2])
    del data
    return expected


def build(folder: Path, width: int) -> tuple[dict[str, Any], np.ndarray]:
    folder.mkdir()
    written = write_model(folder / "model.safetensors", width)
    done = subprocess.run(
        [sys.executable, str(BUILD), str(folder), str(width)], capture_output=True, text=True, timeout=1000, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), written


def load(folder: Path) -> int:
    """The larger of two ranks' peaks of memory, in bytes, once they have loaded what was built."""
    command = [sys.executable, "-m", "hidet_dist.launch", "-n", "2", str(LOAD), str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    return max(map(int, done.stdout.split()))


@pytest.mark.slow
def test_the_peak_of_memory_is_not_that_of_the_weights(tmp_path: Path) -> None:
    small, _ = build(tmp_path / "small", 64)
    large, written = build(tmp_path / "large", WIDTH)
    assert large["peak"] - small["peak"] < WEIGHT_BYTES / 8
    # What is in the ranks' files is what was in the model's, each half in one of them.
    half = WIDTH // 2
    (stage,) = Manifest.load(tmp_path / "large/out").program().stages
    for number, name in enumerate(("w0", "w1")):
        for rank in range(2):
            own = slice(rank * half, (rank + 1) * half)
            with safe_open(tmp_path / f"large/out/weights/rank{rank}.safetensors", "np") as file:
                panels = stage.panels[name]
                first = file.get_slice(name)[0, : panels.depth * panels.width : panels.width]  # column
                if large["specs"][name] == "(S0, R)":
                    np.testing.assert_array_equal(first, written[number, own, 0])
                else:
                    assert large["specs"][name] == "(R, S0)"
                    np.testing.assert_array_equal(first, written[number, :, rank])
    # Loading maps the rank's own weights: nothing of them is in its memory before it is read.
    assert load(tmp_path / "large") - load(tmp_path / "small") < WEIGHT_BYTES / 2 / 16
