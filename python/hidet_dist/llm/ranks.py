"""One model over several ranks: rank 0 schedules, and tells the others what each step computes.

Every rank holds its part of the model, as a ``StepModel`` of its own. Rank 0 leads: before it computes a step, it
sends the step's inputs to the others, which follow. The same messages tell how the last step went on each rank, so a
step takes one exchange. All have computed a step, or all have refused it with nothing written, or the model fails on
all of them.
"""

from __future__ import annotations

import contextlib
import enum

import numpy as np
from numpy.typing import NDArray

from hidet_dist.errors import CallError, CommunicationError, EngineError, InputError
from hidet_dist.limits import MOST_SECONDS
from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.step import Integers, StepInputs, StepModel
from hidet_dist.runtime import session
from hidet_dist.runtime.agreement import describe
from hidet_dist.runtime.memory import HostMemory

_HEADER = 8  # words of a message before its data: its kind, the sender's outcome, and sizes
_WORDS = 2048  # of a message: its data are the inputs of a step that decodes, or the reason of a failure
_Words = NDArray[np.int32]


class _Kind(enum.IntEnum):
    STEP = 1
    RESET = 2
    CLOSE = 3
    COMPARE = 4  # no call: rank 0 failed in the last one


class _CallOutcome(enum.IntEnum):
    """How the last call went on a rank."""

    DONE = 0
    REFUSED = 1
    FAILED = 2


class _RankMessages:
    """The messages of the ranks: one from each before each call.

    That of rank 0 says what to compute next. All say how the last call went, so that all ranks decide alike whether to
    go on.
    """

    def __init__(self, world_size: int):
        # A rank waits for the next step for as long as no request comes. That another one died, it hears by itself.
        self._communicator = session.communicator_for((world_size,), timeout_seconds=MOST_SECONDS)
        self._memory = HostMemory()

    def _gather(self, words: _Words) -> _Words:
        self._communicator.bind()
        return self._memory.all_gather(self._communicator, words)

    def send(self, kind: _Kind, inputs: StepInputs | None = None, error: Exception | None = None) -> None:
        """Tell the others what to compute, and how the last call went here. Raises as :meth:`receive`."""
        message = _message(error)
        message[0] = kind
        parts = np.empty(0, np.int32)
        if inputs is not None:
            sizes = _sizes(inputs)
            message[2 : 2 + len(sizes)] = sizes
            parts = np.concatenate([part.reshape(-1) for part in _parts(inputs)]).astype(np.int32)
            if len(parts) <= _WORDS - _HEADER:
                message[_HEADER : _HEADER + len(parts)] = parts
        self._check(self._gather(message), error)
        if len(parts) > _WORDS - _HEADER:
            self._gather(parts)

    def receive(self, error: Exception | None) -> tuple[_Kind, StepInputs | None]:
        """Hear from rank 0 what to compute, and tell how the last call went here.

        Raises
        ------
        CallError
            When all ranks have refused the last call.
        EngineError
            When a rank failed, or some have made the last call and others not.
        """
        messages = self._gather(_message(error))
        self._check(messages, error)
        kind, _, *sizes = messages[0, : 2 + len(_SIZES)].tolist()
        if kind != _Kind.STEP:
            return _Kind(kind), None
        shapes = _shapes(*sizes)
        counts = [int(np.prod(shape)) for shape in shapes.values()]
        data = messages[0, _HEADER : _HEADER + sum(counts)]
        if sum(counts) > _WORDS - _HEADER:
            data = self._gather(np.zeros(sum(counts), np.int32))[0]
        parts = np.split(data.astype(np.int64), np.cumsum(counts)[:-1])
        arrays = {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return _Kind.STEP, StepInputs(**arrays, lengths=arrays["positions"] + 1, page=sizes[-1])

    def _check(self, messages: _Words, error: Exception | None) -> None:
        """Raise what all ranks must raise for the last call, if anything."""
        outcomes = messages[:, 1].tolist()
        if not any(outcomes):
            return
        worst = max(outcomes)
        rank = outcomes.index(worst)
        said = messages[rank, _HEADER:].tobytes().rstrip(b"\0").decode(errors="ignore")
        if set(outcomes) == {_CallOutcome.REFUSED}:
            raise CallError(f"Rank {rank} refused this step, as all ranks did: {said}") from error
        if worst == _CallOutcome.REFUSED:
            raise EngineError(f"Rank {rank} refused a step that others have computed: {said}") from error
        raise EngineError(f"Rank {rank} failed: {said}") from error


def _message(error: Exception | None) -> _Words:
    """Make a message that says how the last call went on this rank."""
    message = np.zeros(_WORDS, np.int32)
    if error is not None:
        message[1] = _CallOutcome.REFUSED if isinstance(error, CallError | InputError) else _CallOutcome.FAILED
        room = message[_HEADER:].view(np.uint8)
        reason = describe(error).encode()[: len(room)]
        room[: len(reason)] = np.frombuffer(reason, np.uint8)
    return message


_SIZES = ("tokens", "sequences", "pages", "wanted", "page")


def _sizes(inputs: StepInputs) -> list[int]:
    return [len(inputs.tokens), *inputs.tables.shape, len(inputs.wanted), inputs.page]


def _shapes(tokens: int, sequences: int, pages: int, wanted: int, _: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what is sent of a step. Lengths follow from positions."""
    each = dict.fromkeys(("tokens", "positions", "slots", "sequences"), (tokens,))
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
        self._ranks = _RankMessages(world_size)
        self._open = True

    @property
    def sizes(self) -> StepSizes:
        """The sizes of the model."""
        return self._model.sizes

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Compute one step on all ranks. That another rank failed at its end, the next call says.

        Raises
        ------
        CallError
            When all ranks have refused it.
        EngineError, CommunicationError
            When a rank failed or died. Later steps are not possible.
        """
        inputs.check(self.sizes)  # a wrong step reaches no rank
        self._send(_Kind.STEP, inputs)
        try:
            return self._model.step(inputs)
        except Exception as error:
            self._send(_Kind.COMPARE, error=error)  # raises what all ranks raise
            raise

    def _send(self, kind: _Kind, inputs: StepInputs | None = None, error: Exception | None = None) -> None:
        try:
            self._ranks.send(kind, inputs, error)
        except CallError:
            raise
        except BaseException:
            self._open = False  # the others have left, or are gone
            raise

    def reset(self) -> None:
        """Forget all sequences on all ranks."""
        self._send(_Kind.RESET)
        self._model.reset()

    def close(self) -> None:
        """Close the model on all ranks that are still there."""
        try:
            if self._open:
                self._open = False
                with contextlib.suppress(CommunicationError, EngineError):
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
    ranks = _RankMessages(world_size)
    error: Exception | None = None
    try:
        while True:
            try:
                kind, inputs = ranks.receive(error)
            except CallError:
                error = None
                continue
            error = None
            if kind == _Kind.CLOSE:
                return
            try:
                if kind == _Kind.RESET:
                    model.reset()
                elif inputs is not None:
                    model.step(inputs)
            except Exception as failure:
                error = failure
    finally:
        model.close()
