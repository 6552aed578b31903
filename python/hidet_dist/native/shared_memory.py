"""The native library's transport between ranks of one host, through shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from hidet_dist.native.codes import OK
from hidet_dist.native.library import library
from hidet_dist.native.signatures import ConnectFunction, TransportTable


class SharedMemory:
    """The native transport between ranks of one host; see shared_memory.h.

    Parameters
    ----------
    fallback: Transport
        The transport for the groups and peers that are delegated to it.
    connect, connect_peer: Callable[[int], int]
        Called with a group's mask, or another rank, when it is first used; attaches or delegates it and returns 0.
        Must not raise.
    rank, ranks: int
        This rank, and the number of ranks of the mesh.
    timeout_seconds: float
        How long a collective waits for another rank.
    """

    def __init__(
        self,
        fallback: TransportTable,
        connect: Callable[[int], int],
        connect_peer: Callable[[int], int],
        rank: int,
        ranks: int,
        timeout_seconds: float,
    ):
        self._fallback = fallback
        self._connect = ConnectFunction(connect), ConnectFunction(connect_peer)
        self._handle = library().hidet_dist_shm_create(
            ctypes.byref(fallback), *self._connect, rank, ranks, timeout_seconds
        )
        if not self._handle:
            raise ValueError(f"no shared-memory transport with a time-out of {timeout_seconds} s")
        self.table = TransportTable()
        library().hidet_dist_shm_table(self._handle, ctypes.byref(self.table))

    @staticmethod
    def segment(ranks: int) -> int:
        """Make a segment for a group of ``ranks`` ranks. Returns its file descriptor, or -1 if the system refuses."""
        return int(library().hidet_dist_shm_segment(ranks))

    def attach(self, group: int, descriptor: int, group_rank: int, ranks: int) -> bool:
        """Route a group through a segment, in which this rank is ``group_rank``. Returns False if it cannot be used."""
        return bool(library().hidet_dist_shm_attach(self._handle, group, descriptor, group_rank, ranks) == OK)

    def delegate(self, group: int) -> None:
        """Route a group to the fallback."""
        library().hidet_dist_shm_delegate(self._handle, group)

    def inbox(self) -> int:
        """Return the file descriptor of this rank's inbox, which stays open, or -1 if the system refuses one."""
        return int(library().hidet_dist_shm_inbox(self._handle))

    def attach_peer(self, rank: int, descriptor: int) -> bool:
        """Exchange messages with a rank through inboxes, given that rank's. Returns False if it cannot be used."""
        return bool(library().hidet_dist_shm_attach_peer(self._handle, rank, descriptor) == OK)

    def delegate_peer(self, rank: int) -> None:
        """Route messages from and to a rank to the fallback."""
        library().hidet_dist_shm_delegate_peer(self._handle, rank)

    @property
    def failed_by_peer(self) -> bool:
        """True if a collective failed because of another rank."""
        return bool(library().hidet_dist_shm_failed_by_peer(self._handle))

    def close(self) -> None:
        """Fail the collectives of other ranks that wait for this one."""
        library().hidet_dist_shm_close(self._handle)

    def destroy(self) -> None:
        """Free the transport, which no communicator may use any more."""
        handle, self._handle = self._handle, None
        if handle is not None:
            library().hidet_dist_shm_destroy(handle)
