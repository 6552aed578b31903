"""The calls of a partition: one at a time on each rank, and in the same order on all of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

from hidet_dist.errors import CommunicationError, HidetDistError
from hidet_dist.runtime.agreement import Agreement, Purpose, describe
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.forks import Owner

Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


class Calls:
    """Makes the calls of one partition.

    A call that communicates has two parts: what a rank does by itself, and what it does with the others. Between them,
    all ranks agree to go on; where one of them failed in its first part, none goes on, each raises, and the next call
    can be made. Where a rank fails in the second part, it ends the communicator, with the cause, as the others may wait
    for it in a collective, or have an answer already.

    Every attempt takes a number first, however it ends, and collectives and agreement compare it with the others'. So
    an attempt that other ranks could not be told of, such as one from a thread that must not call, is found in the next
    call instead of pairing it with another rank's earlier one.

    Parameters
    ----------
    communicator: Communicator
        Of the ranks.
    agreement: Agreement or None
        How they agree; None where the partition communicates nothing. Then it is called from any thread, otherwise from
        the thread that made this, or that called :meth:`attach` last.
    """

    def __init__(self, communicator: Communicator, agreement: Agreement | None):
        self._communicator = communicator
        self._agreement = agreement
        self._numbers = itertools.count(1)
        self._owner = None if agreement is None else threading.get_ident()
        self._process = Owner()
        self._lock = threading.Lock()
        self._running: int | None = None  # the thread that is in a call
        self._closed = False

    def make(
        self,
        purpose: Purpose,
        within: Callable[[], AbstractContextManager[None]],
        prepare: Callable[[], tuple[Prepared, Mapping[str, int]]],
        run: Callable[[Prepared], Result],
    ) -> Result:
        """Make a call.

        Parameters
        ----------
        purpose: Purpose
            What for; the same on all ranks.
        within: function
            Gives a context that both parts are run in.
        prepare: function
            The first part: gives what the second part takes, and the sizes of symbolic dims. It may raise anything.
        run: function
            The second part, with the communicator bound to this thread.

        Raises
        ------
        InputError, CallError
            On all ranks: where a rank refuses the call or fails in its first part, which raises its own error.
        CommunicationError
            Where a rank does not come, or failed in its second part.
        HidetDistError
            When the partition is closed, or may not be called from this thread or process now.
        """
        number = next(self._numbers)  # first of all, whatever happens then
        with self._turn():
            if self._agreement is None:
                with within():
                    self._communicator.check()
                    self._communicator.bind()
                    return run(prepare()[0])
            return self._make_together(self._agreement, number, purpose, within, prepare, run)

    def _make_together(
        self,
        agreement: Agreement,
        number: int,
        purpose: Purpose,
        within: Callable[[], AbstractContextManager[None]],
        prepare: Callable[[], tuple[Prepared, Mapping[str, int]]],
        run: Callable[[Prepared], Result],
    ) -> Result:
        agreed_to_fail = False
        try:
            with within():
                communicator = self._communicator
                communicator.check()
                communicator.bind()
                communicator.begin_call(number)
                try:
                    prepared, sizes = prepare()
                except Exception as error:
                    with suppress(CommunicationError):
                        agreement.tell(number, error)
                        agreed_to_fail = True
                    raise
                refusal = agreement.ask(number, purpose, sizes)
                if refusal is not None:
                    agreed_to_fail = True
                    raise refusal
                return run(prepared)
        except BaseException as error:
            # KeyboardInterrupt and its like do not wait for the others, at whatever point they come.
            if not agreed_to_fail:
                self._communicator.give_up(f"it failed in call {number}: {describe(error)}")
            raise

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time, from a thread that may call, until the partition is closed."""
        self._check_process()
        thread = threading.get_ident()
        if self._running == thread:
            raise HidetDistError("The partition is in a call of this thread already; it cannot be called within that.")
        if self._owner is not None and self._owner != thread and not self._closed:
            raise HidetDistError(
                "The partition communicates, and was loaded by another thread. Ranks must make their calls in the same "
                "order, which threads do not keep: call it from one thread only, after attach() there."
            )
        with self._lock:
            if self._closed:
                raise HidetDistError("The partition is closed; load it again.")
            self._running = thread
            try:
                yield
            finally:
                self._running = None

    def attach(self) -> None:
        """Make the calling thread the one that calls, if that matters. Waits for a call that runs."""
        self._check_process()
        with self._lock:
            if self._owner is not None:
                self._owner = threading.get_ident()

    @contextmanager
    def closing(self) -> Iterator[bool]:
        """Close, after the call that runs: whether it was open before. In a child of the process it never was.

        Raises
        ------
        HidetDistError
            When this thread is in a call, as a signal handler may be.
        """
        if not self._process.is_this_process:
            yield False
            return
        if self._running == threading.get_ident():
            raise HidetDistError("The partition is in a call of this thread; it cannot be closed within that.")
        with self._lock:
            was_open, self._closed = not self._closed, True
            yield was_open

    def _check_process(self) -> None:
        self._process.check(
            "The partition",
            "load it in the process that calls it, after the fork, or start processes by multiprocessing's methods "
            "'spawn' or 'forkserver'.",
        )
