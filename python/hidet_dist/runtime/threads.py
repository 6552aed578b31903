"""How the threads of CPU kernels wait for work."""

from __future__ import annotations

import os

# Kernels use two thread pools, OpenMP's and OpenBLAS's, and serving processes share the cores. By default
# both pools spin while they wait, which keeps the other one, and the other ranks, from working.
_WAITING = {
    "OMP_WAIT_POLICY": "passive",  # OpenMP 4.0, section 4.7
    "OPENBLAS_THREAD_TIMEOUT": "4",  # 2^4 cycles, the least that OpenBLAS takes
}


def wait_without_spinning() -> None:
    """Make idle threads sleep, unless the environment says otherwise. Takes effect for pools that do not exist yet."""
    for name, value in _WAITING.items():
        os.environ.setdefault(name, value)
