"""The compiled function that launches a whole program: what it is given once, and how it is called."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from hidet_dist.runtime.memory import Memory

_KINDS_OF_MEMORY = 3  # hidet's: host, CUDA, HIP


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
        self._sizes = (ctypes.c_int64 * _KINDS_OF_MEMORY)()

    def workspace_bytes(self) -> int:
        """The memory that activations take, in bytes, at the sizes of symbolic dims that hidet's runtime has now."""
        self._library.hidet_get_workspace_size(self._sizes)
        return max(1, self._sizes[self._memory.number])

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

    def launch(self, addresses: Sequence[int]) -> None:
        """Run the program on inputs, into outputs. Other Python threads run meanwhile."""
        self._launch(*addresses, self._table_address)

    def record(self, addresses: Sequence[int]) -> np.ndarray:
        """As :meth:`launch`; returns int64[nodes, 2], when each kernel began and ended, as time.perf_counter_ns."""
        times = np.zeros((self._nodes, 2), np.int64)
        self._library.hidet_dist_record(times.ctypes.data)
        try:
            self.launch(addresses)
        finally:
            self._library.hidet_dist_record(None)
        return times
