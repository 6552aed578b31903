"""Compiling and running kernels on the emulator, for tests."""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import hidet
import numpy as np
from tests.forked import Forks

from hidet_dist import native

HERE = Path(__file__).parent
HIDET = Path(hidet.__file__).parent
HEADERS = (HIDET / "include", native.include_dir())


class EmulatedFault(Exception):
    """The emulator ended the process, or the launch failed; what it said."""


@dataclass(frozen=True)
class Emulator:
    """The folder of nvcc's substitute, to be used as ``CUDA_HOME``."""

    home: Path

    def compile(self, source: Path, library: Path, arch: str = "90a") -> Path:
        """A library of a file of CUDA C++ that exports ``hidet_launch_0`` and so on."""
        folders = [*(f"-I{folder}" for folder in HEADERS), f"-L{HIDET / 'lib'}"]
        target = ["-gencode", f"arch=compute_{arch},code=sm_{arch}", "-lhidet_runtime"]
        command = [str(self.home / "bin" / "nvcc"), *folders, *target, str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1000)
        assert done.returncode == 0, done.stderr
        return library


def run(
    library: Path,
    *arrays: np.ndarray,
    candidate: int = 0,
    environment: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Sequence[np.ndarray]:
    """The arguments of a kernel after it ran on copies of them; ``sizes`` are those of symbolic dims.

    Raises
    ------
    EmulatedFault
        When the kernel does what a GPU would not do or need not do.
    """
    file = library.with_suffix(".npz")
    np.savez(file, *arrays)
    arguments = [str(library), str(file), str(candidate), *(f"{name}={size}" for name, size in (sizes or {}).items())]
    with tempfile.TemporaryFile("w+") as errors:
        process = _forks().fork({**os.environ, **(environment or {})}, arguments, errors.fileno())
        with process.stdin, process.stdout:
            status = process.wait(timeout=1000)
        errors.seek(0)
        if status != 0:
            raise EmulatedFault(errors.read())
    with np.load(file) as data:
        return [data[name] for name in data.files]


@cache
def _forks() -> Forks:
    """The process that those which run a kernel are forked from."""
    forks = Forks(HERE / "run_kernel.py", dict(os.environ))
    atexit.register(forks.end)
    return forks
