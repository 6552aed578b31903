"""Waiting for keys of other ranks in the rendezvous store, with detection of dead ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hidet_dist.runtime.liveness import ActiveTime, SilenceWatch

if TYPE_CHECKING:
    from hidet_dist.runtime.store import Store

_POLL_SECONDS = 0.002


class PeerError(RuntimeError):
    """Another rank is missing or gone, as far as this rank can tell."""


def await_ranks(
    store: Store,
    beats: Store,
    keys: Mapping[int, str],
    timeout_seconds: float,
    failed: Callable[[], bool],
) -> None:
    """Wait until all keys are in the store.

    Parameters
    ----------
    store: Store
        The store for the keys.
    beats: Store
        The store with the ranks' heartbeats.
    keys: Mapping[int, str]
        The key that each rank will set.
    timeout_seconds: float
        How long to wait, in seconds of :class:`ActiveTime`.
    failed: Callable[[], bool]
        Whether the communicator has failed for another reason, so that waiting is useless.

    Raises
    ------
    PeerError
        Where a rank is gone, or has not set its key in time.
    """
    active = ActiveTime()
    watch: SilenceWatch | None = None
    next_look = 1.0
    while not store.check(list(keys.values())):
        time.sleep(_POLL_SECONDS)
        now = active.seconds()
        if failed():
            raise PeerError("the communicator failed meanwhile")
        if now < min(next_look, timeout_seconds):
            continue
        next_look = now + 0.5
        missing = tuple(rank for rank, key in keys.items() if not store.check([key]))
        if watch is None:
            watch = SilenceWatch(beats, tuple(keys))
        gone = watch.gone(missing)
        if gone:
            raise PeerError(f"rank {', '.join(map(str, gone))} is gone")
        if missing and now >= timeout_seconds:
            raise PeerError(f"timed out after {timeout_seconds:g} s, waiting for rank {', '.join(map(str, missing))}")
