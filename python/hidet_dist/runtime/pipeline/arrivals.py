"""The arrival of the tensors that a stage reads of earlier stages, in the order that all ranks share.

An operation of a channel has all messages that one stage sends, or that one stage receives of another one, on a
micro-batch. Where messages block their ranks, the order is that of micro-batches, then of sending stages. On a stream,
messages of the next micro-batch can be received while a stage computes. The order is then that of ``m + s``, for
micro-batch m and sending stage s, and of s where this is equal: the order in time if all stages take equally long. In
both orders each rank has its receives on a micro-batch before its sends on it, and all ranks share the order. So the
first operation in it that is not complete has a rank on neither side that waits for a later one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hidet_dist.runtime.pipeline.channel import MessageChannel, Transit
from hidet_dist.runtime.pipeline.messages import Inlet


@dataclass(frozen=True)
class Arrival:
    """An input of a stage that an earlier one computes: that stage, the input's number, and the messages."""

    source: int
    number: int
    inlet: Inlet


class Arrivals:
    """The inputs of a stage that earlier stages compute, in one call.

    Parameters
    ----------
    channel: MessageChannel
        The channel of messages forward.
    arrivals: sequence of sequences of Arrival
        The inputs, for each micro-batch of the call.
    stage: int
        The number of the stage.
    """

    def __init__(self, channel: MessageChannel, arrivals: Sequence[Sequence[Arrival]], stage: int):
        self._channel = channel
        self._arrivals = arrivals
        sources = sorted({one.source for of_micro_batch in arrivals for one in of_micro_batch})
        # For each operation: the micro-batch at which it is due, the sending stage, and its micro-batch.
        ahead = {source: stage - source if channel.arrays.deferred else 0 for source in sources}
        self._due = deque(
            sorted((number - ahead[source], source, number) for number in range(len(arrivals)) for source in ahead)
        )
        self._begun: dict[int, list[tuple[list[Arrival], Transit]]] = {}

    def take(self, micro_batch: int) -> list[tuple[Arrival, np.ndarray]]:
        """Wait for the parts of a micro-batch, the one after the last that was taken.

        Raises
        ------
        CommunicationError
            When a message failed.
        """
        while self._due and self._due[0][0] <= micro_batch:
            _, source, number = self._due.popleft()
            arrivals = [one for one in self._arrivals[number] if one.source == source]
            transit = self._channel.begin([one.inlet for one in arrivals])
            self._begun.setdefault(number, []).append((arrivals, transit))
        taken: list[tuple[Arrival, np.ndarray]] = []
        for arrivals, transit in self._begun.pop(micro_batch, []):
            taken += zip(arrivals, self._channel.wait(transit), strict=True)
        return taken
