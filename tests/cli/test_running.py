"""The files of arrays that ``hidet-dist run`` reads and writes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import hidet
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hidet_dist
from hidet_dist.cli.app import app
from hidet_dist.cli.arrays import opened_arrays, write_arrays
from hidet_dist.cli.running import main
from hidet_dist.errors import ConfigError


def read(path: Path) -> dict[str, np.ndarray]:
    with opened_arrays(path) as arrays:
        return {name: arrays.read(name) for name in arrays.names}


def test_arrays_of_any_name_are_written_and_read(tmp_path: Path) -> None:
    arrays = {"file": np.arange(6).reshape(2, 3), "allow_pickle": np.float32([1.5]), "output.0": np.array(True)}
    digests = set()
    for number in range(2):
        path = tmp_path / f"{number}.npz"
        write_arrays(path, arrays)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1
    found = read(path)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    with np.load(path, allow_pickle=False) as loaded:
        np.testing.assert_array_equal(loaded["file"], arrays["file"])


def test_nothing_is_left_of_arrays_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        write_arrays(tmp_path / "x.npz", {"x": np.array([object()])})
    assert not list(tmp_path.iterdir())


def archive(path: Path, entry: bytes) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", entry)


def header(descr: str, shape: str) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "entry",
    [
        header("'<f4'", "(1000000000000, 1000000)") + bytes(16),  # more than any memory
        header("'<f4'", f"({'1, ' * 2000})") + bytes(4),
        header("'<f4'", f"({'9' * 5000},)") + bytes(4),  # more digits than Python converts
        header("'<f4'", "(-1, -4)") + bytes(16),
        header("'<f4'", "(4") + bytes(16),
        header("'|O'", "(2,)") + bytes(16),
        header("[('a', '<f4')]", "(4,)") + bytes(12),
        header("'<f4'", "(4,)") + bytes(20),
        b"\x93NUMPY\x03\x00",
        b"",
    ],
)
def test_headers_that_lie_are_refused_before_anything_is_allocated(tmp_path: Path, entry: bytes) -> None:
    archive(tmp_path / "x.npz", entry)
    with pytest.raises(ConfigError, match="Cannot read arrays") as refused:
        read(tmp_path / "x.npz")
    assert len(str(refused.value)) < 1000


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    archive(path, header("'<f4'", "(4,)") + bytes(16))
    whole = path.read_bytes()
    for data in (b"no arrays", b"", whole[:-30], whole[:60] + b"\1" + whole[61:], np.zeros(3).tobytes()):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="Cannot read arrays"):
            read(path)
    with pytest.raises(ConfigError, match="Cannot read arrays"):
        read(tmp_path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header("'<f4'", "(1,)") + bytes(4))
        file.writestr("x", header("'<f4'", "(1,)") + bytes(4))
    with pytest.raises(ConfigError, match="two arrays 'x'"):
        read(path)


def test_bfloat16_is_float32_in_files(tmp_path: Path) -> None:
    x = hidet.symbol([2, 4], "bfloat16", "cpu")
    graph = hidet.trace_from(x * x, [x])
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {}, tmp_path / "artifacts")
    values = torch.arange(8).reshape(2, 4).to(torch.bfloat16) / 3
    # Numbers, and the bytes that an array of the ml_dtypes package is saved as.
    for number, given in enumerate((values.float().numpy(), values.view(torch.uint16).numpy().view("V2"))):
        np.savez(tmp_path / f"{number}.npz", x0=given)
        files = [str(tmp_path / name) for name in ("artifacts", f"{number}.npz", "y.npz")]
        assert main(files[0], "main", *files[1:], str(tmp_path)) == 0
        with np.load(tmp_path / "y.npz") as arrays:
            np.testing.assert_array_equal(arrays["y0"], (values * values).float().numpy())
    np.savez(tmp_path / "wrong.npz", x0=np.zeros((2, 4)))
    done = CliRunner().invoke(app, ["run", str(tmp_path / "artifacts"), "--input", str(tmp_path / "wrong.npz")])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "'x0' of the dtype float64; the program takes bfloat16, which a .npz file has as float32." in done.stderr


def test_an_error_of_a_call_is_one_line(tmp_path: Path) -> None:
    """All ranks raise it, in their own words."""
    ids = hidet.symbol([2, 4], "int64", "cpu")
    table = np.arange(51 * 8, dtype=np.float32).reshape(51, 8)
    graph = hidet.trace_from(hidet.ops.take(hidet.asarray(table), ids, 0), [ids])
    hidet_dist.auto_parallel(graph, {"mesh_shape": [2]}, {"pins": {"w0": "(S0, R)"}}, tmp_path / "artifacts")
    np.savez(tmp_path / "x.npz", x0=np.full((2, 4), 99))
    command = [sys.executable, "-m", "hidet_dist.cli", "run", "artifacts", "--input", "x.npz"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "hidet-dist: Input 0 is 99 at [0, 0]: it is used as an index into 51 rows, and must be from -51 to 50.\n"
    )
