"""A rank's part of the transfers between stages: the messages that it sends and receives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hidet_dist import native
from hidet_dist.errors import CommunicationError
from hidet_dist.runtime.arrays import Arrays
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.memory import dtype_bytes
from hidet_dist.transfer import Box, Transfer, volume, within

_ALL_RANKS = 1  # the mask of the one axis of the mesh of all ranks
_BYTES = native.dtype_code("uint8")


def raw_dtype(dtype: str) -> np.dtype:
    """Return the NumPy dtype of unsigned integers whose size is that of a dtype which NumPy may lack."""
    return np.dtype(f"u{dtype_bytes(dtype)}")


@dataclass(frozen=True)
class Crossing:
    """The transfer of a tensor from one stage to another, seen from a rank of either.

    Messages hold the tensor's elements if collectives support its dtype, else bytes.

    Attributes
    ----------
    transfer: the transfer.
    rank: this rank's number in its stage.
    peers: the ranks of the other stage, among those of all stages.
    dtype: the dtype of the tensor.
    """

    transfer: Transfer
    rank: int
    peers: range
    dtype: str

    @property
    def code(self) -> int:
        """The dtype code of the messages."""
        return native.dtype_code(self.dtype) if self.dtype in native.DTYPE_CODES else _BYTES

    @property
    def scale(self) -> int:
        """The units of a message per element of the tensor."""
        return 1 if self.dtype in native.DTYPE_CODES else dtype_bytes(self.dtype)

    def nbytes(self, messages: Sequence[tuple[int, Box]]) -> dict[int, int]:
        """Sum the bytes of messages by peer, as its rank among those of all stages."""
        result: dict[int, int] = {}
        for peer, box in messages:
            result[peer] = result.get(peer, 0) + volume(box) * dtype_bytes(self.dtype)
        return result


class Outlet:
    """The messages by which one rank sends its shard of a tensor to another stage.

    ``nbytes`` is their size by the rank that receives them.
    """

    def __init__(self, crossing: Crossing):
        transfer, rank = crossing.transfer, crossing.rank
        self._code, self._scale = crossing.code, crossing.scale
        held = transfer.source.box(transfer.shape, rank)
        self._local = tuple(side.stop - side.start for side in held)
        self._messages = [
            (crossing.peers[message.receiver], within(message.box, held))
            for message in transfer.messages
            if message.sender == rank
        ]
        self.nbytes = crossing.nbytes(self._messages)

    def send(self, arrays: Arrays, shard: np.ndarray) -> list[np.ndarray]:
        """Send the parts of the shard that other ranks need, over the communicator that is bound to this thread.

        Returns the arrays that are sent, to be kept until then. The communicator records failures.
        """
        shard = shard.reshape(self._local)
        sent = []
        for rank, box in self._messages:
            part = arrays.packed(shard[box])
            native.send(part.ctypes.data, part.size * self._scale, self._code, rank, _ALL_RANKS)
            sent.append(part)
        return sent


@dataclass(frozen=True)
class Received:
    """A part that a rank receives.

    Attributes
    ----------
    part: flat.
    pieces: messages' arrays that are to be copied into views of it, once they are received: the view, and the array.
    """

    part: np.ndarray
    pieces: tuple[tuple[np.ndarray, np.ndarray], ...]


class Inlet:
    """The messages, and the all-gather, by which one rank receives its shard of a tensor from another stage.

    ``nbytes`` is the messages' size by the rank that sends them.
    """

    def __init__(self, crossing: Crossing):
        transfer, rank = crossing.transfer, crossing.rank
        self._dtype, self._code, self._scale = crossing.dtype, crossing.code, crossing.scale
        self._gather = transfer.gather(rank)
        part = transfer.part(rank)
        self._part_shape = tuple(side.stop - side.start for side in part)
        self._local = tuple(side.stop - side.start for side in transfer.target.box(transfer.shape, rank))
        self._size = volume(part)
        self._messages = [
            (crossing.peers[message.sender], within(message.box, part))
            for message in transfer.messages
            if message.receiver == rank
        ]
        self.nbytes = crossing.nbytes(self._messages)
        self._elements = math.prod(self._local) if self._gather is None else self._gather.elements
        group = 1 if self._gather is None else transfer.target.mesh.group_size(self._gather.mesh_axes)
        self._whole_elements = group * self._elements

    def receive(self, arrays: Arrays) -> Received:
        """Receive this rank's part, over the communicator that is bound to this thread, which records failures."""
        part = arrays.empty([self._elements], raw_dtype(self._dtype))
        view = part[: self._size].reshape(self._part_shape)
        pieces = []
        for rank, box in self._messages:
            whole = volume(box) == self._size
            into = view if whole else arrays.empty(view[box].shape, part.dtype)
            native.recv(into.ctypes.data, into.size * self._scale, self._code, rank, _ALL_RANKS)
            if not whole:
                pieces.append((view[box], into))
        return Received(part, tuple(pieces))

    def complete(self, arrays: Arrays, communicator: Communicator, part: np.ndarray) -> np.ndarray:
        """Assemble this rank's shard, contiguous, from the parts that the ranks of its group received.

        The communicator is the stage's, bound to this thread. The part must be kept until the shard is used. Raises
        CommunicationError.
        """
        if self._gather is None:
            return part.reshape(self._local)
        whole = arrays.empty([self._whole_elements], part.dtype)
        group = native.group_code(self._gather.mesh_axes)
        native.all_gather(part.ctypes.data, whole.ctypes.data, part.size * self._scale, self._code, group)
        communicator.check()
        return whole[: math.prod(self._local)].reshape(self._local)


def blamed(error: BaseException, rank: int) -> tuple[int, ...]:
    """List the ranks that caused an error, among those of all stages; ``rank``, this one, if no other rank did."""
    return error.ranks if isinstance(error, CommunicationError) else (rank,)
