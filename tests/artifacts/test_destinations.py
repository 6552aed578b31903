"""Destinations of artifacts: invalid ones are refused before work starts, and no files are left."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest

import hidet_dist  # noqa: F401  (adds its calls to hidet.distributed)
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.errors import ArtifactError, ConfigError
from hidet_dist.export.write import check_destination, replacing
from hidet_dist.limits import MOST_MANIFEST_BYTES, MOST_NAME_BYTES


def _graph() -> hidet.FlowGraph:
    x = hidet.symbol([4, 8], "float32", "cpu")
    return hidet.trace_from(hidet.ops.matmul(x, hidet.asarray(np.ones((8, 6), np.float32))), [x])


@pytest.mark.parametrize("out_dir", [None, 3, b"out", ["out"], 1.5, np.zeros(2)])
def test_values_other_than_paths_are_refused(out_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="out_dir must be the path of a folder"):
        hidet.distributed.auto_parallel(_graph(), {"mesh_shape": [1]}, {}, out_dir)
    with pytest.raises(ArtifactError, match="path of a folder"):
        hidet.distributed.load_partition(out_dir, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out_dir", "says"),
    [
        ("", "must end in the name of a folder"),
        (".", "must end in the name of a folder"),
        ("a/..", "must end in the name of a folder"),
        ("/", "must end in the name of a folder"),
        ("a\0b", "is not a path"),
        ("\ud800", "is not a path"),
        ("x" * (MOST_NAME_BYTES + 1), f"more than {MOST_NAME_BYTES} bytes"),
        ("é" * MOST_NAME_BYTES, f"more than {MOST_NAME_BYTES} bytes"),
        ("x" * 300 + "/out", "No artifacts can be written"),
        ("x/" * 3000 + "out", "No artifacts can be written"),
        ("/proc/out", "No artifacts can be written"),
        ("/proc/self/fdinfo/out", "No artifacts can be written"),
        ("/dev/null", "is not a folder"),
        ("/dev/null/out", "No artifacts can be written"),
    ],
)
def test_places_that_cannot_be_written_to(
    out_dir: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=says):
        hidet.distributed.auto_parallel(_graph(), {"mesh_shape": [1]}, {}, out_dir)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path)], ids=["pipe", "link to itself"])
def test_paths_other_than_folders_are_refused(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "out")
    for recompile in (False, True):
        with pytest.raises(ArtifactError, match="is not a folder"):
            check_destination(tmp_path / "out", recompile)
    with pytest.raises(ArtifactError, match="holds no artifacts"):
        hidet.distributed.load_partition(tmp_path / "out", 0)


@pytest.mark.parametrize("folder", ["a\0b", "x" * 5000, "/dev/zero", "gone", "\ud800"])
def test_folders_that_hold_nothing(folder: str) -> None:
    with pytest.raises(ArtifactError, match="holds no artifacts"):
        hidet.distributed.load_partition(folder, 0)


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to("folder")
    place = check_destination(link, False)
    with replacing(place) as staging:
        (staging / "file").write_text("new")
    assert link.is_symlink() and (folder / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link"]


def test_a_full_disk_is_an_error_of_the_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before anything is written, or while it is."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 8 * 6 * 4 - 1))
    with pytest.raises(ArtifactError, match=r"take 192 bytes, and the disk of .* has 191 left"):
        hidet.distributed.auto_parallel(_graph(), {"mesh_shape": [1]}, {}, tmp_path / "out")
    with pytest.raises(ArtifactError, match="No space left"), replacing(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())


def test_a_sparse_manifest_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    os.truncate(tmp_path / "manifest.json", 2**33)
    with pytest.raises(ArtifactError, match=f"at most {MOST_MANIFEST_BYTES} are read"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("shape", [[0, 8], [4, 0]])
def test_dims_of_size_0_are_refused(shape: list[int], tmp_path: Path) -> None:
    x, used = hidet.symbol(shape, "float32", "cpu"), hidet.symbol([4, 8], "float32", "cpu")
    for graph in (hidet.trace_from(hidet.ops.exp(x), [x]), hidet.trace_from(hidet.ops.exp(used), [used, x])):
        with pytest.raises(ConfigError, match=r"x\d of the graph has the shape .*size 0"):
            hidet.distributed.auto_parallel(graph, {"mesh_shape": [1]}, {}, tmp_path / "out")


def test_weights_of_size_0_are_refused(tmp_path: Path) -> None:
    x = hidet.symbol([4, 8], "float32", "cpu")
    graph = hidet.trace_from([hidet.ops.exp(x), hidet.zeros([0, 3])], [x])
    with pytest.raises(ConfigError, match=r"w0 of the graph has the shape \[0, 3\]"):
        hidet.distributed.auto_parallel(graph, {"mesh_shape": [1]}, {}, tmp_path / "out")
