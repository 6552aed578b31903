"""What every test starts from, and what tests of several folders share."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hidet_dist.errors import CompileError
from hidet_dist.runtime import session
from hidet_dist.toolchain.cuda import find_toolkit

if TYPE_CHECKING:
    from tests.emulator.emulated import Emulator

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(autouse=True)
def no_session_left_behind():
    """A partition loaded in the test's own process enters a session; the next test must be able to enter another."""
    yield
    session.shutdown()


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """CUDA kernels on the CPU: see ``tests/emulator``."""
    from tests.emulator import emulated, nvcc

    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    try:
        toolkit = find_toolkit()  # its headers
    except CompileError as error:
        pytest.skip(str(error))
    home = tmp_path_factory.mktemp("emulator") / "cuda"
    return emulated.Emulator(nvcc.install(str(toolkit.nvcc), home, emulated.HIDET / "include"))
