"""One model over several ranks: rank 0 schedules, and tells the others what each step computes.

Every rank holds its part of the model, as a ``StepModel`` of its own. Rank 0 leads: before it computes a step, it sends
the step's inputs to the others, which follow. After a step the ranks compare how it went. All have computed it, or all
have refused it with nothing written, or the model has failed on all of them.
"""

from __future__ import annotations

import contextlib
import enum

import numpy as np
from numpy.typing import NDArray

from hidet_dist.errors import CallError, CommunicationError, EngineError, InputError
from hidet_dist.limits import MOST_SECONDS
from hidet_dist.llm.step import Integers, StepInputs, StepModel, StepSizes
from hidet_dist.runtime import session
from hidet_dist.runtime.agreement import describe
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.memory import HostMemory

_REASON_BYTES = 512


class _Kind(enum.IntEnum):
    STEP = 1
    RESET = 2
    CLOSE = 3


class _Outcome(enum.IntEnum):
    DONE = 0
    REFUSED = 1
    FAILED = 2


class _Ranks:
    """The exchange of the ranks."""

    def __init__(self, world_size: int):
        # A rank waits for the next step for as long as no request comes. That another one died, it hears by itself.
        self._steps = session.communicator_for((world_size,), timeout_seconds=MOST_SECONDS)
        self._outcomes = session.communicator_for((world_size,))
        self._memory = HostMemory()

    @property
    def rank(self) -> int:
        return self._steps.rank

    def _gather(self, communicator: Communicator, array: NDArray[np.int64]) -> NDArray[np.int64]:
        communicator.bind()
        return self._memory.all_gather(communicator, array)

    def send(self, kind: _Kind, inputs: StepInputs | None = None) -> None:
        parts = [] if inputs is None else _parts(inputs)
        sizes = [0] * len(_SIZES) if inputs is None else _sizes(inputs)
        self._gather(self._steps, np.array([kind, *sizes], np.int64))
        if parts:
            self._gather(self._steps, np.concatenate([part.reshape(-1) for part in parts]))

    def receive(self) -> tuple[_Kind, StepInputs | None]:
        kind, *sizes = self._gather(self._steps, np.zeros(1 + len(_SIZES), np.int64))[0].tolist()
        if kind != _Kind.STEP:
            return _Kind(kind), None
        shapes = _shapes(*sizes)
        counts = [int(np.prod(shape)) for shape in shapes.values()]
        data = self._gather(self._steps, np.zeros(sum(counts), np.int64))[0]
        parts = np.split(data, np.cumsum(counts)[:-1])
        arrays = {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return _Kind.STEP, StepInputs(**arrays, page=sizes[-1])

    def compare(self, error: Exception | None) -> None:
        """Tell the others how this rank's step went, and raise what all ranks must raise.

        Raises
        ------
        CallError
            When all ranks have refused the step.
        EngineError
            When a rank failed, or some have computed it and others not.
        """
        outcome = _Outcome.DONE
        if error is not None:
            outcome = _Outcome.REFUSED if isinstance(error, CallError | InputError) else _Outcome.FAILED
        row = np.zeros(1 + _REASON_BYTES // 8, np.int64)
        row[0] = outcome
        reason = b"" if error is None else describe(error).encode()[:_REASON_BYTES]
        row[1:].view(np.uint8)[: len(reason)] = np.frombuffer(reason, np.uint8)
        rows = self._gather(self._outcomes, row)
        outcomes = rows[:, 0].tolist()
        if not any(outcomes):
            return
        worst = max(outcomes)
        rank = outcomes.index(worst)
        said = rows[rank, 1:].tobytes().rstrip(b"\0").decode(errors="ignore")
        if set(outcomes) == {_Outcome.REFUSED}:
            raise CallError(f"Rank {rank} refused this step, as all ranks did: {said}") from error
        if worst == _Outcome.REFUSED:
            raise EngineError(f"Rank {rank} refused a step that others have computed: {said}") from error
        raise EngineError(f"Rank {rank} failed: {said}") from error


_SIZES = ("tokens", "sequences", "pages", "wanted", "page")


def _sizes(inputs: StepInputs) -> list[int]:
    return [len(inputs.tokens), *inputs.tables.shape, len(inputs.wanted), inputs.page]


def _shapes(tokens: int, sequences: int, pages: int, wanted: int, _: int) -> dict[str, tuple[int, ...]]:
    each = dict.fromkeys(("tokens", "positions", "slots", "sequences", "lengths"), (tokens,))
    return {**each, "tables": (sequences, pages), "states": (sequences,), "wanted": (wanted,)}


def _parts(inputs: StepInputs) -> list[Integers]:
    return [getattr(inputs, name) for name in _shapes(*_sizes(inputs))]


class LeadingModel:
    """The model of all ranks, as rank 0 steps it. The other ranks call :func:`follow`.

    Parameters
    ----------
    model: StepModel
        Rank 0's part of the model, whose logits are those of the whole.
    world_size: int
        The number of ranks.

    Raises
    ------
    ConfigError, RendezvousError, CommunicationError
        When the ranks do not meet.
    """

    def __init__(self, model: StepModel, world_size: int):
        self._model = model
        self._ranks = _Ranks(world_size)
        self._open = True

    @property
    def sizes(self) -> StepSizes:
        """The sizes of the model."""
        return self._model.sizes

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Compute one step on all ranks.

        Raises
        ------
        CallError
            When all ranks have refused it.
        EngineError, CommunicationError
            When a rank failed or died. Later steps are not possible.
        """
        inputs.check(self.sizes)  # a wrong step reaches no rank
        self._ranks.send(_Kind.STEP, inputs)
        failure: Exception | None = None
        logits = np.empty((0, 0), np.float32)
        try:
            logits = self._model.step(inputs)
        except Exception as error:
            failure = error
        try:
            self._ranks.compare(failure)
        except CallError:
            raise
        except BaseException:
            self._open = False  # the others have left, or are gone
            raise
        return logits

    def reset(self) -> None:
        """Forget all sequences on all ranks."""
        self._ranks.send(_Kind.RESET)
        self._model.reset()

    def close(self) -> None:
        """Close the model on all ranks that are still there."""
        try:
            if self._open:
                self._open = False
                with contextlib.suppress(CommunicationError):
                    self._ranks.send(_Kind.CLOSE)
        finally:
            self._model.close()


def follow(model: StepModel, world_size: int) -> None:
    """Compute the steps that rank 0 sends, until it closes the model. All ranks but rank 0 call this.

    Parameters
    ----------
    model: StepModel
        This rank's part of the model. It is closed at the end.
    world_size: int
        The number of ranks.

    Raises
    ------
    EngineError, CommunicationError
        When a rank failed or died.
    """
    ranks = _Ranks(world_size)
    try:
        while True:
            kind, inputs = ranks.receive()
            if kind == _Kind.CLOSE:
                return
            if kind == _Kind.RESET:
                model.reset()
                continue
            assert inputs is not None
            failure: Exception | None = None
            try:
                model.step(inputs)
            except Exception as error:
                failure = error
            try:
                ranks.compare(failure)
            except CallError:
                continue
    finally:
        model.close()
