"""The protocol of transports, their common arguments, and the failures of their callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hidet_dist import native

if TYPE_CHECKING:
    from hidet_dist.runtime.rendezvous import Rendezvous


class Transport(Protocol):
    """The implementation of the collectives of one rank's communicator. One thread at a time may use it."""

    @property
    def table(self) -> native.TransportTable:
        """The functions that the native library calls."""

    @property
    def overlap(self) -> native.Overlap | None:
        """The functions that overlap collectives with computation; ``None`` if collectives block until done."""

    @property
    def failed_by_peer(self) -> bool:
        """True if a collective failed because of another rank."""

    @property
    def shared_groups(self) -> Sequence[tuple[int, ...]]:
        """The groups of ranks whose collectives have used shared memory so far."""

    @property
    def shared_peers(self) -> Sequence[int]:
        """The ranks with which messages have been exchanged through shared memory so far."""

    def warm_up(self, groups: Iterable[int]) -> None:
        """Set up the collectives over the mesh and these groups, given as masks of mesh axes, before they are used.

        All ranks call this with the same groups. A failure is recorded like that of a collective.
        """

    def grouped(self) -> AbstractContextManager[None]:
        """Make a context whose messages may proceed in any order, at its end at the latest. Failures are recorded."""

    def wait(self, stream: int | None = None) -> None:
        """Wait for the collectives on a stream, by default the current one. Failures are recorded."""

    def wait_event(self, event: int) -> None:
        """Wait for the collectives before a CUDA event. Failures are recorded."""

    def close(self) -> None:
        """Close this rank's connections. Collectives of other ranks that wait for this one fail then."""

    def destroy(self) -> None:
        """Free native resources, after the communicator has been destroyed."""


class Blocking:
    """What transports have in common whose collectives block until they are done: there is nothing to wait for."""

    overlap = None

    def warm_up(self, groups: Iterable[int]) -> None:
        """Do nothing: groups are set up when they are first used."""

    def grouped(self) -> AbstractContextManager[None]:
        """Return an empty context: each message blocks until it is done."""
        return nullcontext()

    def wait(self, stream: int | None = None) -> None:
        """Do nothing: collectives block until they are done."""

    def wait_event(self, event: int) -> None:
        """Do nothing: collectives block until they are done."""

    def destroy(self) -> None:
        """Do nothing, for transports without native resources."""


class Failures:
    """A record of errors in Python functions that native code calls, through which no exception may pass.

    Parameters
    ----------
    fail: Callable[[str], None]
        Makes the communicator fail with a message.
    failed: Callable[[], bool]
        Whether the communicator has failed, for any reason.

    Attributes
    ----------
    by_peer: bool
        Whether another rank was to blame.
    interrupt: BaseException | None
        An exception, such as KeyboardInterrupt, to be raised unchanged once native code has returned.
    """

    def __init__(self, fail: Callable[[str], None], failed: Callable[[], bool]):
        self.fail = fail
        self.failed = failed
        self.by_peer = False
        self.interrupt: BaseException | None = None

    def record(self, run: Callable[[], None], raised_as_is: type[Exception] | tuple[()] = ()) -> int:
        """Run a function for native code, and return its status code.

        A ``RuntimeError`` is attributed to another rank. Errors of the type ``raised_as_is``, and exceptions that are
        not an ``Exception``, are kept as the interrupt.
        """
        try:
            run()
        except RuntimeError as error:
            self.by_peer = True
            self.fail(str(error))
            return native.FAILED
        except BaseException as error:
            if isinstance(error, raised_as_is) or not isinstance(error, Exception):
                self.interrupt = error
            self.fail(f"{type(error).__name__}: {error}")
            return native.FAILED
        return native.OK


@dataclass(frozen=True)
class Setup:
    """The arguments from which every transport is made.

    Attributes
    ----------
    rendezvous: Rendezvous
        The rendezvous of the ranks.
    name: str
        The communicator's name: the same on all ranks, and unlike that of any other communicator.
    mesh_shape: tuple[int, ...]
        The number of ranks along each mesh axis.
    timeout_seconds: float
        How long a collective, or meeting the ranks of a group, waits for the other ranks.
    failures: Failures
        Where failures are recorded.
    """

    rendezvous: Rendezvous
    name: str
    mesh_shape: tuple[int, ...]
    timeout_seconds: float
    failures: Failures
