"""Groups of ranks, such as those of one stage, each with a separate rendezvous."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hidet_dist.runtime.liveness import Heartbeat
from hidet_dist.runtime.rendezvous import Rendezvous


class Members(Rendezvous):
    """The rendezvous of one group of ranks, numbered from 0 within the group, in the store of all ranks.

    A failure in one group's communicators is not reported to other groups.

    Parameters
    ----------
    everyone: Rendezvous
        The rendezvous of all ranks.
    ranks: range
        The group's ranks, including this process's.
    """

    def __init__(self, everyone: Rendezvous, ranks: range):
        self._everyone = everyone
        self._ranks = ranks
        self._group = f"ranks{ranks.start}to{ranks.stop}"
        self._group_names = itertools.count()
        settings = everyone.settings
        self.settings = replace(
            settings, rank=settings.rank - ranks.start, world_size=len(ranks), first_rank=ranks.start
        )
        self.address, self.port = everyone.address, everyone.port
        self.store = everyone.store.prefixed(self._group)
        self.failure_store = everyone.failure_store.prefixed(self._group)
        self._beats = everyone.failure_store.clone().prefixed(self._group)
        self.heartbeat = Heartbeat(self._beats, self.settings.rank)
        self.heartbeat.start()

    def next_name(self) -> str:
        """Return a name for the group's next communicator, unique among all groups."""
        return f"{self._group}-communicator{next(self._group_names)}"

    def mark_gone(self, ranks: tuple[int, ...]) -> None:
        """Do not wait for these ranks of the group when the rendezvous closes."""
        self._everyone.mark_gone(tuple(self._ranks.start + rank for rank in ranks))

    def close(self) -> None:
        """Stop the group's heartbeat; the rendezvous of all ranks remains open."""
        self.heartbeat.stop()
        self._beats.close()

    def abandon(self) -> None:
        """Close this process's copies of the connections, which belong to its parent."""
        self._beats.abandon()
