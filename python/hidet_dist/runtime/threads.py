"""The threads of CPU kernels: their number, and how they wait for work."""

from __future__ import annotations

import ctypes
import functools
import os

# Serving processes share the cores. By default OpenMP's idle threads spin for a while, which keeps others from work.
_WAIT_POLICY = "OMP_WAIT_POLICY"  # OpenMP 4.0, section 4.7
_THREADS = "OMP_NUM_THREADS"
_LIBRARY = "libgomp.so.1"  # GCC's OpenMP, which kernels are linked with
_PAUSE_SOFT = 1  # omp_pause_soft: OpenMP 5.0, section 3.2.44


def wait_without_spinning() -> None:
    """Make idle threads sleep, and share the cores among the ranks of this host, unless the environment says otherwise.

    Takes effect if OpenMP's library is not loaded yet. How many ranks there are is LOCAL_WORLD_SIZE.
    """
    os.environ.setdefault(_WAIT_POLICY, "passive")
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:
        os.environ.setdefault(_THREADS, str(max(1, len(os.sched_getaffinity(0)) // int(ranks))))


@functools.cache
def end_threads_before_forks() -> None:
    """Before this process forks, end the OpenMP threads of the thread that does so; its next kernel starts new ones.

    A child has the forking thread's record of its OpenMP threads, but not the threads: the first kernel that it runs,
    of a partition of its own, would wait for them forever.
    """
    os.register_at_fork(before=_end_threads)


def _end_threads() -> None:
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return  # no kernel was loaded that uses it
    library.omp_pause_resource_all(_PAUSE_SOFT)
