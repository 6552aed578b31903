"""Communicators: groups of ranks on a mesh, bound to a thread before kernels are launched, and checked afterwards."""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from hidet_dist import native
from hidet_dist.errors import CommunicationError, ConfigError
from hidet_dist.runtime import liveness
from hidet_dist.runtime.forks import Owner, keep_forever
from hidet_dist.runtime.liveness import CollectiveProgress, Verdict
from hidet_dist.runtime.transports import Failures, Setup, Transport, open_transport
from hidet_dist.targets import DEFAULT_TARGET, TARGETS

if TYPE_CHECKING:
    from hidet_dist.runtime.rendezvous import Rendezvous

_open_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Communicator:
    """A group of ranks, through which the compiled kernels of the thread that it is bound to communicate.

    Use it from one thread at a time. All ranks must make their communicators in the same order.

    Parameters
    ----------
    rank, world_size: int
        This rank, and the number of ranks.
    mesh_shape: tuple[int, ...]
        The devices along each mesh axis; their product is the world size. A rank is the row-major index of its
        coordinate.
    timeout_seconds: float
        How long a collective waits for the other ranks before it fails.
    rendezvous: Rendezvous | None
        The rendezvous of the ranks. Not needed with one rank, which opens no socket.
    target: str
        ``cpu`` or ``cuda``: the memory that buffers of collectives lie in.
    device: int | None
        This rank's CUDA device; ``runtime.cuda.nccl.default_device`` by default.
    stream: int | None
        The CUDA stream of collectives; by default hidet's current stream when each is called.

    Raises
    ------
    ConfigError
        Where the arguments contradict each other, or the mesh differs from that of the other ranks.
    CommunicationError
        Where the connection to the rendezvous store is lost.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        mesh_shape: tuple[int, ...],
        timeout_seconds: float = 60.0,
        rendezvous: Rendezvous | None = None,
        target: str = DEFAULT_TARGET,
        device: int | None = None,
        stream: int | None = None,
    ):
        if math.prod(mesh_shape) != world_size:
            raise ConfigError(
                f"mesh {mesh_shape} has {math.prod(mesh_shape)} devices, but the world size is {world_size}"
            )
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be positive, not {timeout_seconds}")
        if target not in TARGETS:
            raise ConfigError(f"target must be {' or '.join(map(repr, TARGETS))}, not {target!r}")
        self.rank = rank
        self.world_size = world_size
        self.mesh_shape = tuple(mesh_shape)
        self.timeout_seconds = timeout_seconds
        self.stream = stream
        self._rendezvous = rendezvous
        self._name = ""
        self._failures = Failures(self._fail, self._failed)
        self._verdict: Verdict | None = None
        self._reported: Verdict | None = None
        self._handle: int | None = None
        self._owner = Owner()
        self._waits_elsewhere: Callable[[], tuple[int, ...]] = tuple
        self._leader: Communicator | None = None
        self._followers: tuple[Communicator, ...] = ()
        if world_size > 1 and rendezvous is None:
            raise ConfigError(f"a world size of {world_size} needs a rendezvous")
        # A single rank needs no transport.
        self._transport = self._join(rendezvous, target, device) if rendezvous is not None and world_size > 1 else None
        try:
            table = None if self._transport is None else self._transport.table
            self._handle = native.create_communicator(table, self.mesh_shape, rank)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self._transport is not None and self._transport.overlap is not None:
            native.set_overlap(self._handle, self._transport.overlap)
        if rendezvous is not None and world_size > 1:
            rendezvous.heartbeat.watch(self._name, self._progress, self._on_verdict)
        _open_communicators.add(self)

    def lead(self, others: Iterable[Communicator], waits: Callable[[], tuple[int, ...]]) -> None:
        """Lead this rank's other communicators: where one fails, look for the ranks to blame in this one, of all ranks.

        A rank may wait for another one in one communicator, and that for a third in another. A verdict of this
        communicator ends the others, too.

        Parameters
        ----------
        others: iterable of Communicator
            The other communicators of this rank.
        waits: function
            Lists the ranks that this rank's calling thread waits for in one of them, numbered as in this communicator.
        """
        self._waits_elsewhere, self._followers = waits, tuple(others)
        for other in self._followers:
            other._leader = self

    @property
    def peers(self) -> tuple[int, ...]:
        """The global numbers of the ranks in the current or failed collective; none if there is none."""
        handle = self._handle
        return () if handle is None else tuple(self._first_rank + rank for rank in native.peers(handle))

    @property
    def _first_rank(self) -> int:
        return 0 if self._rendezvous is None else self._rendezvous.settings.first_rank

    def _progress(self) -> CollectiveProgress:
        handle = self._handle
        if handle is None:
            return CollectiveProgress(0)
        return CollectiveProgress(native.sequence(handle), native.peers(handle) or self._waits_elsewhere())

    def bind(self) -> None:
        """Make it the calling thread's current communicator, which the thread's collectives use."""
        native.bind(self._open_handle())

    def begin_call(self, call: int) -> None:
        """Set the number of the program's call that further collectives belong to.

        A collective fails where another rank is in a call of a different number.
        """
        native.begin_call(self._open_handle(), call)

    @property
    def sequence(self) -> int:
        """The number of collectives started on the communicator so far."""
        return native.sequence(self._open_handle())

    @property
    def shared_peers(self) -> tuple[int, ...]:
        """The ranks with which messages have been exchanged through shared memory so far."""
        return () if self._transport is None else tuple(self._transport.shared_peers)

    @property
    def shared_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks whose collectives have used shared memory so far."""
        return () if self._transport is None else tuple(self._transport.shared_groups)

    def warm_up(self, groups: Iterable[int]) -> None:
        """Set up the collectives over the mesh and these groups, given as masks of mesh axes, before they are used.

        All ranks must call this with the same groups. On CUDA devices it makes NCCL's communicators, which must exist
        before a stream can be captured; on CPUs it does nothing. Binds the communicator. Raises the errors of
        :meth:`check`, and ``ConfigError`` where NCCL is not set up for the devices.
        """
        self.bind()
        if self._transport is not None:
            self._transport.warm_up(groups)
        self.check()

    def grouped(self) -> AbstractContextManager[None]:
        """Make a context whose messages may proceed at the same time and in any order; their failures are recorded.

        On CUDA devices nothing is sent or received before its end, and :meth:`warm_up` must have been called before.
        """
        return nullcontext() if self._transport is None else self._transport.grouped()

    def wait(self, stream: int | None = None) -> None:
        """Wait for the work on a CUDA stream, by default the communicator's; on CPUs, return at once.

        Binds the communicator. Raises the errors of :meth:`check`. A dead rank is detected within
        ``liveness.SILENCE_SECONDS`` + 2 s, a missing one after the time-out.
        """
        self.bind()
        if self._transport is not None:
            self._transport.wait(stream)
        self.check()

    def wait_event(self, event: int) -> None:
        """Wait for the work before a CUDA event, as :meth:`wait` does for a stream's; on CPUs, return at once."""
        self.bind()
        if self._transport is not None:
            self._transport.wait_event(event)
        self.check()

    def check(self) -> None:
        """Return if all collectives so far have succeeded.

        Once one has failed, raises ``CommunicationError`` with the ranks to blame and the underlying message. Finding
        the ranks to blame takes up to ``liveness.SILENCE_SECONDS`` + 1 s, the first time.
        """
        handle = self._open_handle()
        message = native.error(handle)
        if message is None:
            return
        if self._verdict is None:
            self._verdict = self._find_verdict(handle)
            if self._transport is not None:
                # Only after the verdict is published: ranks that wait for this one see their connections close, and
                # then read the verdict.
                self._transport.close()
        interrupt, self._failures.interrupt = self._failures.interrupt, None
        if interrupt is not None:
            raise interrupt
        verdict, first = self._verdict, self._first_rank
        reporter = "" if verdict.reporter == self.rank else f" (reported by rank {first + verdict.reporter})"
        more = "" if message in verdict.reason or verdict.reason in message else f" {message}"
        if verdict.ranks and self.world_size > 2 and ", waiting for " in more:
            more += ", which may be waiting itself"  # for the ranks to blame, which are named before
        if more and first and " reported that " not in message:
            more += f" (in a group whose rank 0 is global rank {first})"
        raise CommunicationError(
            f"rank {first + self.rank}: collective {native.sequence(handle)} failed: {verdict.reason}{reporter}.{more}",
            tuple(first + rank for rank in verdict.ranks),
        )

    def rely_on(self, files: Iterable[native.MappedFile]) -> None:
        """Fail, instead of sending data computed from these files, once one of them has been changed."""
        for file in files:
            native.rely_on(self._open_handle(), file)

    def give_up(self, reason: str, ranks: tuple[int, ...] | None = None) -> None:
        """Fail because this rank cannot continue, and notify the others. An earlier failure is kept.

        ``ranks`` are those to blame, by their numbers in this communicator; by default this rank.
        """
        if self._handle is None:
            return
        if ranks is not None and self._rendezvous is not None and self.world_size > 1 and not self._failed():
            verdict = Verdict(ranks, reason, self.rank)
            self._reported = liveness.publish(self._rendezvous.failure_store, self._name, verdict)
        self._fail(reason)
        with suppress(CommunicationError):
            self.check()

    def interrupt(self, reason: str) -> None:
        """Fail, from any thread, so that another thread's wait in a collective ends."""
        self._fail(reason)

    def close(self) -> None:
        """Free the communicator. It must not be in use, and threads bound to it must be bound to another one first."""
        if not self._owner.is_this_process:
            self.abandon()
        handle, self._handle = self._handle, None
        if handle is None:
            return
        _open_communicators.discard(self)
        if self._rendezvous is not None and self.world_size > 1:
            self._rendezvous.heartbeat.unwatch(self._name)
        if self._leader is not None and self._leader._rendezvous is not None:
            self._leader._rendezvous.heartbeat.unwatch(self._name)  # so that no verdict is passed on meanwhile
        native.destroy_communicator(handle)
        if self._transport is not None:
            self._transport.close()
            self._transport.destroy()

    def abandon(self) -> None:
        """Leave the communicator to the parent of this process, which owns it. It cannot be used here."""
        _open_communicators.discard(self)
        # Its native part is leaked: freeing it would mark this rank as gone in the shared memory, for all ranks. And
        # the destructors of Gloo's objects wait for threads that do not exist in a forked child.
        keep_forever(self._transport)
        self._handle = self._transport = None
        native.bind(None)  # the thread that forked may have had it bound

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_handle(self) -> int:
        self._owner.check("This communicator", "make one in this process.")
        if self._handle is None:
            raise CommunicationError(f"rank {self.rank}: the communicator is closed")
        return self._handle

    def _join(self, rendezvous: Rendezvous, target: str, device: int | None) -> Transport:
        settings = rendezvous.settings
        if (self.rank, self.world_size) != (settings.rank, settings.world_size):
            raise ConfigError(
                f"the communicator is for rank {self.rank} of {self.world_size}, but this process met the others as "
                f"rank {settings.rank} of {settings.world_size}"
            )
        self._name = rendezvous.next_name()
        try:
            shape = ",".join(map(str, self.mesh_shape))
            agreed = rendezvous.store.compare_set(f"{self._name}/mesh", "", shape).decode()
            if agreed != shape:
                raise ConfigError(f"rank {self.rank} has the mesh ({shape}), but another rank has ({agreed})")
            setup = Setup(rendezvous, self._name, self.mesh_shape, self.timeout_seconds, self._failures)
            return open_transport(target, setup, device, self.stream)
        except RuntimeError as error:
            host = settings.first_rank + settings.host_rank
            raise CommunicationError(f"rank {self.rank} lost the rendezvous store: {error}", (host,)) from error

    def _fail(self, message: str) -> None:
        if self._handle is not None:
            native.fail(self._handle, message)

    def _failed(self) -> bool:
        return self._handle is not None and native.error(self._handle) is not None

    def _on_verdict(self, verdict: Verdict) -> None:
        # Called in the heartbeat's thread. Kept for check(), because the store may be gone by then.
        self._reported = verdict
        self._fail(f"rank {self._first_rank + verdict.reporter} reported that {verdict.reason}")
        for other in self._followers:
            other._on_verdict(verdict.shifted(self._first_rank - other._first_rank))

    def _blame(self, rendezvous: Rendezvous) -> Verdict:
        """Find the ranks that made a collective fail, in the communicator that leads this one if there is any."""
        leader = self._leader
        if leader is None or leader._rendezvous is None:
            return liveness.blame(
                rendezvous.failure_store,
                self._name,
                self.rank,
                self.world_size,
                self._progress(),
                rendezvous.settings.host_rank,
                self._first_rank,
            )
        progress = leader._progress()
        everyone = leader._rendezvous
        found = liveness.blame(
            everyone.failure_store,
            leader._name,
            leader.rank,
            leader.world_size,
            CollectiveProgress(progress.sequence, self.peers),
            everyone.settings.host_rank,
            waits=bool(progress.peers),
        )
        verdict = found.shifted(leader._first_rank - self._first_rank)
        return liveness.publish(rendezvous.failure_store, self._name, verdict)

    def _find_verdict(self, handle: int) -> Verdict:
        if self._rendezvous is None or self._transport is None:
            return Verdict((self.rank,), "a rank without others could not do it", self.rank)
        rendezvous = self._rendezvous
        other = native.out_of_step(handle)
        if self._reported is not None:
            verdict = self._reported
        elif other != native.NOBODY:
            first_verdict = Verdict(tuple(sorted((self.rank, other))), native.error(handle) or "", self.rank)
            verdict = liveness.publish(rendezvous.failure_store, self._name, first_verdict)
        elif self._transport.failed_by_peer:
            verdict = self._blame(rendezvous)
        else:
            reason = f"rank {self._first_rank + self.rank} could not do its part: {native.error(handle)}"
            first_verdict = Verdict((self.rank,), reason, self.rank)
            verdict = liveness.publish(rendezvous.failure_store, self._name, first_verdict)
        if other == native.NOBODY:  # ranks that are out of step are alive, and close normally
            rendezvous.mark_gone(tuple(rank for rank in verdict.ranks if rank != self.rank))
        return verdict


@atexit.register
def _close_all() -> None:
    for communicator in tuple(_open_communicators):
        communicator.close()


def _forked() -> None:
    for communicator in tuple(_open_communicators):
        communicator.abandon()


os.register_at_fork(after_in_child=_forked)
