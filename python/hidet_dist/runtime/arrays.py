"""Memory of the tensors that cross between stages, and copies among them: one class for each kind of memory.

Arrays describe memory: its address, shape and strides. The memory may be a device's, which the host cannot access, so
only the functions of this interface read and write elements.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hidet_dist.runtime import dlpack

if TYPE_CHECKING:
    from hidet_dist.runtime.communicator import Communicator


class Arrays(Protocol):
    """Arrays of one kind of memory.

    On a device, copies are enqueued on one stream. The arrays that they use must be kept until :meth:`wait` returns.

    Attributes
    ----------
    device: the DLPack device type and number.
    deferred: whether copies and messages are enqueued on a stream, instead of being complete when a function returns.
    """

    device: tuple[int, int]
    deferred: bool

    def active(self) -> AbstractContextManager[None]:
        """Make a context in which the calling thread can use the device."""

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Allocate a contiguous array, its content undefined. Its memory is used again when it is deleted."""

    def copy(self, into: np.ndarray, source: np.ndarray) -> None:
        """Copy elements between arrays of the same shape and dtype, in this memory or the host's."""

    def packed(self, part: np.ndarray) -> np.ndarray:
        """Return a contiguous array: ``part`` or a copy."""

    def mark(self) -> int | None:
        """Mark the end of the work enqueued so far; None if nothing is enqueued."""

    def wait(self, mark: int | None, communicator: Communicator) -> None:
        """Wait once for the work before a mark, of which the communicator's messages are a part.

        Raises CommunicationError if one of them failed.
        """


class HostArrays:
    """Arrays in the host's memory, which copies and messages access at once."""

    device = (dlpack.CPU, 0)
    deferred = False

    def active(self) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Allocate a contiguous array, its content undefined."""
        return np.empty(tuple(shape), dtype)

    def copy(self, into: np.ndarray, source: np.ndarray) -> None:
        """Copy elements between arrays of the same shape and dtype."""
        into[...] = source

    def packed(self, part: np.ndarray) -> np.ndarray:
        """Return a contiguous array: ``part`` or a copy."""
        return np.ascontiguousarray(part)

    def mark(self) -> None:
        """Return None: nothing is enqueued."""

    def wait(self, mark: int | None, communicator: Communicator) -> None:
        """Raise CommunicationError if a message failed."""
        communicator.check()


def raw_view(address: int, shape: Sequence[int], dtype: np.dtype, owner: object) -> np.ndarray:
    """View the memory of a contiguous tensor as an array. The array keeps ``owner`` alive, and no access is made."""
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return np.ndarray(tuple(shape), dtype, memoryview(memory))
