"""Collective loading: all ranks load the same artifacts, or each raises an error that names the rank that did not."""

from __future__ import annotations

import json

from hidet_dist.errors import ArtifactError, RendezvousError
from hidet_dist.files import parse_json
from hidet_dist.runtime.meeting import PeerError, await_ranks
from hidet_dist.runtime.rendezvous import Rendezvous

_FAILED = "failed"


class Loading:
    """One collective loading. All ranks take part in their loadings in the same order.

    Parameters
    ----------
    rendezvous: Rendezvous
        The rendezvous of the ranks.
    name: str
        The name of this loading: the same on all ranks, and unlike that of any other loading.
    """

    def __init__(self, rendezvous: Rendezvous, name: str):
        self._store = rendezvous.store.prefixed(name)
        self._rendezvous = rendezvous
        self._rank = rendezvous.settings.rank
        self._world_size = rendezvous.settings.world_size

    def fail(self, error: BaseException) -> None:
        """Notify the other ranks that this one has not loaded its part, if they can be reached."""
        try:
            self._report(f"{type(error).__name__}: {error}", "")
            self._store.set(_FAILED, "")
        except RuntimeError:
            return

    def finish(self, identity: str, timeout_seconds: float) -> None:
        """Wait until all ranks have loaded the artifacts of this identity.

        Raises
        ------
        ArtifactError
            When another rank has loaded artifacts of another identity.
        RendezvousError
            When another rank failed to load its part, is gone, or has not loaded it in time.
        """
        keys = {rank: str(rank) for rank in range(self._world_size)}
        try:
            self._report("", identity)
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
            results = {rank: parse_json(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        except RuntimeError as error:
            settings = self._rendezvous.settings
            host = settings.first_rank + settings.host_rank
            raise RendezvousError(
                f"rank {self._rank} lost the rendezvous store, which rank {host} hosts, while loading: {error}"
            ) from error
        for rank, (reason, _) in results.items():
            if reason:
                raise RendezvousError(f"rank {rank} could not load its part of the program: {reason}")
        if problem:
            raise RendezvousError(f"rank {self._rank} waited for the others to load their parts: {problem}")
        for rank, (_, other) in results.items():
            if other != identity:
                raise ArtifactError(
                    f"rank {rank} has loaded other artifacts ({other[:12]}) than rank {self._rank} ({identity[:12]}): "
                    "give all ranks the same build, and load again if the artifacts were replaced meanwhile."
                )

    def _report(self, error: str, identity: str) -> None:
        self._store.set(str(self._rank), json.dumps([error, identity]))
