"""The engine of encoders: one thread that steps a model for the texts of all requests together.

A text is computed in one step, whole. Its vector does not depend on the texts that share the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hidet_dist.errors import BusyError, EngineError, RequestError
from hidet_dist.llm.engine.engine import EngineOptions, Statistics
from hidet_dist.llm.engine.stepping import Stepping
from hidet_dist.llm.pooling import Pooling
from hidet_dist.llm.step import Integers, StepInputs, StepModel
from hidet_dist.llm.text import Tokenizer

Vectors = list[NDArray[np.float32]]


@dataclass(eq=False)
class _EmbeddingRequest:
    """A request: its texts that wait, and the vectors of the others by their number."""

    future: Future[Vectors]
    count: int
    vectors: dict[int, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Text:
    """A text of a request."""

    asked: _EmbeddingRequest
    number: int
    tokens: Integers


class EmbeddingEngine(Stepping[list[_Text]]):
    """Computes the vectors of texts for many requests with one encoder.

    Parameters
    ----------
    model: StepModel
        The encoder, which gives the vectors of tokens as logits. The engine's thread is the only one that calls it,
        until the engine is closed.
    tokenizer: Tokenizer
        The model's tokenizer.
    pooling: Pooling
        How a text's vector is made of those of its tokens.
    options: EngineOptions, optional
        How to schedule: ``step_tokens``, and the texts that may wait in the ``queue``.
    on_failure: function, optional
        What the engine's thread calls when the model failed, after every open request has its error.

    Raises
    ------
    ConfigError
        When an option is wrong.
    """

    def __init__(
        self,
        model: StepModel,
        tokenizer: Tokenizer,
        pooling: Pooling,
        options: EngineOptions | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ):
        options = options or EngineOptions()
        options.check()
        sizes = model.sizes
        self.pooling = pooling
        # A text is computed whole: the bound of a step is no less than the longest one.
        self._step_tokens = max(min(options.step_tokens or sizes.tokens, sizes.tokens), sizes.context)
        self._queue = options.queue
        self._waiting: deque[_Text] = deque()
        self._running: list[_Text] = []
        self._steps = self._tokens = 0
        super().__init__(model, tokenizer, on_failure)

    def submit(self, texts: Sequence[Sequence[int]]) -> Future[Vectors]:
        """Ask for the vectors of texts, given as tokens. Cancel the future to end the request.

        Returns
        -------
        Future
            The vectors [H], float32, in the order of the texts; or an EngineError.

        Raises
        ------
        RequestError
            When a text is empty, too long, or has a token that the model does not have.
        BusyError
            When too many texts wait.
        EngineError
            When the engine takes no requests.
        """
        arrays = [self._checked(tokens) for tokens in texts]
        if not arrays:
            raise RequestError("There is no text; give one at least.", "input")
        asked = _EmbeddingRequest(Future(), len(arrays))
        with self._changed:
            self._check_ready()
            if len(self._waiting) + len(arrays) > self._queue:
                raise BusyError(
                    f"{len(self._waiting)} texts wait already, and {self._queue} may; the request has {len(arrays)}. "
                    "Make it again later, or raise the length of the queue."
                )
            self._waiting.extend(_Text(asked, number, tokens) for number, tokens in enumerate(arrays))
            self._changed.notify_all()
        return asked.future

    def _checked(self, tokens: Sequence[int]) -> Integers:
        if not tokens:
            raise RequestError("A text has no token; give one at least.", "input")
        if len(tokens) > self.sizes.context:
            raise RequestError(
                f"A text has {len(tokens)} tokens; this model takes {self.sizes.context}. Shorten it.", "input"
            )
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self.sizes.vocabulary:
                raise RequestError(
                    f"A text has the token {token}; this model has 0 to {self.sizes.vocabulary - 1}.", "input"
                )
        return np.array(tokens, np.int64)

    def statistics(self) -> Statistics:
        """Return what the engine does, and did. An encoder keeps no pages."""
        with self._changed:
            return Statistics(
                running=len(self._running),
                waiting=len(self._waiting),
                pages=0,
                pages_used=0,
                pages_kept=0,
                steps=self._steps,
                prompt_tokens=self._tokens,
                shared_tokens=0,
                generated_tokens=0,
                preempted=0,
                model_seconds=self._model_seconds,
                other_seconds=self._other_seconds,
            )

    def _is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def _abandon(self, error: BaseException) -> None:
        texts = (*self._running, *self._waiting)
        self._waiting.clear()
        self._running = []
        _fail(texts, error)

    def _inputs(self, work: list[_Text]) -> StepInputs:
        return _inputs([text.tokens for text in work])

    def _note(self, work: list[_Text], results: NDArray[np.float32]) -> None:
        """Take the vectors of a step's tokens, and give each text its own."""
        ends = np.cumsum([len(text.tokens) for text in work])
        for text, part in zip(work, np.split(results, ends[:-1]), strict=True):
            vector = self.pooling(part)
            if np.isfinite(vector).all():
                _give(text, vector)
            else:
                _fail([text], EngineError("The model computed no finite numbers for a text."))
        with self._changed:
            self._steps += 1
            self._tokens += int(ends[-1])
            self._done(work)

    def _refuse(self, work: list[_Text], error: EngineError) -> None:
        with self._changed:
            self._done(work)
        _fail(work, error)

    def _plan(self) -> list[_Text] | None:
        """Take as many texts as a step has room for, in the order in which they came; None if none waits."""
        taken: list[_Text] = []
        left = self._step_tokens
        while self._waiting and len(taken) < self.sizes.states:
            text = self._waiting[0]
            if text.asked.future.done():  # it was cancelled, or another text of it failed
                self._waiting.popleft()
                continue
            if len(text.tokens) > left:
                break
            left -= len(text.tokens)
            taken.append(self._waiting.popleft())
        if taken:
            self._running = taken
            return taken
        self._changed.notify_all()  # whoever waits for the end of what was cancelled
        return None

    def _done(self, texts: list[_Text]) -> None:
        """End a step; the caller holds the lock."""
        if self._running is texts:
            self._running = []
        self._changed.notify_all()


def _inputs(texts: Sequence[Integers]) -> StepInputs:
    """Put whole texts into a step, one behind the other."""
    counts = np.array([len(tokens) for tokens in texts], np.int64)
    firsts = np.cumsum(counts) - counts
    sequences = np.repeat(np.arange(len(texts), dtype=np.int64), counts)
    rows = np.arange(int(counts.sum()), dtype=np.int64)
    positions = rows - firsts[sequences]
    columns = np.arange(int(counts.max()), dtype=np.int64)
    tables = firsts[:, None] + np.where(columns < counts[:, None], columns, 0)
    return StepInputs(
        tokens=np.concatenate(texts),
        positions=positions,
        slots=rows,
        sequences=sequences,
        lengths=positions + 1,
        tables=tables,
        states=np.arange(len(texts), dtype=np.int64),
        wanted=rows,
        page=1,
    )


def _give(text: _Text, vector: NDArray[np.float32]) -> None:
    """Note a text's vector, and give those of its request where it was the last one."""
    asked = text.asked
    asked.vectors[text.number] = vector
    if len(asked.vectors) == asked.count and not asked.future.done():
        try:
            asked.future.set_result([asked.vectors[number] for number in range(asked.count)])
        except InvalidStateError:  # it was cancelled just now
            return


def _fail(texts: Iterable[_Text], error: BaseException) -> None:
    """End the requests of texts with an error."""
    for future in {text.asked.future for text in texts}:
        if not future.done():
            try:
                future.set_exception(error)
            except InvalidStateError:
                continue
