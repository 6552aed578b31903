"""NCCL's library: finding it, loading it with the CUDA driver, and the devices of ranks.

NCCL and the CUDA driver are loaded only when a transport is made.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from hidet_dist import native
from hidet_dist.errors import ConfigError
from hidet_dist.runtime.libraries import hidet_runtime

LIBRARY_VARIABLE = "HIDET_DIST_NCCL_LIBRARY"
"""The environment variable with the path of libnccl.so.2; by default, that of the package nvidia-nccl-cu12."""

DRIVER_VARIABLE = "HIDET_DIST_CUDA_DRIVER"
"""The environment variable with the path of the CUDA driver's libcuda.so.1; by default, the loader searches for it."""

INSTALL = "pip install 'nvidia-nccl-cu12>=2.30'"
"""The command that installs NCCL."""


def find_library(environment: Mapping[str, str] | None = None) -> str:
    """Find the path of NCCL's library. Raises ``ConfigError`` where there is none, with what to install."""
    given = (os.environ if environment is None else environment).get(LIBRARY_VARIABLE)
    if given:
        if not Path(given).is_file():
            raise ConfigError(f"{LIBRARY_VARIABLE} is {given!r}, which is not a file")
        return given
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        package = None
    for folder in () if package is None else package.submodule_search_locations or ():
        path = Path(folder) / "lib" / "libnccl.so.2"
        if path.is_file():
            return str(path)
    raise ConfigError(f"ranks on CUDA devices need NCCL: {INSTALL}, or set {LIBRARY_VARIABLE} to libnccl.so.2")


@functools.cache
def load() -> int:
    """Load NCCL and the CUDA driver, once per process. Returns NCCL's version, such as 23203 for 2.32.3.

    Raises ``ConfigError`` where one is missing or too old, with what to install.
    """
    path = find_library()
    try:
        return native.load_nccl(path, os.environ.get(DRIVER_VARIABLE, "libcuda.so.1"))
    except ValueError as error:
        hint = (
            "is a CUDA driver installed?"
            if "libcuda" in str(error)
            else f"{INSTALL}, or set {LIBRARY_VARIABLE} to another libnccl.so.2"
        )
        raise ConfigError(f"NCCL cannot be used: {error} ({hint})") from None


def default_device(rank: int) -> int:
    """Return the default CUDA device of a rank: torchrun's LOCAL_RANK, or the rank, modulo the number of devices.

    Raises ``ConfigError`` where there is no device.
    """
    load()
    devices = native.cuda_device_count()
    if devices < 1:
        raise ConfigError("there is no CUDA device")
    return int(os.environ.get("LOCAL_RANK") or rank) % devices


def hidet_stream_function() -> int:
    """Return the address of the C function that returns the CUDA stream on which hidet's kernels are launched."""
    address = ctypes.cast(hidet_runtime().get_cuda_stream, ctypes.c_void_p).value
    assert address is not None
    return address
