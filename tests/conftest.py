"""The set-up of every test, and fixtures that several folders share.

The fixtures import what takes long to import: the process that hands out tests to others has no need of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.emulator.emulated import Emulator

    from hidet_dist.search import SearchOptions
    from hidet_dist.search.limits import Limits

# How long an example takes depends on what else the machine does, and decides nothing.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


# Images of containers often turn bytecode off, and each of the processes that tests start would compile all modules.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

gc.disable()  # modules and tests stay: garbage is collected once they are all there


def pytest_report_header() -> str:
    from tests.seeds import how_to_repeat

    return f"random instances: {how_to_repeat()}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say after failures how to repeat them."""
    from tests.seeds import how_to_repeat

    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"{how_to_repeat()} repeats the random instances of this run.")


def pytest_unconfigure() -> None:
    """Leave what there is out of collections: pytest and Python look through it several times before they end."""
    gc.freeze()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, all of it rarely: that takes half a second, mostly for what is imported."""
    gc.freeze()
    gc.unfreeze()  # what there is counts as old
    gc.set_threshold(5000, 10, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def quick_reference_kernels() -> Iterator[None]:
    """What tests have hidet compute by itself, to compare with, is built with precompiled headers and IEEE arithmetic.

    hidet's own flags are several times as slow, and turn subnormal numbers off in the thread that loads a kernel.
    """
    from hidet_dist import native
    from hidet_dist.compat.cpu_build import compiler_with
    from hidet_dist.compat.replacing import replaced
    from hidet_dist.compile.cpu.arch import NATIVE, arch_of

    headers = ("hidet_dist/kernels/runtime.h",)
    compiler = compiler_with(arch_of(NATIVE).flags, [str(native.include_dir())], headers)
    if shutil.which("g++") is not None:
        compiler().precompile()
    with replaced(importlib.import_module("hidet.backend.build"), {"GCC": compiler}):
        yield


@pytest.fixture(autouse=True)
def default_time_limit_of_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that a test gets must not depend on how busy the machine is.

    Searches by default have a deadline, as users' have, but one that no test reaches. Limits that tests give hold.
    """
    from hidet_dist.options.planning import TIME_LIMIT_SECONDS
    from hidet_dist.search import SearchOptions

    given = SearchOptions.limits

    def limits(options: SearchOptions) -> Limits:
        default = options.solver_time_limit_seconds == TIME_LIMIT_SECONDS
        return given(replace(options, solver_time_limit_seconds=1000 * TIME_LIMIT_SECONDS) if default else options)

    monkeypatch.setattr(SearchOptions, "limits", limits)


@pytest.fixture(autouse=True)
def subnormal_numbers() -> None:
    """Have the test's thread compute with subnormal numbers: kernels that hidet builds by itself turn them off."""
    ctypes.CDLL("libm.so.6").fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV


@pytest.fixture(autouse=True)
def no_session_left_behind():
    """A partition loaded in the test's own process enters a session; the next test must be able to enter another."""
    yield
    from hidet_dist.runtime import session

    session.shutdown()


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that ``make`` fills, once for all processes of a run of tests in parallel."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the workers' folders are in that of the run
    made, done = folder / name, folder / f"{name}.done"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(made, ignore_errors=True)  # of a process that failed
            made.mkdir()
            make(made)
            done.touch()
    return made


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the libraries: of CUDA's driver, NCCL and cuBLAS."""
    return made_once(tmp_path_factory, "stand_ins", compile_stand_ins)


def compile_stand_ins(folder: Path) -> None:
    compiler = ["g++", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-DHIDET_DIST_BUILD"]
    include = [f"-I{Path(ROOT) / 'hidet_dist' / each}" for each in ("include", "src")]
    native_dir = Path(__file__).parent / "native"
    against_cuda = [f"-L{folder}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]
    for name, sources, more in (
        ("libcuda.so.1", [native_dir / "fake_cuda.cpp"], []),
        (
            "libnccl.so.2",
            [native_dir / "fake_nccl.cpp", Path(ROOT) / "hidet_dist/src/reduce.cpp"],
            against_cuda,
        ),
        ("libcublas.so.13", [native_dir / "fake_cublas.cpp"], against_cuda),
    ):
        command = [*compiler, *include, *map(str, sources), *more, f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(command, check=True, timeout=1000)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """CUDA kernels on the CPU: see ``tests/emulator``."""
    from tests.emulator import emulated, nvcc

    from hidet_dist.errors import CompileError
    from hidet_dist.toolchain.cuda import find_toolkit

    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    try:
        toolkit = find_toolkit()  # its headers
    except CompileError as error:
        pytest.skip(str(error))

    def install(folder: Path) -> None:
        nvcc.install(str(toolkit.nvcc), folder / "cuda", emulated.HEADERS)

    return emulated.Emulator(made_once(tmp_path_factory, "emulator", install) / "cuda")
