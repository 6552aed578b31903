"""Groups of ranks, such as those of one stage, each with a separate rendezvous."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hidet_dist.runtime.liveness import Heartbeat
from hidet_dist.runtime.rendezvous import Rendezvous


class Members(Rendezvous):
    """The ranks of one group, numbered from 0 within the group. They use the store of all ranks.

    What becomes of one group's communicators, another group does not hear of.

    Parameters
    ----------
    everyone: Rendezvous
        All ranks, met.
    ranks: range
        The group's ranks among them, this process's included.
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
        """A name for the group's next communicator, which no other group has."""
        return f"{self._group}-communicator{next(self._group_names)}"

    def mark_gone(self, ranks: tuple[int, ...]) -> None:
        """Do not wait long for these ranks of the group at the end."""
        self._everyone.mark_gone(tuple(self._ranks[rank] for rank in ranks))

    def close(self) -> None:
        """End the group's heartbeat; the rendezvous of all goes on."""
        self.heartbeat.stop()
        self._beats.close()

    def abandon(self) -> None:
        """Close this process's copies of the connections, which belong to its parent."""
        self._beats.abandon()
