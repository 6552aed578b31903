"""Time limits of ranks in tests, and waiting for the failures of other ranks instead of for a fixed time."""

from __future__ import annotations

import time

from hidet_dist.runtime.communicator import Communicator
from hidet_dist.runtime.liveness import verdict_key

MAX_SECONDS = 60.0
"""The longest time, in seconds, for a scenario."""

LONG_SECONDS = 50.0
"""A time-out of collectives that never passes where something else ends the wait."""

SHORT_SECONDS = 3.0
"""One that is to pass: long enough for what comes before."""


def until_blamed(comm: Communicator) -> None:
    """Return once a rank has found out why the communicator failed, or when the scenario's time is up."""
    assert comm._rendezvous is not None
    store, key = comm._rendezvous.failure_store, verdict_key(comm._name)
    deadline = time.monotonic() + MAX_SECONDS
    while not store.check([key]) and time.monotonic() < deadline:
        time.sleep(0.05)
