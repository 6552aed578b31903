"""Channels: the messages of a rank over one communicator of all ranks, one operation after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hidet_dist.runtime.arrays import Arrays
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.pipeline.messages import Inlet, Outlet

_MOST_SENT = 2  # operations that only send and are not complete: one is taken by its reader while another is computed


@dataclass(frozen=True)
class Transit:
    """An operation of a channel, which is complete after :meth:`MessageChannel.wait`.

    Attributes
    ----------
    parts: the parts that are received, in the order of the inlets.
    mark: the operation's end among the work of the channel's arrays.
    kept: arrays that the operation uses.
    """

    parts: list[np.ndarray]
    mark: int | None
    kept: list[np.ndarray] = field(default_factory=list)


class MessageChannel:
    """The messages of one rank over a communicator of all ranks.

    All ranks must begin the operations that have messages between them in one order, so that no circle of ranks waits
    for each other. On the host, an operation is complete when :meth:`begin` returns. On CUDA devices, it is then
    enqueued on the channel's stream, behind the earlier ones, and its messages proceed at the same time.

    Parameters
    ----------
    communicator: Communicator
        The communicator, which has no other use meanwhile.
    arrays: Arrays
        The arrays of the messages, whose copies run on the communicator's stream.
    """

    def __init__(self, communicator: Communicator, arrays: Arrays):
        self.communicator = communicator
        self.arrays = arrays
        self._sent: deque[Transit] = deque()

    def begin(self, ends: Sequence[Inlet | tuple[Outlet, np.ndarray]]) -> Transit:
        """Begin an operation: receive at inlets, and send shards through outlets, in their order.

        Raises
        ------
        CommunicationError
            When it, or an earlier one, failed.
        """
        self.communicator.bind()
        parts: list[np.ndarray] = []
        kept: list[np.ndarray] = []
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        with self.communicator.grouped():
            for end in ends:
                if isinstance(end, Inlet):
                    received = end.receive(self.arrays)
                    parts.append(received.part)
                    pieces += received.pieces
                else:
                    outlet, shard = end
                    kept += [shard, *outlet.send(self.arrays, shard)]
        self.communicator.check()
        for into, piece in pieces:
            self.arrays.copy(into, piece)
            kept.append(piece)
        return Transit(parts, self.arrays.mark(), kept)

    def wait(self, transit: Transit) -> list[np.ndarray]:
        """Wait once for the end of an operation, and return the parts that were received.

        Raises
        ------
        CommunicationError
            When it failed.
        """
        self.arrays.wait(transit.mark, self.communicator)
        return transit.parts

    def send(self, shards: Sequence[tuple[Outlet, np.ndarray]]) -> None:
        """Begin an operation that only sends; a later one waits for it, so that only a few are in progress.

        Raises
        ------
        CommunicationError
            When it, or an earlier one, failed.
        """
        while len(self._sent) >= _MOST_SENT:
            self.wait(self._sent.popleft())
        transit = self.begin(shards)
        if self.arrays.deferred:
            self._sent.append(transit)
