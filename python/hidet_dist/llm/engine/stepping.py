"""One thread that steps a model for all open requests, until it is told to end or the model fails."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from hidet_dist.errors import CallError, EngineError, InputError
from hidet_dist.llm.step import StepInputs, StepModel
from hidet_dist.llm.text import Tokenizer

Work = TypeVar("Work")
"""What one step computes."""


class Stepping(ABC, Generic[Work]):
    """What engines have in common: their thread, the states that they pass through, and the ends of requests.

    A subclass calls ``__init__`` at the end of its own, as the thread begins there.

    Parameters
    ----------
    model: StepModel
        The model. The engine's thread is the only one that calls it, until the engine is closed.
    tokenizer: Tokenizer
        The model's tokenizer.
    on_failure: function, optional
        What the engine's thread calls when the model failed, after every open request has its error.
    """

    def __init__(
        self, model: StepModel, tokenizer: Tokenizer, on_failure: Callable[[BaseException], None] | None
    ) -> None:
        self.sizes = model.sizes
        self.tokenizer = tokenizer
        self._model = model
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._status = "ready"
        self._failure: BaseException | None = None
        self._model_seconds = self._other_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="hidet_dist engine", daemon=True)
        self._thread.start()

    @property
    def status(self) -> str:
        """``ready``, ``draining``, ``failed`` or ``closed``."""
        return self._status

    @property
    def failure(self) -> BaseException | None:
        """What the model failed with, if it did."""
        return self._failure

    def drain(self, timeout_seconds: float) -> bool:
        """Take no more requests, and wait until the open ones ended. Those that are left then get an error.

        Returns
        -------
        bool
            Whether all ended in time.
        """
        end = time.monotonic() + timeout_seconds
        with self._changed:
            if self._status == "ready":
                self._status = "draining"
            while self._is_busy() and self._status == "draining" and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            drained = not self._is_busy()
            self._abandon(EngineError("The server stops, and the request was not complete in time. Make it again."))
        return drained

    def close(self) -> None:
        """End open requests with an error, stop the thread, and close the model. It may be called twice."""
        with self._changed:
            if self._status != "failed":
                self._status = "closed"
            self._abandon(EngineError("The engine was closed before the request was complete."))
            self._changed.notify_all()
        self._thread.join()
        self._model.close()

    def __enter__(self) -> Self:
        """Return the engine; it is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the engine."""
        self.close()

    @abstractmethod
    def _is_busy(self) -> bool:
        """Tell whether requests are open; the caller holds the lock."""

    @abstractmethod
    def _abandon(self, error: BaseException) -> None:
        """End all requests with an error; the caller holds the lock."""

    @abstractmethod
    def _plan(self) -> Work | None:
        """Choose what to compute next; None if there is nothing to compute. The caller holds the lock."""

    @abstractmethod
    def _inputs(self, work: Work) -> StepInputs:
        """The inputs of a step."""

    @abstractmethod
    def _note(self, work: Work, results: NDArray[np.float32]) -> None:
        """Take the results of a step."""

    @abstractmethod
    def _refuse(self, work: Work, error: EngineError) -> None:
        """End the requests of a step that no rank has computed."""

    def _check_ready(self) -> None:
        """Raise EngineError if the engine takes no requests; the caller holds the lock."""
        if self._status == "draining":
            raise EngineError(
                "The server stops, and takes no more requests. Make the request again elsewhere, or later."
            )
        if self._failure is not None:
            raise _failed(self._failure)
        if self._status == "closed":
            raise EngineError("The engine was closed.")

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                begin = time.perf_counter()
                try:
                    results = self._model.step(self._inputs(work))
                except (CallError, InputError) as error:  # nothing was written, on no rank
                    failure = EngineError(f"The ranks refused a step of this request: {error}")
                    failure.__cause__ = error
                    self._refuse(work, failure)
                    continue
                between = time.perf_counter()
                self._note(work, results)
                with self._changed:
                    self._model_seconds += between - begin
                    self._other_seconds += time.perf_counter() - between
        except BaseException as error:
            with self._changed:
                if self._status != "closed":
                    self._status = "failed"
                    self._failure = error
                self._abandon(_failed(error))
                self._changed.notify_all()
            if self._failure is not None and self._on_failure is not None:
                self._on_failure(self._failure)

    def _next(self) -> Work | None:
        """Wait for what to compute next; None once the engine has ended."""
        with self._changed:
            while self._status not in {"closed", "failed"}:
                begin = time.perf_counter()
                work = self._plan()
                if work is not None:
                    self._other_seconds += time.perf_counter() - begin
                    return work
                self._changed.wait()
        return None


def _failed(error: BaseException) -> EngineError:
    failure = EngineError(f"The model failed: {error}. Start the server again.")
    failure.__cause__ = error
    return failure
