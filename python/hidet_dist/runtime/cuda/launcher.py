"""Launchers for CUDA devices: they launch a program kernel by kernel or as a graph, and time it by the device."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from hidet_dist.runtime.cuda.cublas import PartitionCublas
from hidet_dist.runtime.cuda.driver import DeviceError
from hidet_dist.runtime.cuda.graphs import Graphs
from hidet_dist.runtime.cuda.memory import CudaMemory
from hidet_dist.runtime.launcher import Launcher

_NANOSECONDS = 1e9  # per second


class CudaLauncher(Launcher):
    """A launcher library whose kernels run on a CUDA device.

    Parameters
    ----------
    library, kernels, data, tensors, nodes:
        As for Launcher.
    memory: CudaMemory
        The device memory of weights and activations.
    as_graph: bool
        Whether the program is captured into a CUDA graph.
    cublas: PartitionCublas, optional
        The handle for kernels that call cuBLAS.
    states: sequence of int
        As for Launcher. They stay at these addresses, which captured graphs contain.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        kernels: Sequence[int],
        data: Sequence[int],
        tensors: int,
        nodes: int,
        memory: CudaMemory,
        as_graph: bool,
        cublas: PartitionCublas | None = None,
        states: Sequence[int] = (),
    ):
        super().__init__(library, kernels, data, tensors, nodes, memory, states)
        self._device = memory
        self._cublas = cublas
        self._graphs = Graphs(memory.driver, memory.stream) if as_graph else None
        library.hidet_dist_record_events.argtypes = (ctypes.c_void_p,) * 3
        self._events: ctypes.Array[ctypes.c_void_p] | None = None

    def use(self, kernel: int, address: int) -> None:
        """Switch to another candidate of a kernel."""
        self._table[kernel] = address

    def launch(self, addresses: Sequence[int], sizes: tuple[int, ...], check: Callable[[], None]) -> None:
        """Launch the program on the stream, as a CUDA graph if it is run as one."""
        if self._cublas is not None:
            self._cublas.bind()
        if self._graphs is None:
            super().launch(addresses, sizes, check)
        else:
            key = (*addresses, self._workspace, *sizes)
            self._graphs.run(key, lambda: super(CudaLauncher, self).launch(addresses, sizes, check), check)

    def record(self, addresses: Sequence[int], sizes: tuple[int, ...], check: Callable[[], None]) -> None:
        """Run the program kernel by kernel, with events around each.

        The time of a kernel on an otherwise idle device includes the host's work of launching it.
        """
        if self._events is None:
            events = (self._device.new_event() for _ in range(2 * self._nodes))
            self._events = (ctypes.c_void_p * (2 * self._nodes))(*events)
        record = self._device.driver.record_event
        if self._cublas is not None:
            self._cublas.bind()
        self._library.hidet_dist_record_events(record, ctypes.addressof(self._events), self._device.stream)
        try:
            super().launch(addresses, sizes, check)
        finally:
            self._library.hidet_dist_record_events(None, None, None)

    def times(self) -> np.ndarray:
        """Return the recorded times: int64[nodes, 2], in ns.

        They are measured by the device's clock, and shifted so that the last kernel ends now by the host's clock.
        """
        now = time.perf_counter_ns()
        if not self._events:
            return np.zeros((0, 2), np.int64)
        events = [event or 0 for event in self._events]
        seconds = [self._device.driver.seconds_between(events[0], event) for event in events]
        elapsed = np.rint(np.array(seconds).reshape(-1, 2) * _NANOSECONDS).astype(np.int64)
        return np.asarray(now - elapsed[-1, 1] + elapsed)

    def seconds_of(self, nodes: Sequence[int]) -> float:
        """Return the total seconds of some kernel launches, as last recorded."""
        times = self.times()[list(nodes)]
        return float((times[:, 1] - times[:, 0]).sum()) / _NANOSECONDS

    def leave_cublas(self) -> None:
        """Free cuBLAS's handle and workspace, because no chosen candidate calls it. The memory must be active."""
        cublas, self._cublas = self._cublas, None
        if cublas is not None:
            cublas.close()

    def close(self) -> None:
        """Free the graphs, and cuBLAS's handle."""
        if self._graphs is None and self._cublas is None:
            return
        with suppress(DeviceError), self._device.active():  # after a kernel has failed, nothing can be freed
            if self._graphs is not None:
                self._graphs.clear()
            self.leave_cublas()
