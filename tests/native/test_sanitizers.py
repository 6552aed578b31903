"""The native library under sanitizers: ranks are threads there, so that a race between ranks is one of threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = Path(__file__).parent
CORE_NAMES = ("blocks", "collectives", "communicator", "mapped_file", "reduce", "row_exchange", "transport")
CORE = [ROOT / "hidet_dist/src" / f"{name}.cpp" for name in CORE_NAMES]
SHARED_MEMORY = [
    ROOT / "hidet_dist/src" / f"{name}.cpp"
    for name in (
        "exchange",
        "mailbox",
        "segment",
        "segment_collectives",
        "shared_file",
        "shared_memory",
        "waiting",
    )
]
NCCL = [ROOT / "hidet_dist/src" / f"{name}.cpp" for name in ("nccl", "nccl_library")]

# Races have no other test; bad addresses show in the runtime's other tests, though not as surely.
SANITIZERS = pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(output: Path, sources: Sequence[Path], sanitizer: str, *more: str) -> Path:
    flags = ["-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    include = [f"-I{ROOT / 'hidet_dist' / each}" for each in ("include", "src")]
    command = ["g++", *flags, "-DHIDET_DIST_BUILD", *include, *map(str, sources), *more, "-o", str(output)]
    subprocess.run(command, check=True, timeout=1000)
    return output


def run(program: Path, *arguments: Path, **environment: str) -> None:
    # The thread sanitizer does not know the address space layout of newer kernels; without randomization it does.
    command = ["setarch", "-R", str(program), *map(str, arguments)]
    env = {**os.environ, **environment}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False, env=env)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "passed\n"
    assert "WARNING" not in ran.stderr


@needs_compiler
@pytest.mark.slow
@SANITIZERS
def test_collectives_over_shared_memory_are_free_of_races_and_memory_errors(sanitizer: str, tmp_path: Path) -> None:
    run(build(tmp_path / "stress", [*CORE, *SHARED_MEMORY, NATIVE / "stress.cpp"], sanitizer))


@needs_compiler
@pytest.mark.slow
@SANITIZERS
def test_collectives_through_nccl_are_free_of_races_and_memory_errors(sanitizer: str, tmp_path: Path) -> None:
    shared = ["-shared", "-fPIC"]
    driver = build(tmp_path / "libcuda.so.1", [NATIVE / "fake_cuda.cpp"], sanitizer, *shared)
    link = [f"-L{tmp_path}", "-l:libcuda.so.1", f"-Wl,-rpath,{tmp_path}"]
    sources = [NATIVE / "fake_nccl.cpp", ROOT / "hidet_dist/src/reduce.cpp"]
    library = build(tmp_path / "libnccl.so.2", sources, sanitizer, *shared, "-fvisibility=hidden", *link)
    program = build(tmp_path / "stress", [*CORE, *NCCL, NATIVE / "nccl_stress.cpp"], sanitizer, *link)
    run(program, library, driver, FAKE_NCCL_DIR=str(tmp_path))
