"""The search for nvcc, and the error when there is none."""

import os
import stat
import subprocess

import hidet
import pytest

from hidet_dist import auto_parallel
from hidet_dist.errors import CompileError
from hidet_dist.toolchain import cuda

from .elf import needed


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No nvcc on PATH, in CUDA_HOME, from PyPI or where it is usually installed."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cuda, "USUAL", tmp_path / "usual" / "nvcc")
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cuda.shutil, "which", lambda name: None)


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_without_nvcc_the_error_says_how_to_get_it(nowhere, tmp_path):
    with pytest.raises(CompileError, match=r"needs nvcc, and there is none.*CUDA_HOME.*pip install hidet_dist\[nvcc\]"):
        cuda.find_toolkit()


def test_without_nvcc_nothing_is_planned_or_written(nowhere, tmp_path):
    x = hidet.symbol([2, 4], "float32", "cpu")
    graph = hidet.trace_from(x + 1.0, [x])
    with pytest.raises(CompileError, match="needs nvcc"):
        auto_parallel(graph, {"mesh_shape": [2]}, {"target": "cuda", "arch": "sm_90"}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_compiler_that_does_not_run_or_is_not_nvidias_is_named(nowhere, tmp_path, monkeypatch):
    nvcc = script(tmp_path / "broken" / "bin" / "nvcc", "exit 3")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "broken"))
    with pytest.raises(CompileError, match=f"{nvcc} does not run"):
        cuda.find_toolkit()
    nvcc = script(tmp_path / "other" / "bin" / "nvcc", "echo some other compiler")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "other"))
    with pytest.raises(CompileError, match="is not NVIDIA's"):
        cuda.find_toolkit()


def test_a_toolkit_without_a_runtime_is_refused(nowhere, tmp_path, monkeypatch):
    text = f'case "$1" in --version) echo "release 13.0, V13.0.88";; *) echo "#$ TOP={tmp_path}/bare";; esac'
    script(tmp_path / "bare" / "bin" / "nvcc", text)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "bare"))
    with pytest.raises(CompileError, match=r"no libcudart\.so"):
        cuda.find_toolkit()


def test_cuda_home_comes_first_and_a_versioned_runtime_will_do(nowhere, tmp_path, monkeypatch):
    text = f'case "$1" in --version) echo "release 13.1, V13.1.5";; *) echo "#$ TOP={tmp_path}/own";; esac'
    nvcc = script(tmp_path / "own" / "bin" / "nvcc", text)
    (tmp_path / "own" / "lib").mkdir()
    (tmp_path / "own" / "lib" / "libcudart.so.13").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "own"))
    found = cuda.find_toolkit()
    assert found == cuda.Toolkit(nvcc, "13.1.5", tmp_path / "own" / "lib")
    folder = cuda.link_folder(found, tmp_path / "link")
    assert os.readlink(folder / "libcudart.so") == str(tmp_path / "own" / "lib" / "libcudart.so.13")


def test_the_stand_in_passes_for_libcuda_at_link_time_only(tmp_path):
    found = cuda.Toolkit(tmp_path / "nvcc", "13.0.88", tmp_path)
    (tmp_path / "libcudart.so").write_text("")
    folder = cuda.link_folder(found, tmp_path / "link")
    assert cuda.link_folder(found, tmp_path / "link") == folder  # made once
    assert [path.name for path in tmp_path.glob(".link*")] == []
    for name, call, wanted in (("uses", "cuTensorMapEncodeTiled()", True), ("does_not", "0", False)):
        source = tmp_path / f"{name}.c"
        source.write_text(f"int cuTensorMapEncodeTiled(void); int f(void) {{ return {call}; }}")
        library = tmp_path / f"{name}.so"
        link = ["-shared", "-fPIC", "-Wl,--as-needed", f"-L{folder}", "-lcuda", "-o", library]
        subprocess.run(["gcc", source, *link], check=True)
        assert ("libcuda.so.1" in needed(library)) == wanted
