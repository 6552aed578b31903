"""The transport of CPU ranks: shared memory within a host, and another transport for groups that span hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from hidet_dist import native
from hidet_dist.files import parse_json
from hidet_dist.runtime.meeting import await_ranks
from hidet_dist.runtime.mesh_groups import group_ranks
from hidet_dist.runtime.transports.base import Blocking, Setup, Transport


class SharedMemoryTransport(Blocking):
    """The implementation of a communicator's collectives between processes on CPUs by shared memory.

    When a group of ranks is first used, one of them makes a segment, and the others try to open it. If one of them
    cannot, all of them use the fallback for this group. Two ranks try to open each other's inbox when they first
    exchange messages.

    Parameters
    ----------
    setup: Setup
        The common arguments of transports.
    open_fallback: Callable[[], Transport]
        Opens the transport of ranks that cannot share memory; called at most once, when it is first needed.
    is_shared: bool
        Whether memory may be shared; if not, everything goes through the fallback, which is opened at once.
    """

    def __init__(self, setup: Setup, open_fallback: Callable[[], Transport], is_shared: bool = True):
        self._is_shared = is_shared
        self._open_fallback = open_fallback
        self._fallback: Transport | None = None
        self._setup = setup
        self._rank = setup.rendezvous.settings.rank
        self._shared = native.SharedMemory(
            native.deferred_transport(lambda: self._opened_fallback().table),
            self._recorded(self._meet),
            self._recorded(self._meet_peer),
            self._rank,
            setup.rendezvous.settings.world_size,
            setup.timeout_seconds,
        )
        self.shared_groups: list[tuple[int, ...]] = []
        self.shared_peers: list[int] = []
        if not is_shared:
            self._opened_fallback()

    @property
    def table(self) -> native.TransportTable:
        """The functions that the native library calls."""
        return self._shared.table

    @property
    def failed_by_peer(self) -> bool:
        """True if a collective failed because of another rank."""
        return self._setup.failures.by_peer or self._shared.failed_by_peer

    def close(self) -> None:
        """Close this rank's connections. Collectives of other ranks that wait for this one fail then."""
        self._shared.close()
        if self._fallback is not None:
            self._fallback.close()

    def destroy(self) -> None:
        """Free native resources, after the communicator has been destroyed."""
        self._shared.destroy()

    def _opened_fallback(self) -> Transport:
        if self._fallback is None:
            self._fallback = self._open_fallback()
        return self._fallback

    def _recorded(self, meet: Callable[[int], None]) -> Callable[[int], int]:
        return lambda group_or_rank: self._setup.failures.record(lambda: meet(group_or_rank))

    def _meet(self, group: int) -> None:
        ranks = group_ranks(self._setup.mesh_shape, self._rank, group)
        beats = self._setup.rendezvous.store
        store = beats.prefixed(f"{self._setup.name}/shared/" + ",".join(map(str, ranks)))

        def wait(keys: dict[int, str]) -> None:
            await_ranks(store, beats, keys, self._setup.timeout_seconds, self._setup.failures.failed)

        segment = native.SharedMemory.segment(len(ranks)) if self._is_shared and self._rank == ranks[0] else -1
        try:
            if self._rank == ranks[0]:
                store.set("segment", _file(segment))
            wait({ranks[0]: "segment"})
            group_rank = ranks.index(self._rank)
            attached = self._is_shared and _with_file(
                store.get("segment"), lambda descriptor: self._shared.attach(group, descriptor, group_rank, len(ranks))
            )
            store.set(f"attached/{self._rank}", "yes" if attached else "no")
            wait({rank: f"attached/{rank}" for rank in ranks})
        finally:
            if segment >= 0:
                os.close(segment)
        if all(store.get(f"attached/{rank}") == b"yes" for rank in ranks):
            self.shared_groups.append(ranks)
        else:
            self._opened_fallback()
            self._shared.delegate(group)

    def _meet_peer(self, peer: int) -> None:
        pair = sorted((self._rank, peer))
        beats = self._setup.rendezvous.store
        store = beats.prefixed(f"{self._setup.name}/messages/{pair[0]},{pair[1]}")

        def wait(key: str) -> bytes:
            await_ranks(store, beats, {peer: key}, self._setup.timeout_seconds, self._setup.failures.failed)
            return store.get(key)

        inbox = self._shared.inbox() if self._is_shared else -1
        store.set(f"inbox/{self._rank}", _file(inbox))
        peer_inbox = wait(f"inbox/{peer}")
        attached = inbox >= 0 and _with_file(peer_inbox, lambda descriptor: self._shared.attach_peer(peer, descriptor))
        store.set(f"attached/{self._rank}", "yes" if attached else "no")
        if wait(f"attached/{peer}") == b"yes" and attached:
            self.shared_peers.append(peer)
        else:
            self._opened_fallback()
            self._shared.delegate_peer(peer)


def open_within_hosts(setup: Setup) -> Transport:
    """Open the transport of shared memory within a host, and of Gloo across hosts."""
    return SharedMemoryTransport(setup, lambda: _open_gloo(setup))


def open_gloo_alone(setup: Setup) -> Transport:
    """Open the transport of Gloo, within a host, too. Ranks may meet others with :func:`open_within_hosts`."""
    return SharedMemoryTransport(setup, lambda: _open_gloo(setup), is_shared=False)


def _open_gloo(setup: Setup) -> Transport:
    # PyTorch, which contains Gloo, takes a second to import: do so only when a group needs it.
    from hidet_dist.runtime.transports.gloo import GlooTransport

    return GlooTransport(setup)


def _file(descriptor: int) -> str:
    """Describe a file of this process, so that other processes of the host can open it."""
    return json.dumps({"host": _host(), "process": os.getpid(), "descriptor": descriptor})


def _with_file(where: bytes, use: Callable[[int], bool]) -> bool:
    """Call ``use`` with a descriptor of another process's file; False where it cannot be opened."""
    file = parse_json(where)
    if file["descriptor"] < 0 or file["host"] != _host():
        return False
    try:
        # The file has no name; another process of the same user can open it under this path.
        descriptor = os.open(f"/proc/{int(file['process'])}/fd/{int(file['descriptor'])}", os.O_RDWR)
    except OSError:
        return False
    try:
        return use(descriptor)
    finally:
        os.close(descriptor)


def _host() -> str:
    """Return a text that is the same exactly for processes of one host that share a namespace of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
