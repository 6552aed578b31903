"""cuBLAS, for candidates of matrix products that call it: finding and loading it, and a handle per partition."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hidet_dist import native
from hidet_dist.errors import ConfigError
from hidet_dist.runtime.cuda.driver import DeviceError
from hidet_dist.runtime.cuda.memory import CudaMemory
from hidet_dist.runtime.libraries import hidet_runtime

LIBRARY_VARIABLE = "HIDET_DIST_CUBLAS_LIBRARY"
"""The environment variable with the path of libcublas.so.13 (or 12); by default it is searched for."""

WORKSPACE_BYTES = 2**25
"""Bytes of workspace, as NVIDIA recommends for Hopper (cuBLAS Library, cublasSetWorkspace); others need less."""

_VERSIONS = ("13", "12")
_INSTALL = "pip install nvidia-cublas (or nvidia-cublas-cu12)"


def find_library() -> str:
    """Find the path or name of cuBLAS: from the environment, the loaded libraries, a package or a toolkit.

    Raises
    ------
    ConfigError
        Where there is none; the message says what to install.
    """
    given = os.environ.get(LIBRARY_VARIABLE)
    if given:
        if not Path(given).is_file():
            raise ConfigError(f"{LIBRARY_VARIABLE} is {given!r}, which is not a file")
        return given
    for version in _VERSIONS:
        name = f"libcublas.so.{version}"
        with suppress(OSError):
            ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            return name
    for path in _paths():
        if path.is_file():
            return str(path)
    for version in _VERSIONS:
        with suppress(OSError):
            ctypes.CDLL(f"libcublas.so.{version}")
            return f"libcublas.so.{version}"
    raise ConfigError(f"there is no cuBLAS: {_INSTALL}, or set {LIBRARY_VARIABLE} to libcublas.so.{_VERSIONS[0]}")


def _paths() -> Iterator[Path]:
    module = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in module.submodule_search_locations or []] if module else []
    for version in _VERSIONS:
        for folder in folders:
            for package in (f"cu{version}", "cublas"):
                yield folder / package / "lib" / f"libcublas.so.{version}"
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            if os.environ.get(variable):
                yield Path(os.environ[variable]) / "lib64" / f"libcublas.so.{version}"
        yield Path("/usr/local/cuda/lib64") / f"libcublas.so.{version}"


@functools.cache
def load() -> int:
    """Load cuBLAS, once per process. Returns its version, such as 130100 for 13.1.0.

    Raises
    ------
    ConfigError
        Where there is none that can be used; the message says what to install.
    """
    path = find_library()
    beside = Path(path).with_name(Path(path).name.replace("libcublas", "libcublasLt"))
    if beside.is_file():  # cuBLAS depends on it, and the loader may not search cuBLAS's folder
        with suppress(OSError):
            ctypes.CDLL(str(beside))
    try:
        return native.load_cublas(path)
    except ValueError as error:
        raise ConfigError(
            f"cuBLAS cannot be used: {error} ({_INSTALL}, or set {LIBRARY_VARIABLE} to another)"
        ) from None


class PartitionCublas:
    """The cuBLAS handle of one partition, on its memory's device.

    Attributes
    ----------
    version: the library's version; results are equal only for equal versions.

    Raises
    ------
    ConfigError
        Where there is no cuBLAS, or it cannot be used on the device.
    DeviceError
        Where the device has no memory left for the workspace.
    """

    def __init__(self, memory: CudaMemory):
        self.version = load()
        runtime = hidet_runtime()
        functions = (runtime.get_cuda_stream, runtime.hidet_set_last_error)
        stream, report = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        self._memory = memory
        with memory.active():
            self._allocations = [memory.reserve(WORKSPACE_BYTES)]
            try:
                self._native = native.CublasHandle(
                    stream, report, self._allocate, self._allocations[0], WORKSPACE_BYTES
                )
            except ValueError as error:
                memory.release(self._allocations.pop())
                raise ConfigError(f"cuBLAS cannot be used on CUDA device {memory.device}: {error}") from None

    def bind(self) -> None:
        """Make the kernels that this thread launches use the handle."""
        self._native.bind()

    def close(self) -> None:
        """Free the handle and its workspace. The memory must be active."""
        self._native.destroy()
        while self._allocations:
            self._memory.release(self._allocations.pop())

    def _allocate(self, nbytes: int) -> int | None:
        try:
            self._allocations.append(self._memory.reserve(nbytes))
        except DeviceError as error:
            hidet_runtime().hidet_set_last_error(str(error).encode())
            return None
        return self._allocations[-1]
