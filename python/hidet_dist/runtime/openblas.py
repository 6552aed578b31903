"""OpenBLAS from the scipy-openblas32 package, which the CPU target's matrix products call."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path

from hidet_dist.errors import HidetDistError

NAME = "openblas"
_THREADS = "OPENBLAS_NUM_THREADS"


def openblas_dir() -> Path:
    """Find the folder with OpenBLAS's ``include`` and ``lib``. Raises HidetDistError if it is missing."""
    module = importlib.util.find_spec("scipy_openblas32")
    if module is None or not module.submodule_search_locations:
        raise HidetDistError("OpenBLAS is missing; install scipy-openblas32.")
    return Path(module.submodule_search_locations[0])


@functools.cache
def load_openblas() -> ctypes.CDLL:
    """Load OpenBLAS for kernels that are loaded later.

    It is set to compute on the calling thread only. Kernels divide their products among OpenMP's threads
    (OMP_NUM_THREADS, or all cores), which a second pool of threads would compete with.
    """
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"  # otherwise loading it starts a thread per core
    try:
        return ctypes.CDLL(str(openblas_dir() / "lib" / "libscipy_openblas.so"), mode=ctypes.RTLD_GLOBAL)
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
