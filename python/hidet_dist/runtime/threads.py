"""The threads of CPU kernels: their number, and how they wait for work."""

from __future__ import annotations

import ctypes
import functools
import os

_WAIT_POLICY = "OMP_WAIT_POLICY"  # OpenMP 4.0, section 4.7
_THREADS = "OMP_NUM_THREADS"
_SPIN_COUNT = "GOMP_SPINCOUNT"  # of GCC's OpenMP: how often an idle thread looks for work before it sleeps
# A fifth of a millisecond: as long as what one thread computes between kernels of several. A thread that sleeps in
# between takes tens of microseconds to wake: a tenth of the time of a network of 50 convolutions. Where other processes
# want the cores, a thread that spins keeps the one that it waits for from running. Such a network takes as long then as
# in runtimes that spin; and four times as long with ten times as many looks, which save 0.05 where it is alone.
_LOOKS = "10000"
_LIBRARY = "libgomp.so.1"  # GCC's OpenMP, which kernels are linked with
_PAUSE_SOFT = 1  # omp_pause_soft: OpenMP 5.0, section 3.2.44


def wait_briefly() -> None:
    """Make idle OpenMP threads look for work for a while before they sleep, and divide the cores among ranks.

    Sets OpenMP's environment variables where neither they nor the policy of waiting are set, and the number of threads
    by this host's ranks (LOCAL_WORLD_SIZE). OpenMP spins for less where there are more threads than cores. Takes effect
    if OpenMP's library is not loaded yet.
    """
    if _WAIT_POLICY not in os.environ:
        os.environ.setdefault(_SPIN_COUNT, _LOOKS)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:
        divide_cores(int(ranks))


def divide_cores(ranks: int) -> None:
    """Have kernels of this process run on as many threads as a rank's part of the cores, unless a number is set.

    Takes effect if OpenMP's library is not loaded yet.
    """
    os.environ.setdefault(_THREADS, str(max(1, len(os.sched_getaffinity(0)) // ranks)))


@functools.cache
def end_threads_before_forks() -> None:
    """Register a hook that ends the forking thread's OpenMP threads before each fork; its next kernel starts new ones.

    A child inherits the forking thread's record of its OpenMP threads, but not the threads. The first kernel that the
    child ran would wait for them forever.
    """
    os.register_at_fork(before=end_threads)


def keep_loaded() -> None:
    """Keep OpenMP's library loaded for the life of the process, if it is loaded: its threads run its code.

    Otherwise it is unloaded with the last kernel that depends on it, and a thread that wakes up then crashes.
    """
    _opened(os.RTLD_NODELETE)


def end_threads() -> None:
    """End the OpenMP threads that kernels of the calling thread have started; its next kernel starts new ones.

    OpenMP has threads for each thread that calls kernels. Those of one that calls none any more count among those that
    run: if these are more than the cores, idle threads of the others do not spin.
    """
    library = _opened()
    if library is not None:
        library.omp_pause_resource_all(_PAUSE_SOFT)


def most_threads() -> int:
    """Return the number of threads of the calling thread's next kernel; 1 if no kernel was loaded that uses OpenMP."""
    library = _opened()
    return 1 if library is None else int(library.omp_get_max_threads())


def set_threads(count: int) -> None:
    """Have the kernels that the calling thread starts from now on run on this many threads."""
    library = _opened()
    if library is not None:
        library.omp_set_num_threads(count)


def _opened(mode: int = 0) -> ctypes.CDLL | None:
    """Open OpenMP's library if it is loaded; None if no kernel was loaded that uses it."""
    try:
        return ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW | mode)
    except OSError:
        return None
