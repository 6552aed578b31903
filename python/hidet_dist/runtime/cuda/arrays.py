"""Arrays in the memory of a CUDA device, for the tensors that cross between stages."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from hidet_dist.runtime import dlpack
from hidet_dist.runtime.arrays import raw_view

if TYPE_CHECKING:
    from hidet_dist.runtime.communicator import Communicator
    from hidet_dist.runtime.cuda.memory import CudaMemory

_MOST_PITCH = 2**31 - 1  # the most bytes between two rows of a copy (CU_DEVICE_ATTRIBUTE_MAX_PITCH)


class DevicePool:
    """Blocks of device memory that are used again. Any thread may use it.

    Allocating and freeing memory may wait for all work on the device, among it messages whose other end has not come
    yet. So blocks are allocated in the order of an idle stream, and none is freed before the partition's memory.
    """

    def __init__(self, memory: CudaMemory):
        self._memory = memory
        self._unused: list[tuple[int, int]] = []  # bytes and address
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Lend an array, its content undefined. Its memory returns once it and all its views are deleted."""
        nbytes = max(1, math.prod(shape) * dtype.itemsize)
        with self._lock:
            fitting = [block for block in self._unused if nbytes <= block[0] <= 2 * nbytes]
            if fitting:
                self._unused.remove(min(fitting))
        size, address = min(fitting) if fitting else (nbytes, self._memory.reserve_beside(nbytes))
        owner = _BlockOwner()
        weakref.finalize(owner, self._give_back, size, address).atexit = False
        return raw_view(address, shape, dtype, owner)

    def _give_back(self, size: int, address: int) -> None:
        self._unused.append((size, address))  # without the lock, which this thread may hold while it collects garbage


class _BlockOwner:
    """The owner of a block that is in use."""


class CudaArrays:
    """Arrays in the memory of a CUDA device, whose copies run on one stream; see :class:`Arrays`.

    Parameters
    ----------
    memory: CudaMemory
        The partition's device memory.
    pool: DevicePool
        The blocks of that memory.
    stream: int
        The stream.
    """

    deferred = True

    def __init__(self, memory: CudaMemory, pool: DevicePool, stream: int):
        self.device = (dlpack.CUDA, memory.device)
        self._memory, self._pool, self._stream = memory, pool, stream
        self._idle: list[int] = []  # events

    def active(self) -> AbstractContextManager[None]:
        """Make a context in which the calling thread can use the device."""
        return self._memory.current()

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Allocate a contiguous array, its content undefined."""
        return self._pool.take(shape, dtype)

    def copy(self, into: np.ndarray, source: np.ndarray) -> None:
        """Copy elements between arrays of the same shape and dtype, on the device or in the host's memory."""
        assert into.shape == source.shape and into.itemsize == source.itemsize
        if into.size == 0:
            return
        driver, stream = self._memory.driver, self._stream
        width, rows, outer = _runs(into, source)
        height, to_pitch, from_pitch = rows
        if max(to_pitch, from_pitch) > _MOST_PITCH:
            outer, height = [*outer, rows], 1
        for place in itertools.product(*(range(extent) for extent, _, _ in outer)):
            to = into.ctypes.data + sum(i * step for i, (_, step, _) in zip(place, outer, strict=True))
            start = source.ctypes.data + sum(i * step for i, (_, _, step) in zip(place, outer, strict=True))
            if height == 1:
                driver.copy(to, start, width, stream)
            else:
                driver.copy_rows(to, to_pitch, start, from_pitch, width, height, stream)

    def packed(self, part: np.ndarray) -> np.ndarray:
        """Return a contiguous array: ``part`` or a copy on the device."""
        if part.flags.c_contiguous:
            return part
        packed = self.empty(part.shape, part.dtype)
        self.copy(packed, part)
        return packed

    def mark(self) -> int:
        """Record an event behind the stream's work so far."""
        event = self._idle.pop() if self._idle else self._memory.new_event()
        self._memory.driver.record(event, self._stream)
        return event

    def wait(self, mark: int | None, communicator: Communicator) -> None:
        """Wait once for an event of :meth:`mark`, and detect failures of the communicator meanwhile.

        Raises
        ------
        CommunicationError
            When a message or collective failed, or another rank is dead or does not come within the time-out.
        """
        assert mark is not None
        communicator.wait_event(mark)
        self._memory.driver.call("cuEventSynchronize", mark)
        self._idle.append(mark)


_Dim = tuple[int, int, int]  # the extent of a dim, and its strides in bytes in both arrays


def _runs(into: np.ndarray, source: np.ndarray) -> tuple[int, _Dim, list[_Dim]]:
    """Divide a copy into rows without gaps: their bytes, the dim of rows, and the dims outside of it."""
    dims: list[_Dim] = [(into.itemsize, 1, 1)]  # the innermost one first; in bytes
    for extent, to_step, from_step in reversed(list(zip(into.shape, into.strides, source.strides, strict=True))):
        inner, to_inner, from_inner = dims[-1]
        if extent == 1:
            continue
        if to_step == inner * to_inner and from_step == inner * from_inner:
            dims[-1] = (inner * extent, to_inner, from_inner)
        else:
            dims.append((extent, to_step, from_step))
    (width, _, _), *outer = dims
    return width, (outer[0] if outer else (1, width, width)), outer[:0:-1]
