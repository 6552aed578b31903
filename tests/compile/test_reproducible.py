"""The same graph gives the same artifacts, byte for byte, wherever they are built, and libraries stay apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import hidet
import numpy as np
import pytest
from hidet.graph import FlowGraph

import hidet_dist
from hidet_dist import native


def graph() -> FlowGraph:
    """A graph with products by weights, a collective, a lookup that may fail, and kernels of hidet's own."""
    rng = np.random.default_rng(0)
    table, w1, w2 = (
        hidet.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in ([16, 64], [64, 128], [128, 64])
    )
    rows = hidet.symbol([8], "int64", "cpu")
    x = hidet.ops.take(table, rows, axis=0)
    y = hidet.ops.softmax(hidet.ops.relu(x @ w1) @ w2, -1)
    return hidet.trace_from(hidet.ops.cumsum(y, 0), [rows])


def test_artifacts_have_the_same_bytes_from_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the folder of the artifacts, that of the cache, nor that of the headers is in them."""
    built = []
    for folder in (tmp_path / "first", tmp_path / "another" / "folder"):
        headers = shutil.copytree(native.include_dir(), folder / "include")
        with monkeypatch.context() as patch, hidet.option.context():
            patch.setattr(native, "include_dir", lambda headers=headers: headers)
            hidet.option.cache_dir(str(folder / "cache"))
            pins = {"w1": "(R, S0)"}
            hidet_dist.auto_parallel(graph(), {"mesh_shape": [2]}, {"pins": pins}, folder / "out")
        libraries = list((folder / "cache").rglob("lib.so"))
        files = [path for path in sorted((folder / "out").rglob("*")) if path.is_file()]
        assert len(libraries) == sum(path.suffix == ".so" for path in files)  # the cache was cold
        built.append({path.relative_to(folder / "out"): path.read_bytes() for path in files})
    first, second = built
    assert first.keys() == second.keys()
    assert [path for path, content in first.items() if content != second[path]] == []


def test_programs_whose_libraries_have_one_name_stay_apart(tmp_path: Path) -> None:
    """The loader takes libraries of one name for one where it looks for them by name."""
    x = np.linspace(-2, 2, 32, dtype=np.float32).reshape(4, 8)
    functions = {"relu": (hidet.ops.relu, np.maximum(x, 0)), "square": (hidet.ops.square, x * x)}
    for name, (function, _) in functions.items():
        given = hidet.symbol([4, 8], "float32", "cpu")
        traced = hidet.trace_from(function(given), [given])
        hidet_dist.auto_parallel(traced, {"mesh_shape": [1]}, {}, tmp_path / name)
    models = [(hidet_dist.load_partition(tmp_path / name, 0), expected) for name, (_, expected) in functions.items()]
    for _ in range(2):
        for model, expected in models:
            np.testing.assert_array_equal(model(x), expected)
    for model, _ in models:
        model.close()
