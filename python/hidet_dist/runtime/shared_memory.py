"""The transport of CPU ranks: shared memory within a host, and Gloo for groups that span hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hidet_dist.errors import ConfigError
from hidet_dist.runtime import native
from hidet_dist.runtime.meeting import await_ranks
from hidet_dist.runtime.mesh_groups import group_ranks
from hidet_dist.runtime.rendezvous import Rendezvous

if TYPE_CHECKING:
    from hidet_dist.runtime.gloo import GlooTransport

VARIABLE = "HIDET_DIST_TRANSPORT"
"""The environment variable that chooses: ``auto``, the default, or ``gloo`` for Gloo within a host as well."""


class CpuTransport:
    """Carries out a communicator's collectives between processes on CPUs.

    Ranks find out whether they can share memory when a group is first used: one of them makes a segment, and the others
    try to open it. Where one of them cannot, all of them use Gloo for this group. Two ranks that exchange messages try
    to open each other's inbox when they do so for the first time.

    Parameters
    ----------
    rendezvous: Rendezvous
        The ranks, met.
    name: str
        The communicator's, the same on all ranks and on no other communicator.
    mesh_shape: tuple[int, ...]
        The mesh of all ranks.
    timeout_seconds: float
        How long a collective waits for the other ranks.
    fail: Callable[[str], None]
        Records why a collective failed.
    failed: Callable[[], bool]
        Whether the communicator has failed meanwhile, for another reason.

    Raises
    ------
    ConfigError
        Where HIDET_DIST_TRANSPORT names no transport.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        name: str,
        mesh_shape: tuple[int, ...],
        timeout_seconds: float,
        fail: Callable[[str], None],
        failed: Callable[[], bool],
    ):
        choice = os.environ.get(VARIABLE, "auto")
        if choice not in ("auto", "gloo"):
            raise ConfigError(f"{VARIABLE} must be 'auto' or 'gloo', not {choice!r}")
        self._shares = choice == "auto"
        self._gloo: GlooTransport | None = None
        settings = rendezvous.settings
        self._shared = native.SharedMemory(
            # PyTorch, which Gloo comes with, takes a second to import: not before a group needs it.
            native.deferred_transport(lambda: self._open_gloo().table),
            self._guarded(self._meet),
            self._guarded(self._meet_peer),
            settings.rank,
            settings.world_size,
            timeout_seconds,
        )
        self._failed_to_meet = False
        self._rendezvous = rendezvous
        self._rank = rendezvous.settings.rank
        self._name = name
        self._mesh_shape = mesh_shape
        self._timeout_seconds = timeout_seconds
        self._fail = fail
        self._failed = failed
        self._interrupt: BaseException | None = None
        self.shared_groups: list[tuple[int, ...]] = []
        """The groups whose collectives go through shared memory, so far."""
        self.shared_peers: list[int] = []
        """The ranks that messages are exchanged with through shared memory, so far."""
        if not self._shares:
            self._open_gloo()

    @property
    def table(self) -> native.Transport:
        """What the native library calls."""
        return self._shared.table

    @property
    def failed_by_peer(self) -> bool:
        """Whether a collective failed because of another rank."""
        others = self._gloo is not None and self._gloo.failed_by_peer
        return self._failed_to_meet or self._shared.failed_by_peer or others

    @property
    def interrupt(self) -> BaseException | None:
        """What interrupted a collective from outside, such as KeyboardInterrupt."""
        return self._interrupt if self._gloo is None else self._interrupt or self._gloo.interrupt

    @interrupt.setter
    def interrupt(self, value: BaseException | None) -> None:
        self._interrupt = value
        if self._gloo is not None:
            self._gloo.interrupt = value

    def warm_up(self, groups: Iterable[int]) -> None:
        """Do nothing: groups meet when they are first used."""

    def wait(self, stream: int | None = None) -> None:
        """Do nothing: a collective that has returned is over."""

    def close(self) -> None:
        """Close this rank's ends, at which collectives that wait for this rank fail on the other ranks."""
        self._shared.close()
        if self._gloo is not None:
            self._gloo.close()

    def destroy(self) -> None:
        """Free it, once its communicator has been destroyed."""
        self._shared.destroy()

    def _open_gloo(self) -> GlooTransport:
        if self._gloo is None:
            from hidet_dist.runtime.gloo import GlooTransport

            self._gloo = GlooTransport(
                self._rendezvous, self._name, self._mesh_shape, self._timeout_seconds, self._fail, self._failed
            )
        return self._gloo

    def _guarded(self, meet: Callable[[int], None]) -> Callable[[int], int]:
        return lambda who: native.answer(lambda: meet(who), self._fail, self._blame_peer, self._interrupted)

    def _blame_peer(self) -> None:
        self._failed_to_meet = True

    def _interrupted(self, error: BaseException) -> None:
        self.interrupt = error

    def _meet(self, group: int) -> None:
        ranks = group_ranks(self._mesh_shape, self._rank, group)
        store = self._rendezvous.store.prefixed(f"{self._name}/shared/" + ",".join(map(str, ranks)))

        def wait(keys: dict[int, str]) -> None:
            await_ranks(store, self._rendezvous.store, keys, self._timeout_seconds, self._failed)

        own = native.SharedMemory.segment(len(ranks)) if self._shares and self._rank == ranks[0] else -1
        try:
            if self._rank == ranks[0]:
                store.set("segment", _file(own))
            wait({ranks[0]: "segment"})
            place = ranks.index(self._rank)
            attached = self._shares and _with_file(
                store.get("segment"), lambda descriptor: self._shared.attach(group, descriptor, place, len(ranks))
            )
            store.set(f"attached/{self._rank}", "yes" if attached else "no")
            wait({rank: f"attached/{rank}" for rank in ranks})
        finally:
            if own >= 0:
                os.close(own)
        if all(store.get(f"attached/{rank}") == b"yes" for rank in ranks):
            self.shared_groups.append(ranks)
        else:
            self._open_gloo()
            self._shared.delegate(group)

    def _meet_peer(self, peer: int) -> None:
        pair = sorted((self._rank, peer))
        store = self._rendezvous.store.prefixed(f"{self._name}/messages/{pair[0]},{pair[1]}")

        def wait(key: str) -> bytes:
            await_ranks(store, self._rendezvous.store, {peer: key}, self._timeout_seconds, self._failed)
            return store.get(key)

        own = self._shared.inbox() if self._shares else -1
        store.set(f"inbox/{self._rank}", _file(own))
        inbox = wait(f"inbox/{peer}")
        attached = own >= 0 and _with_file(inbox, lambda descriptor: self._shared.attach_peer(peer, descriptor))
        store.set(f"attached/{self._rank}", "yes" if attached else "no")
        if wait(f"attached/{peer}") == b"yes" and attached:
            self.shared_peers.append(peer)
        else:
            self._open_gloo()
            self._shared.delegate_peer(peer)


def _file(descriptor: int) -> str:
    """Tells other processes of the same host where this one's file is."""
    return json.dumps({"host": _host(), "process": os.getpid(), "descriptor": descriptor})


def _with_file(where: bytes, use: Callable[[int], bool]) -> bool:
    """What ``use`` returns, given a descriptor of another process's file; False where it cannot be opened."""
    place = json.loads(where)
    if place["descriptor"] < 0 or place["host"] != _host():
        return False
    try:
        # The file has no name: this is how another process of the same user gets at it.
        descriptor = os.open(f"/proc/{int(place['process'])}/fd/{int(place['descriptor'])}", os.O_RDWR)
    except OSError:
        return False
    try:
        return use(descriptor)
    finally:
        os.close(descriptor)


def _host() -> str:
    """The same for processes that see each other under the same process numbers, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
