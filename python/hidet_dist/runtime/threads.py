"""How many threads CPU kernels use, and how they wait for work."""

from __future__ import annotations

import os

# Serving processes share the cores. By default OpenMP's idle threads spin for a while, which keeps others from work.
_WAIT_POLICY = "OMP_WAIT_POLICY"  # OpenMP 4.0, section 4.7
_THREADS = "OMP_NUM_THREADS"


def wait_without_spinning() -> None:
    """Make idle threads sleep, and share the cores among the ranks of this host, unless the environment says otherwise.

    Takes effect if OpenMP's library is not loaded yet. How many ranks there are is LOCAL_WORLD_SIZE.
    """
    os.environ.setdefault(_WAIT_POLICY, "passive")
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:
        os.environ.setdefault(_THREADS, str(max(1, len(os.sched_getaffinity(0)) // int(ranks))))
