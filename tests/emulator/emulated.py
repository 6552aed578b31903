"""Compiling and running kernels on the emulator, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hidet
import numpy as np

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
    command = [sys.executable, str(HERE / "run_kernel.py"), str(library), str(file), str(candidate)]
    command += [f"{name}={size}" for name, size in (sizes or {}).items()]
    own = {**os.environ, **(environment or {})}
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False, timeout=1000)
    if done.returncode != 0:
        raise EmulatedFault(done.stderr)
    with np.load(file) as data:
        return [data[name] for name in data.files]
