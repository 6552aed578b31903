"""Kernels for the CPU are cached by all that they are made from."""

from __future__ import annotations

from pathlib import Path

import hidet
import pytest

from hidet_dist.compat.cpu_build import compiled_with, content_of
from hidet_dist.compile.cpu import build
from hidet_dist.compile.cpu.build import cpu_target

FLAGS = ("-mavx2",)


def folder_of_kernels(*generators: str, flags: tuple[str, ...] = FLAGS, headers: tuple[str, ...] = ()) -> str:
    content_of.cache_clear()  # sources do not change within a process
    with compiled_with(flags, [], headers, generators):
        return str(hidet.option.get_cache_dir())


def test_flags_headers_and_sources_change_the_folder(tmp_path: Path) -> None:
    source = tmp_path / "deep" / "loops.py"
    source.parent.mkdir()
    found = [folder_of_kernels(), folder_of_kernels(flags=("-mavx512f",)), folder_of_kernels(headers=("a.h",))]
    for text in ("step = 1", "step = 2", "step = 1"):
        source.write_text(text)
        found.append(folder_of_kernels(str(tmp_path)))
    assert len(set(found)) == len(found) - 1 and found[3] == found[5]
    assert folder_of_kernels() == found[0]


def test_the_target_covers_the_sources_that_generate_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cpu_target():
        ours = hidet.option.get_cache_dir()
    package = Path(build.__file__).parents[1]
    assert {Path(folder) for folder in build.GENERATORS} >= {package, package.with_name("compat")}
    (tmp_path / "changed.py").touch()
    monkeypatch.setattr(build, "GENERATORS", (*build.GENERATORS, str(tmp_path)))
    with cpu_target():
        assert hidet.option.get_cache_dir() != ours
