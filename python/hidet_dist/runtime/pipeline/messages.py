"""A rank's part of the transfers between stages: the messages that it sends and receives."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np

from hidet_dist.errors import CommunicationError
from hidet_dist.runtime import native
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.memory import dtype_bytes
from hidet_dist.transfer import Transfer, volume, within

_ALL_RANKS = 1  # the mask of the one axis of the mesh of all ranks
_BYTES = native.dtype_code("uint8")


def raw_dtype(dtype: str) -> np.dtype:
    """A NumPy dtype of elements of the same size, of a dtype that NumPy may lack."""
    return np.dtype(f"u{dtype_bytes(dtype)}")


def raw_view(address: int, shape: Sequence[int], dtype: str) -> np.ndarray:
    """The memory of a tensor that lies row by row, as :func:`raw_dtype`; the caller keeps it."""
    size = math.prod(shape) * dtype_bytes(dtype)
    memory = (ctypes.c_char * size).from_address(address)
    return np.ndarray(tuple(shape), raw_dtype(dtype), memoryview(memory))


class _End:
    """The encoding of one dtype in messages: its elements if collectives support the dtype, else bytes."""

    def __init__(self, dtype: str):
        self.dtype = dtype
        known = dtype in native.DTYPE_CODES
        self.code = native.dtype_code(dtype) if known else _BYTES
        self.scale = 1 if known else dtype_bytes(dtype)


class Outlet:
    """The messages by which one rank sends its shard of a tensor to another stage.

    Parameters
    ----------
    transfer: Transfer
        The tensor's.
    rank: int
        This rank's number in its stage.
    readers: range
        The ranks of the other stage.
    dtype: str
        The tensor's.
    """

    def __init__(self, transfer: Transfer, rank: int, readers: range, dtype: str):
        self._end = _End(dtype)
        self._local = transfer.source.spec.local_shape(transfer.shape, transfer.source.mesh)
        held = transfer.source.box(transfer.shape, rank)
        self._messages = [
            (readers[message.receiver], within(message.box, held))
            for message in transfer.messages
            if message.sender == rank
        ]

    def send(self, communicator: Communicator, shard: np.ndarray) -> None:
        """Send what other ranks need of the shard, over the communicator of all ranks, bound to this thread.

        Raises CommunicationError.
        """
        shard = shard.reshape(self._local)
        for rank, box in self._messages:
            part = np.ascontiguousarray(shard[box])
            native.send(part.ctypes.data, part.size * self._end.scale, self._end.code, rank, _ALL_RANKS)
            communicator.check()


class Inlet:
    """The messages, and the all-gather, by which one rank receives its shard of a tensor from another stage.

    Parameters
    ----------
    transfer: Transfer
        The tensor's.
    rank: int
        This rank's number in its stage.
    senders: range
        The ranks of the other stage.
    dtype: str
        The tensor's.
    """

    def __init__(self, transfer: Transfer, rank: int, senders: range, dtype: str):
        self._end = _End(dtype)
        self._gather = transfer.gather
        part = transfer.part(rank)
        self._part_shape = tuple(side.stop - side.start for side in part)
        self._local = transfer.target.spec.local_shape(transfer.shape, transfer.target.mesh)
        size = volume(part)
        self._messages = [
            (senders[message.sender], within(message.box, part), volume(message.box) == size)
            for message in transfer.messages
            if message.receiver == rank
        ]
        self._size = size
        self._elements = math.prod(self._local) if self._gather is None else self._gather.elements
        group = 1 if self._gather is None else transfer.target.mesh.group_size(self._gather.mesh_axes)
        self._whole_elements = group * self._elements

    def receive(self, communicator: Communicator) -> np.ndarray:
        """Receive this rank's part, over the communicator of all ranks, bound to this thread; returned as it came.

        Raises CommunicationError.
        """
        part = np.zeros(self._elements, raw_dtype(self._end.dtype))
        view = part[: self._size].reshape(self._part_shape)
        for rank, box, whole in self._messages:
            into = view if whole else np.empty(view[box].shape, part.dtype)
            native.recv(into.ctypes.data, into.size * self._end.scale, self._end.code, rank, _ALL_RANKS)
            communicator.check()
            if not whole:
                view[box] = into
        return part

    def complete(self, communicator: Communicator, part: np.ndarray) -> np.ndarray:
        """Assemble this rank's shard, contiguous, from the parts that the ranks of its group received.

        The communicator is the stage's, bound to this thread. Raises CommunicationError.
        """
        if self._gather is None:
            return part.reshape(self._local)
        whole = np.empty(self._whole_elements, part.dtype)
        group = sum(1 << axis for axis in self._gather.mesh_axes)
        native.all_gather(part.ctypes.data, whole.ctypes.data, part.size * self._end.scale, self._end.code, group)
        communicator.check()
        return whole[: math.prod(self._local)].reshape(self._local)


def blamed(error: BaseException, rank: int) -> tuple[int, ...]:
    """The ranks, of all, that an error is due to; this one where it is no other's fault."""
    return error.ranks if isinstance(error, CommunicationError) else (rank,)
