"""Handles of cuBLAS, which the native library loads."""

from __future__ import annotations

from collections.abc import Callable

from hidet_dist.native.library import last_error, library
from hidet_dist.native.signatures import AllocateFunction, ReportFunction, StreamFunction


def load_cublas(path: str) -> int:
    """Load cuBLAS, and return its version, such as 130100. Raises ``ValueError`` with the native message."""
    version = int(library().hidet_dist_cublas_load(path.encode()))
    if version == 0:
        raise ValueError(last_error())
    return version


class CublasHandle:
    """A cuBLAS handle for the device whose context is current; see cublas.h.

    Parameters
    ----------
    stream: int
        The address of a C function that returns the CUDA stream on which the calling thread launches kernels.
    report: int
        The address of a C function that is called with the reason, as text, why a product could not be launched.
    allocate: Callable[[int], int | None]
        Allocates the given number of bytes of device memory, which must live as long as the handle and graphs with its
        products. Returns the address, or None.
    workspace, nbytes: int
        The address and size of such memory, for the workspace.

    Raises
    ------
    ValueError
        With the native message, where no handle can be made.
    """

    def __init__(self, stream: int, report: int, allocate: Callable[[int], int | None], workspace: int, nbytes: int):
        # Kept alive, because the handle has their addresses.
        self._callbacks = StreamFunction(stream), ReportFunction(report), AllocateFunction(allocate)
        self._handle: int | None = library().hidet_dist_cublas_create(*self._callbacks, workspace, nbytes)
        if not self._handle:
            raise ValueError(last_error())

    def bind(self) -> None:
        """Make the kernels that this thread launches use the handle."""
        library().hidet_dist_cublas_bind(self._handle)

    def destroy(self) -> None:
        """Free the handle, and unbind it from this thread. Its device's context must be current."""
        handle, self._handle = self._handle, None
        library().hidet_dist_cublas_bind(None)
        if handle is not None:
            library().hidet_dist_cublas_destroy(handle)
