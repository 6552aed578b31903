"""Collective loading: either all ranks load the same artifacts, or all learn which rank did not, and why."""

from __future__ import annotations

import json

from hidet_dist.errors import ArtifactError, RendezvousError
from hidet_dist.runtime.meeting import PeerError, await_ranks
from hidet_dist.runtime.rendezvous import Rendezvous

_FAILED = "failed"


class Loading:
    """One collective loading. All ranks do theirs in the same order.

    Parameters
    ----------
    rendezvous: Rendezvous
        The ranks, met.
    name: str
        The turn's, the same on all ranks and of no other turn.
    """

    def __init__(self, rendezvous: Rendezvous, name: str):
        self._store = rendezvous.store.prefixed(name)
        self._rendezvous = rendezvous
        self._rank = rendezvous.settings.rank
        self._world_size = rendezvous.settings.world_size

    def fail(self, error: BaseException) -> None:
        """Notify the other ranks that this one has not loaded its part, if they can be reached."""
        try:
            self._say(f"{type(error).__name__}: {error}", "")
            self._store.set(_FAILED, "")
        except RuntimeError:
            return

    def finish(self, identity: str, timeout_seconds: float) -> None:
        """Return once all ranks have loaded the artifacts of this identity.

        Raises
        ------
        ArtifactError
            When another rank has loaded artifacts of another identity.
        RendezvousError
            When another rank failed to load its part, is gone, or has not loaded it in time.
        """
        keys = {rank: str(rank) for rank in range(self._world_size)}
        try:
            self._say("", identity)
            problem = ""
            try:
                await_ranks(
                    self._store,
                    self._rendezvous.store,
                    keys,
                    timeout_seconds,
                    lambda: self._store.check([_FAILED]),
                )
            except PeerError as error:
                problem = str(error)
            said = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        except RuntimeError as error:
            host = self._rendezvous.settings.host_rank
            raise RendezvousError(
                f"rank {self._rank} lost the rendezvous store, which rank {host} hosts, on loading: {error}"
            ) from error
        for rank, (reason, _) in said.items():
            if reason:
                raise RendezvousError(f"rank {rank} could not load its part of the program: {reason}")
        if problem:
            raise RendezvousError(f"rank {self._rank} waited for the others to load their parts: {problem}")
        for rank, (_, other) in said.items():
            if other != identity:
                raise ArtifactError(
                    f"rank {rank} has loaded other artifacts ({other[:12]}) than rank {self._rank} ({identity[:12]}): "
                    "give all ranks the same build, and load it again if it was replaced meanwhile."
                )

    def _say(self, error: str, identity: str) -> None:
        self._store.set(str(self._rank), json.dumps([error, identity]))
