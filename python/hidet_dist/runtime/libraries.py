"""Loading of a program's libraries: its dependencies, its kernels and its launcher."""

from __future__ import annotations

import _ctypes
import ctypes
import importlib.util
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from hidet_dist import native
from hidet_dist.artifacts.opened import VerifiedFile
from hidet_dist.errors import ArtifactError, HidetDistError
from hidet_dist.runtime import openblas
from hidet_dist.runtime.cuda.cudart import is_runtime, load_runtime
from hidet_dist.runtime.threads import end_threads_before_forks, keep_loaded, wait_briefly

_KERNEL = "hidet_launch_"  # a kernel library exports a candidate under this name, followed by its number


class Libraries:
    """The libraries of one partition, unloaded by ``close()`` or with this object."""

    def __init__(self) -> None:
        self._opened: list[tuple[int, ctypes.CDLL]] = []
        self.close = weakref.finalize(self, _unload, self._opened)
        self.close.atexit = False

    def load_shared(self, file: int) -> ctypes.CDLL:
        """Load a library without state, such as a kernel, from a descriptor. Takes over the descriptor.

        The dynamic loader identifies a library by its path, even when the file has been replaced in between: a process
        that loads artifacts, builds them anew and loads them again would run the old kernels. So the library is loaded
        by the path of the descriptor, which stays open as long as the library is loaded. All partitions and processes
        that load the same file share its pages.
        """
        try:
            library = ctypes.CDLL(f"/proc/self/fd/{file}")
        except OSError:
            os.close(file)
            raise
        self._opened.append((file, library))
        return library

    def load_private(self, file: int) -> ctypes.CDLL:
        """Load a separate copy of a library with state, such as a launcher. Takes over the descriptor."""
        copy = os.memfd_create("hidet_dist_launcher")
        with os.fdopen(file, "rb") as source, os.fdopen(copy, "wb", closefd=False) as target:
            target.write(source.read())
        return self.load_shared(copy)

    def load_kernel(self, file: VerifiedFile, candidates: int) -> list[int]:
        """Load a kernel library, and return the addresses of its candidates. Takes over the descriptor.

        Raises
        ------
        ArtifactError
            When the file is not a library, depends on a missing one, or has too few candidates.
        """
        try:
            library = self.load_shared(file.descriptor)
            addresses = [getattr(library, f"{_KERNEL}{candidate}") for candidate in range(candidates)]
        except (AttributeError, OSError) as error:
            raise ArtifactError(
                f"{file.path} is not a library with {candidates} candidates of a kernel: {error}. Build the artifacts "
                "again."
            ) from error
        keep_loaded()
        return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in addresses]

    def load_launcher(self, file: VerifiedFile) -> tuple[ctypes.CDLL, bytes]:
        """Load a launcher and its description of the program. Takes over the descriptor.

        Raises
        ------
        ArtifactError
            When it is not a launcher.
        """
        try:
            library = self.load_private(file.descriptor)
            describe = library.hidet_describe
        except (AttributeError, OSError) as error:
            raise ArtifactError(f"{file.path} is no launcher: {error}. Build the artifacts again.") from error
        text = ctypes.c_char_p()
        describe.argtypes = (ctypes.c_void_p,)
        describe(ctypes.byref(text))
        return library, text.value or b""


def load_needed(names: Sequence[str], folder: Path) -> None:
    """Load the runtime libraries that all kernels link against, and the libraries that a manifest names.

    Raises
    ------
    ArtifactError
        When a name is unknown.
    ConfigError
        When the CUDA runtime is not installed.
    """
    wait_briefly()
    end_threads_before_forks()
    native.library()
    hidet_runtime()
    for name in names:
        if is_runtime(name):
            load_runtime(name)
        elif name == openblas.NAME:
            openblas.load_openblas()
        else:
            raise ArtifactError(f"{folder} needs the unknown library {name!r}. Build the artifacts again.")


def hidet_runtime() -> ctypes.CDLL:
    """Load hidet's runtime library, which kernels need, without importing hidet and its compiler."""
    module = importlib.util.find_spec("hidet")
    if module is None or not module.submodule_search_locations:
        raise HidetDistError("hidet is not installed; install hidet==0.6.1.")
    path = Path(module.submodule_search_locations[0]) / "lib" / "libhidet_runtime.so"
    runtime = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    runtime.hidet_get_last_error.restype = ctypes.c_char_p
    runtime.set_symbol_value.argtypes = (ctypes.c_char_p, ctypes.c_int32)
    runtime.set_symbol_value.restype = None
    runtime.hidet_set_last_error.argtypes = (ctypes.c_char_p,)
    runtime.get_cuda_stream.restype = ctypes.c_void_p
    runtime.set_cuda_stream.argtypes = (ctypes.c_void_p,)
    runtime.get_use_torch_cuda_stream.restype = ctypes.c_bool
    runtime.use_torch_cuda_stream.argtypes = (ctypes.c_bool,)
    runtime.register_callback.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    return runtime


def _unload(opened: list[tuple[int, ctypes.CDLL]]) -> None:
    while opened:
        file, library = opened.pop()
        _ctypes.dlclose(library._handle)
        os.close(file)
