"""Launchers: the compiled function that launches all kernels of a program, with its set-up, calls and timing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from hidet_dist.runtime.memory import Memory
from hidet_dist.targets import KINDS_OF_MEMORY


class Launcher:
    """A loaded launcher library. It must not be called from two threads at once.

    Parameters
    ----------
    library: ctypes.CDLL
        A private copy of the library, which keeps the addresses of weights and workspace in global variables.
    kernels: sequence of int
        The kernels' addresses, in the order of the manifest.
    data: sequence of int
        The addresses of weights, coordinate and constants, in the order of the manifest.
    tensors: int
        The number of inputs and outputs together.
    nodes: int
        The number of kernel launches in a run.
    memory: Memory
        The memory in which activations lie.
    states: sequence of int
        The addresses of states, in the order of the manifest.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        kernels: Sequence[int],
        data: Sequence[int],
        tensors: int,
        nodes: int,
        memory: Memory,
        states: Sequence[int] = (),
    ):
        self._library = library
        self._memory = memory
        self._nodes = nodes
        self._table = (ctypes.c_void_p * max(1, len(kernels)))(*kernels)
        self._table_address = ctypes.addressof(self._table)
        library.hidet_init.argtypes = (ctypes.c_int32, ctypes.c_void_p)
        self._data = tuple(data)
        self.take_states(states)
        library.hidet_set_workspace.argtypes = (ctypes.c_int32, ctypes.c_void_p)
        library.hidet_dist_record.argtypes = (ctypes.c_void_p,)
        self._launch = library.hidet_launch
        self._launch.argtypes = (ctypes.c_void_p,) * (tensors + 1)
        self._launch.restype = None
        self._workspace = 0
        self._times = np.zeros((0, 2), np.int64)
        self._sizes = (ctypes.c_int64 * len(KINDS_OF_MEMORY))()

    def take_states(self, addresses: Sequence[int]) -> None:
        """Have the program read and write states at these addresses."""
        data = (*self._data, *addresses)
        self._library.hidet_init(len(data), (ctypes.c_void_p * max(1, len(data)))(*data))

    def workspaces(self) -> dict[str, int]:
        """Return the bytes of workspace by kind of memory, at the sizes of symbolic dims that hidet's runtime holds."""
        self._library.hidet_get_workspace_size(self._sizes)
        return {kind: size for kind, size in zip(KINDS_OF_MEMORY, self._sizes, strict=True) if size}

    def workspace_bytes(self) -> int:
        """Return the bytes of workspace in this launcher's memory, at least 1, at the sizes that hidet's runtime holds.

        Workspace is the memory of activations within the program.
        """
        return max(1, self.workspaces().get(KINDS_OF_MEMORY[self._memory.number], 0))

    def reserve(self, nbytes: int) -> None:
        """Allocate ``nbytes`` of workspace, or reuse what is allocated, and pass its address to the launcher."""
        address = self._memory.workspace(nbytes)
        if address != self._workspace:
            self._library.hidet_set_workspace(self._memory.number, address)
            self._workspace = address

    def output_shape(self, number: int, ndim: int) -> tuple[int, ...]:
        """Return the shape of output ``number``, of ``ndim`` dims, at the sizes that hidet's runtime holds."""
        dims = (ctypes.c_int32 * ndim)()
        self._library.hidet_get_output_shape(ctypes.c_int32(number), dims)
        return tuple(dims)

    def launch(self, addresses: Sequence[int], sizes: tuple[int, ...], check: Callable[[], None]) -> None:
        """Run the program. The GIL is released, so other Python threads can run.

        Parameters
        ----------
        addresses: sequence of int
            The inputs' addresses, then the outputs'.
        sizes: tuple of int
            The sizes of the symbolic dims: the key of a CUDA graph. Unused by this class.
        check: function
            Raises the first error of a kernel or a collective so far, before a CUDA graph is used. Unused by this
            class.
        """
        self._launch(*addresses, self._table_address)

    def record(self, addresses: Sequence[int], sizes: tuple[int, ...], check: Callable[[], None]) -> None:
        """Run the program as :meth:`launch` does, and record each kernel's begin and end for :meth:`times`."""
        self._times = np.zeros((self._nodes, 2), np.int64)
        self._library.hidet_dist_record(self._times.ctypes.data)
        try:
            self.launch(addresses, sizes, check)
        finally:
            self._library.hidet_dist_record(None)

    def times(self) -> np.ndarray:
        """Return the begin and end of each recorded kernel: int64[nodes, 2], in ns as ``time.perf_counter_ns``."""
        return self._times

    def close(self) -> None:
        """Free resources such as CUDA graphs. A launcher on the CPU has none."""
