"""cuBLAS, loaded by the native library."""

from __future__ import annotations

from collections.abc import Callable

from hidet_dist.runtime.native.library import last_error, library
from hidet_dist.runtime.native.signatures import AllocateFunction, ReportFunction, StreamFunction


def load_cublas(path: str) -> int:
    """Load cuBLAS; its version is returned, such as 130100. Raises ``ValueError`` with the native message."""
    version = int(library().hidet_dist_cublas_load(path.encode()))
    if version == 0:
        raise ValueError(last_error())
    return version


class Cublas:
    """A handle of cuBLAS's for the device whose context is current; see cublas.h.

    Parameters
    ----------
    stream: int
        The address of a C function that returns the CUDA stream which the calling thread launches kernels on.
    report: int
        The address of a C function that is told, in text, why a product could not be put on the stream.
    allocate: Callable[[int], int | None]
        Finds so many bytes of the device's memory, for as long as the handle or a graph with its products is used; or
        None.
    workspace, nbytes: int
        Such memory.

    Raises
    ------
    ValueError
        With the native message, where there can be none.
    """

    def __init__(self, stream: int, report: int, allocate: Callable[[int], int | None], workspace: int, nbytes: int):
        # Kept: the handle has their addresses.
        self._callbacks = StreamFunction(stream), ReportFunction(report), AllocateFunction(allocate)
        self._handle: int | None = library().hidet_dist_cublas_create(*self._callbacks, workspace, nbytes)
        if not self._handle:
            raise ValueError(last_error())

    def bind(self) -> None:
        """Make it the one that kernels use which this thread launches."""
        library().hidet_dist_cublas_bind(self._handle)

    def destroy(self) -> None:
        """Free it. Its device's context must be current. This thread has none any more."""
        handle, self._handle = self._handle, None
        library().hidet_dist_cublas_bind(None)
        if handle is not None:
            library().hidet_dist_cublas_destroy(handle)
