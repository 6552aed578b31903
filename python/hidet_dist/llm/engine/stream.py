"""What a request gets back: events, as they come, for a thread or for a coroutine."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hidet_dist.llm.engine.request import Request
from hidet_dist.llm.engine.sampling import Scored

if TYPE_CHECKING:
    import asyncio


@dataclass(frozen=True)
class Event:
    """What is new of an answer.

    Attributes
    ----------
    choice: int
        The answer's number, from 0.
    text: str
        The text that became certain. It may be empty, and belong to earlier tokens too.
    token: Scored or None
        The token that was generated, with a log-probability where the request asked for one.
    finish: str or None
        Why the answer ended: ``stop``, ``length`` or ``cancelled``. Its last event says so.
    """

    choice: int
    text: str = ""
    token: Scored | None = None
    finish: str | None = None


@dataclass
class Answer:
    """An answer, complete."""

    text: str = ""
    tokens: list[Scored] = field(default_factory=list)
    finish: str = ""

    @property
    def ids(self) -> list[int]:
        """The answer's tokens."""
        return [token.token for token in self.tokens]


class Stream:
    """The events of a request. Iterate over it in a thread, or with ``async for`` in one event loop.

    Attributes
    ----------
    request: Request
        The request.
    prompt: tuple of Scored or None
        The tokens of the prompt with their log-probabilities, before the first event, where the request asked for them.
    shared: int
        Tokens of the prompt that were in the pages already.
    generated: int
        Tokens of all answers so far.
    submitted, first, ended: float
        When it was submitted, when its first token was there, and when its last answer ended, by ``time.monotonic``, in
        seconds; 0 before that.
    """

    def __init__(self, request: Request, cancel: Callable[[Stream], None]):
        self.request = request
        self.prompt: tuple[Scored, ...] | None = None
        self.shared = 0
        self.generated = 0
        self.submitted = time.monotonic()
        self.first = 0.0
        self.ended = 0.0
        self._cancel = cancel
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._open = set(range(request.choices))
        self._error: BaseException | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def cancel(self) -> None:
        """End the request now. Its answers that have not ended yet do so as ``cancelled``."""
        self._cancel(self)

    def __iter__(self) -> Iterator[Event]:
        """Wait for events until all answers ended.

        Raises
        ------
        EngineError
            When the model failed, or the engine was closed.
        """
        while True:
            with self._changed:
                while not self._events and not self._over:
                    self._changed.wait()
                events, self._events = self._events, []
                error = self._error if self._over else None
            yield from events
            if error is not None:
                raise error
            if not events:
                return

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Wait for events until all answers ended; give all that there are at once.

        Raises
        ------
        EngineError
            When the model failed, or the engine was closed.
        """
        import asyncio  # who waits in no event loop starts without it

        loop = asyncio.get_running_loop()
        while True:
            waiter: asyncio.Future[None] | None = None
            with self._changed:
                events, self._events = self._events, []
                error = self._error if self._over else None
                over = self._over
                if not events and not over:
                    waiter = loop.create_future()
                    self._waiter = loop, waiter
            if waiter is not None:
                await waiter
                continue
            if events:
                yield events
            if error is not None:
                raise error
            if over:
                return

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Wait for events, as iteration in a thread does."""
        async for events in self.batches():
            for event in events:
                yield event

    def answers(self) -> list[Answer]:
        """Wait for all answers. Nothing else may take events.

        Raises
        ------
        EngineError
            When the model failed, or the engine was closed.
        """
        answers = [Answer() for _ in range(self.request.choices)]
        for event in self:
            answer = answers[event.choice]
            answer.text += event.text
            if event.token is not None:
                answer.tokens.append(event.token)
            answer.finish = event.finish or answer.finish
        return answers

    @property
    def _over(self) -> bool:
        return not self._open or self._error is not None

    def put(self, events: Iterable[Event]) -> None:
        """Give events; called by the engine."""
        with self._changed:
            if self._over:
                return
            for event in events:
                if event.choice in self._open:
                    self._events.append(event)
                    self.generated += event.token is not None
                    if event.finish is not None:
                        self._open.discard(event.choice)
            self._wake()

    def end(self, finish: str) -> None:
        """End the answers that have not ended; called by the engine."""
        self.put([Event(choice, finish=finish) for choice in sorted(self._open)])

    def fail(self, error: BaseException) -> None:
        """End all answers with an error; called by the engine."""
        with self._changed:
            if not self._over:
                self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._over and not self.ended:
            self.ended = time.monotonic()
        self._changed.notify_all()
        if self._waiter is not None:
            (loop, waiter), self._waiter = self._waiter, None
            try:
                loop.call_soon_threadsafe(_resolve, waiter)
            except RuntimeError:  # the loop was closed: nobody waits any more
                return


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
