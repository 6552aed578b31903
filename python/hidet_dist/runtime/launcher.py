"""The launcher: the compiled function that launches a whole program, with its set-up, calls and timing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from hidet_dist.artifacts.coherence import KINDS_OF_MEMORY
from hidet_dist.runtime.memory import Memory


class Launcher:
    """A launcher library, typed. Not to be called from two threads at once.

    Parameters
    ----------
    library: ctypes.CDLL
        A copy of the library of its own: it keeps its weights and workspace in globals.
    kernels: sequence of int
        The kernels' addresses, in the order of the manifest.
    data: sequence of int
        The addresses of weights, coordinate and constants, in the order of the manifest.
    tensors: int
        The number of inputs and outputs together.
    nodes: int
        The number of kernels that are launched, one after the other.
    memory: Memory
        Where activations lie.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        kernels: Sequence[int],
        data: Sequence[int],
        tensors: int,
        nodes: int,
        memory: Memory,
    ):
        self._library = library
        self._memory = memory
        self._nodes = nodes
        self._table = (ctypes.c_void_p * max(1, len(kernels)))(*kernels)
        self._table_address = ctypes.addressof(self._table)
        library.hidet_init.argtypes = (ctypes.c_int32, ctypes.c_void_p)
        library.hidet_init(len(data), (ctypes.c_void_p * max(1, len(data)))(*data))
        library.hidet_set_workspace.argtypes = (ctypes.c_int32, ctypes.c_void_p)
        library.hidet_dist_record.argtypes = (ctypes.c_void_p,)
        self._launch = library.hidet_launch
        self._launch.argtypes = (ctypes.c_void_p,) * (tensors + 1)
        self._launch.restype = None
        self._workspace = 0
        self._times = np.zeros((0, 2), np.int64)
        self._sizes = (ctypes.c_int64 * len(KINDS_OF_MEMORY))()

    def workspaces(self) -> dict[str, int]:
        """The bytes of activations, as :meth:`workspace_bytes`, by kind of memory."""
        self._library.hidet_get_workspace_size(self._sizes)
        return {kind: size for kind, size in zip(KINDS_OF_MEMORY, self._sizes, strict=True) if size}

    def workspace_bytes(self) -> int:
        """The memory that activations take, in bytes, at the sizes of symbolic dims that hidet's runtime has now."""
        return max(1, self.workspaces().get(KINDS_OF_MEMORY[self._memory.number], 0))

    def reserve(self, nbytes: int) -> None:
        """Make room for activations of so many bytes."""
        address = self._memory.workspace(nbytes)
        if address != self._workspace:
            self._library.hidet_set_workspace(self._memory.number, address)
            self._workspace = address

    def output_shape(self, number: int, ndim: int) -> tuple[int, ...]:
        """The shape of an output at the sizes that hidet's runtime has now."""
        dims = (ctypes.c_int32 * ndim)()
        self._library.hidet_get_output_shape(ctypes.c_int32(number), dims)
        return tuple(dims)

    def launch(self, addresses: Sequence[int], sizes: tuple[int, ...], check: Callable[[], None]) -> None:
        """Run the program on inputs, into outputs. Other Python threads run meanwhile.

        ``sizes`` are those of the symbolic dims, ``check`` raises what went wrong so far; a CUDA graph needs them.
        """
        self._launch(*addresses, self._table_address)

    def record(self, addresses: Sequence[int], sizes: tuple[int, ...], check: Callable[[], None]) -> None:
        """Run the program as :meth:`launch` does, and record for :meth:`times` when each kernel began and ended."""
        self._times = np.zeros((self._nodes, 2), np.int64)
        self._library.hidet_dist_record(self._times.ctypes.data)
        try:
            self.launch(addresses, sizes, check)
        finally:
            self._library.hidet_dist_record(None)

    def times(self) -> np.ndarray:
        """int64[nodes, 2]: when each recorded kernel began and ended, as time.perf_counter_ns."""
        return self._times

    def close(self) -> None:
        """Free the resources for launching."""
