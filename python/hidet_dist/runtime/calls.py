"""The calls of a partition: one at a time on each rank, and in the same order on all of them."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from hidet_dist.errors import HidetDistError
from hidet_dist.runtime.agreement import Agreement, Purpose, describe
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.forks import Owner

Prepared = TypeVar("Prepared")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Calls:
    """Makes the calls of one partition.

    A call that communicates has two parts: what a rank does by itself, and what it does with the others. Between them,
    all ranks agree to go on; where one of them failed in its first part, none goes on, each raises, and the next call
    can be made. Where a rank fails in the second part, it ends the communicator, with the cause, as the others may wait
    for it in a collective, or have an answer already.

    Every attempt has a number, however it ends, and collectives and agreement compare it with the others'. So an
    attempt that other ranks could not be told of, such as one from a thread that must not call, is found in the next
    call instead of pairing that one with another rank's earlier one.

    Parameters
    ----------
    communicator: Communicator
        Of the ranks.
    agreement: Agreement or None
        How they agree; None where the partition communicates nothing. Then it is called from any thread, otherwise from
        the thread that made this, or that called :meth:`attach` last.
    lock_of_all: context manager
        Taken for each call, such as a lock that partitions share.
    ready: function
        Gives a context that calls are made in.

    Attributes
    ----------
    numbers: iterator of int
        Gives each attempt its number.
    streaming: bool
        Whether a stream is under way, in which there are no other calls.
    """

    def __init__(
        self,
        communicator: Communicator,
        agreement: Agreement | None,
        lock_of_all: AbstractContextManager[Any],
        ready: Callable[[], AbstractContextManager[None]],
    ):
        self._communicator = communicator
        self._agreement = agreement
        self._lock_of_all = lock_of_all
        self._ready = ready
        self.numbers = itertools.count(1)
        self._asked = 0  # the last call in whose agreement this rank has taken part, or begun to
        self._refused = 0  # the last call that all ranks agreed not to make
        self._owner = None if agreement is None else threading.get_ident()
        self._process = Owner()
        self._lock = threading.Lock()
        self._running: int | None = None  # the thread that is in a call, while the lock is taken
        self.streaming = False  # whether calls wait for the end of a stream
        self._closed = False

    def make(
        self,
        number: int,
        purpose: Purpose,
        prepare: Callable[[], tuple[Prepared, Mapping[str, int]]],
        run: Callable[[Prepared], Result],
    ) -> Result:
        """Make a call, within a function that :func:`numbered` has given its number.

        Parameters
        ----------
        number: int
            The call's.
        purpose: Purpose
            What for; the same on all ranks.
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
        self.check_caller()
        if self.streaming and purpose is not Purpose.END_OF_STREAM:
            raise HidetDistError("The partition is in a stream: take all of its results first, or close it.")
        # The locks are not taken by generators, which would keep them after an exception within contextlib's code.
        with self._lock, self._lock_of_all:
            self._running = threading.get_ident()
            if self._closed:
                raise HidetDistError("The partition is closed; load it again.")
            with self._ready():
                self._communicator.check()
                self._communicator.bind()
                if self._agreement is None:
                    return run(prepare()[0])
                self._communicator.begin_call(number)
                prepared, sizes = prepare()
                self._asked = number
                refusal = self._agreement.ask(number, purpose, sizes)
                if refusal is not None:
                    self._refused = number
                    raise refusal
                return run(prepared)

    def go_on(self, run: Callable[[], Result]) -> Result:
        """Do the next part of a stream that a call has begun, with the communicator bound to this thread.

        Raises
        ------
        HidetDistError
            When the partition is closed, or may not be called from this thread or process now.
        """
        self.check_caller()
        with self._lock, self._lock_of_all:
            self._running = threading.get_ident()
            if self._closed:
                raise HidetDistError("The partition is closed; load it again.")
            with self._ready():
                self._communicator.check()
                self._communicator.bind()
                return run()

    def fail(self, number: int, error: BaseException) -> None:
        """Tell the other ranks that a call has failed on this one, where they do not know.

        An error of before the agreement is told there, so that the next call can be made. KeyboardInterrupt and its
        like do not wait for the others to come there.
        """
        if self._agreement is None or self._refused == number or not self._process.is_this_process:
            return
        if self._closed or self._owner != threading.get_ident() or self._lock.locked():
            return  # it was refused for that, and others may be using the communicator
        if self._asked != number and isinstance(error, Exception):
            with suppress(Exception), self._lock, self._lock_of_all, self._ready():
                self._communicator.check()
                self._communicator.bind()
                self._communicator.begin_call(number)
                self._asked = number
                self._agreement.tell(number, error)
                self._refused = number
        if self._refused != number:
            self._communicator.give_up(f"it failed in call {number}: {describe(error)}")

    def check_caller(self) -> None:
        """Refuse a call by this thread that must not be made."""
        self._check_process()
        thread = threading.get_ident()
        if self._is_running_in(thread):
            raise HidetDistError("The partition is in a call of this thread already; it cannot be called within that.")
        if self._owner is not None and self._owner != thread and not self._closed:
            raise HidetDistError(
                "The partition communicates, and was loaded by another thread. Ranks must make their calls in the same "
                "order, which threads do not keep: call it from one thread only, after attach() there."
            )

    def _is_running_in(self, thread: int) -> bool:
        return self._running == thread and self._lock.locked()

    def attach(self) -> None:
        """Make the calling thread the one that calls, if that matters. Waits for a call that runs."""
        self._check_process()
        with self._lock:
            if self._owner is not None:
                self._owner = threading.get_ident()

    @contextmanager
    def closing(self) -> Iterator[bool]:
        """Close after the call that runs. Returns whether it was open before; a child of the process gets False.

        Raises
        ------
        HidetDistError
            When this thread is in a call, as a signal handler may be.
        """
        if not self._process.is_this_process:
            yield False
            return
        if self._is_running_in(threading.get_ident()):
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


class Callee(Protocol):
    """An object whose methods are numbered calls."""

    _calls: Calls


Caller = TypeVar("Caller", bound=Callee)


def numbered(
    method: Callable[Concatenate[Caller, int, Arguments], Result],
) -> Callable[Concatenate[Caller, Arguments], Result]:
    """A method that users call to make a call, given the call's number as its first argument, ``number``.

    It takes the number in its first statement, within which signal handlers do not run: what they raise either comes
    before the call has begun, or the number is taken and the other ranks hear of it.
    """

    @functools.wraps(method)
    def call(self: Caller, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        number = next(self._calls.numbers)
        try:
            return method(self, number, *args, **kwargs)
        except BaseException as error:
            self._calls.fail(number, error)
            raise

    signature = inspect.signature(method)
    shown = [parameter for name, parameter in signature.parameters.items() if name != "number"]
    documented: Any = call
    documented.__signature__ = signature.replace(parameters=shown)
    return call
