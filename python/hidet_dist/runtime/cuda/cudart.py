"""The CUDA runtime library that a program's kernels were linked against."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hidet_dist.errors import ConfigError

_NAME = re.compile(r"libcudart\.so\.\d+")


def is_runtime(name: str) -> bool:
    """Tell whether a library's name is that of a CUDA runtime, such as ``libcudart.so.13``."""
    return _NAME.fullmatch(name) is not None


def load_runtime(name: str) -> None:
    """Load a CUDA runtime: the one loaded already, the system's, that of a package from PyPI, or a toolkit's.

    Raises
    ------
    ConfigError
        Where there is none; the message says how to install it.
    """
    for path in (name, *map(str, _paths(name))):
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return
    major = name.rpartition(".")[2]
    raise ConfigError(
        f"{name}, which the artifacts' kernels need, is not found. Install the CUDA {major} toolkit and set CUDA_HOME "
        f"to it, or `pip install 'nvidia-cuda-runtime=={major}.*'`."
    )


def _paths(name: str) -> Iterator[Path]:
    module = importlib.util.find_spec("nvidia")
    for folder in module.submodule_search_locations or [] if module else []:
        for package in (f"cu{name.rpartition('.')[2]}", "cuda_runtime"):
            yield Path(folder) / package / "lib" / name
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "lib64" / name
    yield Path("/usr/local/cuda/lib64") / name
