"""The cache of compiled code: what is used least is removed once it takes too much."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hidet_dist.compile.cache import mark_used, prune

KIB = 1024


def entry(cache: Path, name: str, age_seconds: float, kib: int = 64) -> Path:
    folder = cache / name
    folder.mkdir(parents=True)
    file = folder / ("prelude.h.gch" if "prelude" in name else "lib.so")
    file.write_bytes(bytes(range(256)) * 4 * kib)
    (folder.parent / f"{folder.name}.lock").touch()
    os.utime(file, (time.time() - age_seconds,) * 2)
    return file


def test_entries_used_longest_ago_go_first(tmp_path: Path):
    kernels = [entry(tmp_path, f"cpu/g++-1/ops/cpu_space_0/add/{age}", age * 1e5) for age in range(1, 5)]
    headers = entry(tmp_path, "cpu/g++-1/prelude/a", 5e5)
    launcher = entry(tmp_path, "launchers/b", 6e5)
    foreign = entry(tmp_path, "ops/cuda_space_0/add/c", 7e5)
    mark_used([headers])
    left = prune(tmp_path, most_bytes=300 * KIB)
    assert not launcher.parent.exists() and not kernels[3].parent.exists() and not kernels[2].parent.exists()
    assert headers.exists() and kernels[0].exists() and kernels[1].exists() and foreign.exists()
    assert left <= 240 * KIB
    assert not list(tmp_path.rglob(".*removed*"))
    assert {path.name for path in kernels[0].parent.parent.glob("*.lock")} == {"1.lock", "2.lock"}


def test_nothing_is_removed_within_the_bound_or_while_it_may_be_in_use(tmp_path: Path):
    old, new = entry(tmp_path, "cpu/x/ops/y/z/old", 1e6), entry(tmp_path, "cpu/x/ops/y/z/new", 0)
    assert prune(tmp_path, most_bytes=KIB * KIB) == 128 * KIB
    assert old.exists()
    prune(tmp_path, most_bytes=KIB)
    assert not old.exists() and new.exists()
