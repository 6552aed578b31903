"""The exchange before each call, in which the ranks agree that each can make it, with the same symbolic sizes."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import numpy as np

from hidet_dist.errors import CallError, CommunicationError, HidetDistError, InputError
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.memory import Memory

_MOST_REASON_BYTES = 512
_SIZES_AT = 4  # the first word with the size of a symbolic dim
_MARK = 0x6C6C6163 << 32
"""The upper half of a row's first word, whose lower half is the call's number; it marks the data as a row."""


class Purpose(enum.IntEnum):
    """The purpose of a call, the same on all ranks."""

    RUN = 0
    WARM_UP = 1
    STREAM = 2
    END_OF_STREAM = 3
    BATCH = 4  # of a stream whose batches are calls by themselves
    RESET = 5
    LOAD = 6


_DOING = {
    Purpose.RUN: "running on inputs",
    Purpose.WARM_UP: "warming up",
    Purpose.STREAM: "beginning a stream",
    Purpose.END_OF_STREAM: "at the end of a stream",
    Purpose.BATCH: "in a stream",
    Purpose.RESET: "resetting states",
    Purpose.LOAD: "loading states",
}


class _State(enum.IntEnum):
    """The state in which a rank enters the exchange."""

    READY = 0
    REFUSED = 1  # its inputs do not fit the program
    FAILED = 2  # it cannot make the call, for another reason


class Agreement:
    """One exchange of a row of int64 from each rank, of the same length in every call.

    A row holds the mark with the number of the call, the rank's state, the purpose, the program, the size of each
    symbolic dim (0 where a rank of a pipeline does not know it from its inputs), and the reason (UTF-8) why a rank
    cannot make the call. All ranks see all rows, and so come to the same decision.

    Parameters
    ----------
    communicator: Communicator
        The communicator of the ranks. It is bound to the thread that calls :meth:`ask` or :meth:`tell`.
    memory: Memory
        The memory whose all-gather exchanges the rows.
    symbols: sequence of str
        The symbolic dims of all programs, in an order that is the same on all ranks.
    programs: sequence of str
        The names of the programs.
    """

    def __init__(
        self, communicator: Communicator, memory: Memory, symbols: Sequence[str], programs: Sequence[str] = ("main",)
    ):
        self._communicator = communicator
        self._memory = memory
        self._symbols, self._programs = tuple(symbols), tuple(programs)
        self._reason_at = _SIZES_AT + len(self._symbols)
        self._row = np.zeros(self._reason_at + _MOST_REASON_BYTES // 8, np.int64)

    def ask(self, call: int, purpose: Purpose, sizes: Mapping[str, int], program: int = 0) -> HidetDistError | None:
        """Return the error that all ranks must raise instead of making the call, or None if all can make it.

        The error is an InputError where a rank has refused the call, or where programs, purposes or sizes differ; it is
        a CallError where a rank has failed. ``program`` is the number of the program.

        Raises
        ------
        CommunicationError
            Where a rank does not come, or is in a different call.
        """
        row = self._row
        row[0], row[1], row[2], row[3] = _MARK | call, _State.READY, purpose, program
        for place, name in enumerate(self._symbols, _SIZES_AT):
            row[place] = sizes.get(name, 0)
        rows = self._memory.all_gather(self._communicator, row)
        if rows.tobytes() == row.tobytes() * len(rows):
            return None
        self._check_calls(rows, call)
        return self._refused(rows) or self._different(rows)

    def tell(self, call: int, error: Exception) -> None:
        """Notify the other ranks that this one cannot make the call, and why. Returns once all have reached the call.

        Raises
        ------
        CommunicationError
            As :meth:`ask`.
        """
        row = np.zeros_like(self._row)
        row[0], row[1] = _MARK | call, _State.REFUSED if isinstance(error, InputError) else _State.FAILED
        reason = describe(error).encode()[:_MOST_REASON_BYTES]
        row[self._reason_at :].view(np.uint8)[: len(reason)] = np.frombuffer(reason, np.uint8)
        self._check_calls(self._memory.all_gather(self._communicator, row), call)

    def _check_calls(self, rows: np.ndarray, call: int) -> None:
        """End the communicator where a rank is in a different call; the rest of its row is not read.

        Transports that compare the ranks' collectives have raised an error for this case before.
        """
        others = [rank for rank, mark in enumerate(rows[:, 0]) if mark != _MARK | call]
        if not others:
            return
        here, numbers = self._communicator.rank, ", ".join(map(str, others))
        self._communicator.give_up(
            f"the ranks are out of step: rank {here} is in call {call}, but ranks {numbers} are not. All ranks must "
            "make the same calls in the same order"
        )
        self._communicator.check()

    def _refused(self, rows: np.ndarray) -> HidetDistError | None:
        for rank, row in enumerate(rows):
            if row[1] == _State.READY:
                continue
            reason = row[self._reason_at :].tobytes().rstrip(b"\0").decode(errors="ignore")
            if row[1] == _State.REFUSED:
                return InputError(f"Rank {rank} refused this call: {reason}")
            return CallError(f"Rank {rank} could not make this call, so no rank has made it: {reason}")
        return None

    def _different(self, rows: np.ndarray) -> HidetDistError | None:
        """Return the error for rows that differ; None if ranks only lack sizes that others know."""
        here = self._communicator.rank
        for rank, row in enumerate(rows):
            if row[2] != rows[here, 2]:
                return InputError(
                    f"All ranks must make the same calls; rank {here} is {_DOING[rows[here, 2]]}, but rank {rank} "
                    f"{_DOING[row[2]]}."
                )
            if row[3] != rows[here, 3]:
                return InputError(
                    f"All ranks must make the same calls; rank {here} is in the program "
                    f"{self._programs[rows[here, 3]]}, but rank {rank} is in {self._programs[row[3]]}."
                )
        for place, name in enumerate(self._symbols, _SIZES_AT):
            knowing = [rank for rank, size in enumerate(rows[:, place]) if size]
            first = here if here in knowing else min(knowing, default=here)
            for rank in knowing:
                if rows[rank, place] != rows[first, place]:
                    return InputError(
                        f"The symbolic dim {name} must be the same on all ranks; it is {rows[first, place]} on rank "
                        f"{first} but {rows[rank, place]} on rank {rank}."
                    )
        if rows[:, self._reason_at :].any():
            raise CommunicationError(f"rank {here}: the rows of the ranks differ in their padding")
        return None


def describe(error: BaseException) -> str:
    """Format an error as its message, preceded by its type's name unless that is a type of hidet_dist."""
    message = str(error)
    if isinstance(error, HidetDistError):
        return message
    name = type(error).__name__
    return f"{name}: {message}" if message else name
