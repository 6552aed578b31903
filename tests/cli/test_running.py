"""The files of arrays that ``hidet-dist run`` reads and writes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from hidet_dist.cli.running import read_arrays, write_arrays
from hidet_dist.errors import ConfigError


def test_arrays_of_any_name_are_written_and_read(tmp_path: Path) -> None:
    arrays = {"file": np.arange(6).reshape(2, 3), "allow_pickle": np.float32([1.5]), "output.0": np.array(True)}
    digests = set()
    for number in range(2):
        path = tmp_path / f"{number}.npz"
        write_arrays(path, arrays)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1
    found = read_arrays(path)
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


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_text("no arrays")
    with pytest.raises(ConfigError, match="Cannot read arrays"):
        read_arrays(path)
