"""Calls of a partition, made one at a time on each rank, and in the same order on all ranks."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
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
    """The sequence of calls of one partition.

    A call that communicates has two parts: a local part, and one in which the ranks communicate. Between them, all
    ranks agree to continue. If a rank failed in its local part, none continues, each raises an error, and the next call
    can be made. If a rank fails in the second part, it ends the communicator with the cause, because other ranks may
    wait for it in a collective, or may have a result already.

    Every attempted call has a number, whether it succeeds or not. Collectives and the agreement compare the numbers of
    the ranks. An attempt that other ranks are not notified of, such as one from a thread that must not call, is thereby
    detected in the next call; without numbers, that call would be paired with another rank's earlier one.

    Parameters
    ----------
    communicator: Communicator
        The communicator of the ranks.
    agreement: Agreement or None
        The exchange by which ranks agree to a call; None if the partition does not communicate, in which case any
        thread may call it. Otherwise only one thread may: the one that made this object, or that called :meth:`attach`
        last.
    shared_lock: context manager
        A lock, such as one that several partitions share, that is held during each call.
    ready: function
        Makes the context in which calls run.

    Attributes
    ----------
    numbers: iterator of int
        The numbers of further attempts.
    streaming: bool
        Whether a stream is in progress, during which no other call can be made.
    """

    def __init__(
        self,
        communicator: Communicator,
        agreement: Agreement | None,
        shared_lock: AbstractContextManager[Any],
        ready: Callable[[], AbstractContextManager[None]],
    ):
        self._communicator = communicator
        self._agreement = agreement
        self._shared_lock = shared_lock
        self._ready = ready
        self.numbers = itertools.count(1)
        self._asked = 0  # the number of the last call whose agreement this rank has entered
        self._agreed = 0  # the number of the last call, if the ranks agreed to it by other messages
        self._refused = 0  # the number of the last call that all ranks agreed not to make
        self._owner = None if agreement is None else threading.get_ident()
        self._process = Owner()
        self._lock = threading.Lock()
        self._running: int | None = None  # the thread that is in a call, while the lock is held
        self.streaming = False
        self._closed = False

    def make(
        self,
        number: int,
        purpose: Purpose,
        prepare: Callable[[], tuple[Prepared, Mapping[str, int]]],
        run: Callable[[Prepared], Result],
        program: int = 0,
        agreed: bool = False,
    ) -> Result:
        """Make a call, within a function that is decorated with :func:`numbered`.

        Parameters
        ----------
        number: int
            The number of the call.
        purpose: Purpose
            The purpose of the call, the same on all ranks.
        prepare: function
            The local part: returns the argument of ``run``, and the sizes of symbolic dims. It may raise any error.
        run: function
            The part that communicates, with the communicator bound to this thread.
        program: int
            The number of the program that is called, the same on all ranks.
        agreed: bool
            Whether the ranks have agreed to the call by other messages. A rank that fails in its local part then ends
            the communicator.

        Raises
        ------
        InputError, CallError
            On all ranks, where one of them refuses the call or fails in its local part. That rank raises the underlying
            error.
        CommunicationError
            Where a rank does not come, or failed in the part that communicates.
        HidetDistError
            When the partition is closed, or may not be called from this thread or process now.
        """
        self.check_caller()
        if self.streaming and purpose is not Purpose.END_OF_STREAM:
            raise HidetDistError("The partition is in a stream: take all of its results first, or close it.")

        def call() -> Result:
            if self._agreement is None:
                return run(prepare()[0])
            self._communicator.begin_call(number)
            self._agreed = number if agreed else 0
            prepared, sizes = prepare()
            self._asked = number
            if agreed:
                return run(prepared)
            refusal = self._agreement.ask(number, purpose, sizes, program)
            if refusal is not None:
                self._refused = number
                raise refusal
            return run(prepared)

        return self._exclusively(call)

    def go_on(self, run: Callable[[], Result]) -> Result:
        """Run the next part of a stream that a call has begun, with the communicator bound to this thread.

        Raises
        ------
        HidetDistError
            When the partition is closed, or may not be called from this thread or process now.
        """
        self.check_caller()
        return self._exclusively(run)

    def look(self, run: Callable[[], Result]) -> Result:
        """Run a function while no call does. It must not communicate: the other ranks do not know of it.

        Raises
        ------
        HidetDistError
            When the partition is closed, or may not be used from this thread or process now.
        """
        self.check_caller()
        with self._lock:
            if self._closed:
                raise HidetDistError("The partition is closed; load it again.")
            return run()

    def leave(self, end: Callable[[], None]) -> None:
        """Leave the stream in progress, by ``end()``. Waits for a running call.

        Raises
        ------
        HidetDistError
            When the partition may not be called from this thread or process now.
        """
        self.check_caller()
        with self._lock:
            end()

    def drop(self, end: Callable[[], None]) -> None:
        """Leave the stream in progress, by ``end()``, because nothing refers to it any more.

        The garbage collector may find this out in any thread, and within a call. Another thread leaves the stream then,
        after the running call.
        """
        if not self._process.is_this_process or sys.is_finalizing():
            return
        if self._owner in (None, threading.get_ident()) and self._lock.acquire(blocking=False):
            try:
                end()
            finally:
                self._lock.release()
        else:
            threading.Thread(target=self._end_in_turn, args=[end], name="hidet_dist-leaving").start()

    def _end_in_turn(self, end: Callable[[], None]) -> None:
        with self._lock:
            end()

    def _exclusively(self, run: Callable[[], Result]) -> Result:
        """Run a function while no other call does, with the communicator bound to this thread.

        It takes the function, instead of being a context manager, because a generator's context manager would keep the
        locks if a signal handler raised within contextlib's code.
        """
        with self._lock, self._shared_lock:
            self._running = threading.get_ident()
            if self._closed:
                raise HidetDistError("The partition is closed; load it again.")
            with self._ready():
                self._communicator.check()
                self._communicator.bind()
                return run()

    def fail(self, number: int, error: BaseException) -> None:
        """Notify the other ranks that a call has failed on this one, unless they know already.

        An error in the local part is reported in the agreement, so that the next call can be made. Exceptions that are
        not an ``Exception``, such as KeyboardInterrupt, end the communicator at once: reporting them there would mean
        waiting for the other ranks. So does a call within a stream, in which the other ranks may be.
        """
        agreement = self._agreement
        if agreement is None or self._refused == number or not self._process.is_this_process:
            return
        if self._closed or self._owner != threading.get_ident() or self._lock.locked():
            return  # the call was refused for that reason, and another thread may be using the communicator

        if number not in (self._asked, self._agreed) and isinstance(error, Exception) and not self.streaming:
            reason = error

            def tell() -> None:
                self._communicator.begin_call(number)
                self._asked = number
                agreement.tell(number, reason)
                self._refused = number

            with suppress(Exception):
                self._exclusively(tell)
        if self._refused != number:
            self._communicator.give_up(f"it failed in call {number}: {describe(error)}")

    def check_caller(self) -> None:
        """Raise HidetDistError if this thread may not make a call now."""
        self._check_process()
        thread = threading.get_ident()
        if self._is_running_in(thread):
            raise HidetDistError("The partition is already in a call of this thread; it cannot be called within it.")
        if self._owner is not None and self._owner != thread and not self._closed:
            raise HidetDistError(
                "The partition communicates, and was loaded by another thread. Ranks must make their calls in the same "
                "order, which several threads cannot ensure: call it from one thread only, after attach() there."
            )

    def _is_running_in(self, thread: int) -> bool:
        return self._running == thread and self._lock.locked()

    def attach(self) -> None:
        """Make the calling thread the one that may call, if the partition communicates. Waits for a running call."""
        self._check_process()
        with self._lock:
            if self._owner is not None:
                self._owner = threading.get_ident()

    @contextmanager
    def closing(self) -> Iterator[bool]:
        """Close, after a running call has ended. Yields whether it was open before; False in a forked child.

        Raises
        ------
        HidetDistError
            When this thread is in a call, as a signal handler may be.
        """
        if not self._process.is_this_process:
            yield False
            return
        if self._is_running_in(threading.get_ident()):
            raise HidetDistError("The partition is in a call of this thread; it cannot be closed within it.")
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
    """Decorate a method that makes a call: its first argument, ``number``, becomes the number of the call.

    The number is taken in the first statement, within which signal handlers do not run. An exception of a handler
    therefore comes either before the call has begun, or after the number was taken, so that other ranks are notified.
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
