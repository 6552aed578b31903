"""The protocol of transports, their common arguments, and the failures of their callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hidet_dist.runtime import native

if TYPE_CHECKING:
    from hidet_dist.runtime.rendezvous import Rendezvous


class Transport(Protocol):
    """Carries out the collectives of one rank's communicator. One thread at a time may use it."""

    @property
    def table(self) -> native.Transport:
        """The functions that the native library calls."""

    @property
    def overlap(self) -> native.Overlap | None:
        """The functions that run collectives beside computation; ``None`` where a collective that returns is over."""

    @property
    def failed_by_peer(self) -> bool:
        """Whether a collective failed because of another rank."""

    @property
    def shared_groups(self) -> Sequence[tuple[int, ...]]:
        """The groups of ranks, of those used so far, whose data travels through shared memory of the host."""

    @property
    def shared_peers(self) -> Sequence[int]:
        """The ranks, of those that messages were exchanged with so far, whose messages go through shared memory."""

    def warm_up(self, groups: Iterable[int]) -> None:
        """Set up the mesh and these groups, given as masks of mesh axes, before they are used.

        All ranks do so with the same groups. A failure is recorded, as that of a collective is.
        """

    def wait(self, stream: int | None = None) -> None:
        """Return once the collectives on a stream are over, by default on the current one; failures are recorded."""

    def close(self) -> None:
        """Close this rank's ends, at which collectives that wait for this rank fail on the other ranks."""

    def destroy(self) -> None:
        """Free it, once its communicator has been destroyed."""


class Failures:
    """Records what goes wrong in Python while native code waits for it, where nothing may be raised.

    Parameters
    ----------
    fail: Callable[[str], None]
        Makes the communicator fail with this message.
    failed: Callable[[], bool]
        Whether the communicator has failed, for whatever reason.

    Attributes
    ----------
    by_peer: bool
        Whether another rank was to blame.
    interrupt: BaseException | None
        What is to be raised as it is once native code has returned, such as KeyboardInterrupt.
    """

    def __init__(self, fail: Callable[[str], None], failed: Callable[[], bool]):
        self.fail = fail
        self.failed = failed
        self.by_peer = False
        self.interrupt: BaseException | None = None

    def record(self, run: Callable[[], None], raised_as_is: type[Exception] | tuple[()] = ()) -> int:
        """Run something that native code waits for; a status code is returned.

        A ``RuntimeError`` is another rank's doing. Errors of the type ``raised_as_is``, and what is no ``Exception``,
        are kept as the interrupt.
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
        The ranks, met.
    name: str
        The communicator's, the same on all ranks and on no other communicator.
    mesh_shape: tuple[int, ...]
        The mesh of all ranks.
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
