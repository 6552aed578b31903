"""The threads of CPU kernels: their number, and how they wait for work."""

from __future__ import annotations

import ctypes
import functools
import os

# Serving processes share the cores. By default OpenMP's idle threads spin for a while, which takes cores from others.
_WAIT_POLICY = "OMP_WAIT_POLICY"  # OpenMP 4.0, section 4.7
_THREADS = "OMP_NUM_THREADS"
_LIBRARY = "libgomp.so.1"  # GCC's OpenMP, which kernels are linked with
_PAUSE_SOFT = 1  # omp_pause_soft: OpenMP 5.0, section 3.2.44


def wait_without_spinning() -> None:
    """Make idle OpenMP threads sleep, and divide the cores among this host's ranks (LOCAL_WORLD_SIZE).

    Sets OpenMP's environment variables where they are not set. Takes effect if OpenMP's library is not loaded yet.
    """
    os.environ.setdefault(_WAIT_POLICY, "passive")
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:
        os.environ.setdefault(_THREADS, str(max(1, len(os.sched_getaffinity(0)) // int(ranks))))


@functools.cache
def end_threads_before_forks() -> None:
    """Register a hook that ends the forking thread's OpenMP threads before each fork; its next kernel starts new ones.

    A child inherits the forking thread's record of its OpenMP threads, but not the threads. The first kernel that the
    child ran would wait for them forever.
    """
    os.register_at_fork(before=_end_threads)


def _end_threads() -> None:
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return  # no kernel was loaded that uses it
    library.omp_pause_resource_all(_PAUSE_SOFT)
