"""The session: this process's rank and its rendezvous, shared by all communicators of the process.

A session is opened by :func:`init`, or from torchrun's environment variables by the first call that needs one.
"""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hidet_dist.errors import ConfigError
from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.forks import Owner
from hidet_dist.runtime.loading import Loading
from hidet_dist.runtime.members import Members
from hidet_dist.runtime.rendezvous import Rendezvous, Settings, resolve_settings
from hidet_dist.targets import DEFAULT_TARGET

DEFAULT_TIMEOUT_SECONDS = 60.0


class _ProcessSession:
    def __init__(self, settings: Settings):
        self.settings = settings
        self.rendezvous: Rendezvous | None = None
        self.groups: dict[range, Members] = {}
        self.communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self.owner = Owner()

    def meet(self) -> Rendezvous:
        if self.rendezvous is None:
            self.rendezvous = Rendezvous(self.settings)
        return self.rendezvous

    def meet_group(self, ranks: range) -> Rendezvous:
        everyone = self.meet()
        if len(ranks) == self.settings.world_size:
            return everyone
        if ranks not in self.groups:
            self.groups[ranks] = Members(everyone, ranks)
        return self.groups[ranks]

    def close(self) -> None:
        for communicator in tuple(self.communicators):
            communicator.close()
        for group in self.groups.values():
            group.close()
        if self.rendezvous is not None:
            self.rendezvous.close()

    def abandon(self) -> None:
        """Forget the session in a child of ``fork``; its parent goes on with it."""
        for communicator in tuple(self.communicators):
            communicator.abandon()
        for group in self.groups.values():
            group.abandon()
        if self.rendezvous is not None:
            self.rendezvous.abandon()


_session: _ProcessSession | None = None


def init(
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Set this process's rank, the number of ranks, and the address of their store.

    Omitted arguments are read from torchrun's environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. This
    opens no connection: the ranks meet when the first communicator of several ranks is made.

    Parameters
    ----------
    rank, world_size: int | None
        This rank, and the number of ranks.
    master_addr: str | None
        The address that rank 0's store listens on, 127.0.0.1 by default.
    master_port: int | None
        Its TCP port.
    timeout_seconds: float
        How long the ranks wait to meet, and by default how long a collective waits.

    Raises
    ------
    ConfigError
        Where the settings are incomplete or contradict each other, or ``init`` was called before.
    """
    start(resolve_settings(rank, world_size, master_addr, master_port, timeout_seconds))


def start(settings: Settings) -> None:
    """Open a session with these settings, whatever the environment says; otherwise as :func:`init`.

    Raises
    ------
    ConfigError
        Where there is a session already.
    """
    global _session  # noqa: PLW0603 - one process is one rank: this is process-wide by nature
    if _session is not None:
        raise ConfigError("init was called before: call shutdown first")
    _session = _ProcessSession(settings)


@atexit.register
def shutdown() -> None:
    """Close the session's communicators and leave the other ranks. Does nothing without a session."""
    global _session
    session, _session = _session, None
    if session is None:
        return
    if session.owner.is_this_process:
        session.close()
    else:
        session.abandon()


def _forked() -> None:
    """Abandon the session in a forked child process, which may then open another one."""
    global _session
    session, _session = _session, None
    if session is not None:
        session.abandon()


os.register_at_fork(after_in_child=_forked)


def current() -> Settings | None:
    """Return the settings of the session, or ``None`` before ``init`` and the first communicator."""
    return None if _session is None else _session.settings


def meet() -> None:
    """Meet the other ranks, unless there is only one rank or they have met before.

    Raises
    ------
    ConfigError
        When neither ``init`` nor the environment gives this process's rank.
    RendezvousError
        Where the ranks do not all come.
    """
    global _session  # noqa: PLW0603
    _session = _ProcessSession(resolve_settings()) if _session is None else _session
    if _session.settings.world_size > 1:
        _session.meet()


@contextmanager
def loading(identity: Callable[[], str], timeout_seconds: float | None = None) -> Iterator[None]:
    """Run a block that loads artifacts on all ranks: it succeeds on all of them, with the same identity, or on none.

    All ranks enter such blocks in the same order. An error before the ranks :func:`meet` is not reported to the others.

    Parameters
    ----------
    identity: Callable[[], str]
        Called at the end of the block; returns a value that must be the same on all ranks.
    timeout_seconds: float | None
        How long to wait for the others; the session's time-out by default.

    Raises
    ------
    ArtifactError
        Where another rank's identity differs.
    RendezvousError
        Where another rank's block failed, or did not end within the time-out.
    """
    try:
        yield
    except BaseException as error:
        if _session is not None and _session.rendezvous is not None:
            Loading(_session.rendezvous, _session.rendezvous.next_loading()).fail(error)
        raise
    if _session is not None and _session.settings.world_size > 1:
        rendezvous = _session.meet()
        turn = Loading(rendezvous, rendezvous.next_loading())
        turn.finish(identity(), _session.settings.timeout_seconds if timeout_seconds is None else timeout_seconds)


def communicator_for(
    mesh_shape: tuple[int, ...],
    rank: int | None = None,
    timeout_seconds: float | None = None,
    target: str = DEFAULT_TARGET,
    device: int | None = None,
    first_rank: int | None = None,
    stream: int | None = None,
) -> Communicator:
    """Make a communicator for a mesh of all ranks, or of a group of them. Open a session first if there is none.

    All ranks must make their communicators in the same order. The first communicator of several ranks waits for all of
    them to come.

    Parameters
    ----------
    mesh_shape: tuple[int, ...]
        The devices along each mesh axis.
    rank: int | None
        If given, the rank that this process is required to have.
    timeout_seconds: float | None
        How long a collective waits for the other ranks; the session's time-out by default.
    target: str
        One of :data:`hidet_dist.targets.TARGETS`: the memory that buffers of collectives lie in.
    device: int | None
        This rank's CUDA device; ``nccl.default_device`` by default.
    first_rank: int | None
        For a mesh of a group of the ranks, the group's first rank; its other ranks follow without gaps. The
        communicator numbers them from 0.
    stream: int | None
        The CUDA stream of collectives; by default hidet's current stream when each is called.

    Raises
    ------
    ConfigError
        Where the number of ranks differs from the mesh's number of devices, or ``rank`` from this process's rank; no
        socket is opened then. Where the target is ``cuda`` and NCCL or the CUDA driver is missing or too old.
    RendezvousError
        Where the ranks do not all come.
    CommunicationError
        Where the connection to the rendezvous store is lost.
    """
    global _session  # noqa: PLW0603
    session = _ProcessSession(resolve_settings()) if _session is None else _session
    settings = session.settings
    devices = math.prod(mesh_shape)
    ranks = range(settings.world_size) if first_rank is None else range(first_rank, first_rank + devices)
    if devices != len(ranks) or settings.rank not in ranks:
        raise ConfigError(
            f"mesh {tuple(mesh_shape)} needs {devices} processes, but the world size is {settings.world_size}: "
            f"launch it with `python -m hidet_dist.launch -n {devices}` or torchrun"
        )
    if rank is not None and rank != settings.rank:
        raise ConfigError(f"rank {rank} was asked for, but this process is rank {settings.rank}")
    timeout = settings.timeout_seconds if timeout_seconds is None else timeout_seconds
    # Set before the ranks meet, so that shutdown closes whatever was opened.
    _session = session
    rendezvous = session.meet_group(ranks) if devices > 1 else None
    communicator = Communicator(
        settings.rank - ranks.start, devices, tuple(mesh_shape), timeout, rendezvous, target, device, stream
    )
    session.communicators.add(communicator)
    return communicator
