"""OpenBLAS from the scipy-openblas32 package, which the CPU target's matrix products call."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hidet_dist.errors import HidetDistError

NAME = "openblas"

# What its kernels for AVX-512 (SkylakeX, the only ones in the package) need, as Linux names it.
_AVX512 = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})


def openblas_dir() -> Path:
    """Where its headers (``include``) and library (``lib``) are. Raises HidetDistError when the package is missing."""
    found = importlib.util.find_spec("scipy_openblas32")
    if found is None or not found.submodule_search_locations:
        raise HidetDistError("OpenBLAS is missing; install scipy-openblas32.")
    return Path(found.submodule_search_locations[0])


@functools.cache
def load_openblas() -> ctypes.CDLL:
    """Load it, so that kernels which need it find it.

    It computes on the calling thread only. Kernels cut their products into parts for their own threads
    (OMP_NUM_THREADS, or all cores), which then need not share the cores with a second pool.
    """
    with _environment(_settings()):
        return ctypes.CDLL(str(openblas_dir() / "lib" / "libscipy_openblas.so"), mode=ctypes.RTLD_GLOBAL)


def _settings() -> dict[str, str]:
    settings = {"OPENBLAS_NUM_THREADS": "1"}
    # It takes processors that it does not know for ones without AVX-512, which makes it half as fast.
    if "OPENBLAS_CORETYPE" not in os.environ and _processor_flags() >= _AVX512:
        settings["OPENBLAS_CORETYPE"] = "SkylakeX"
    return settings


def _processor_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        flags = ""
    return frozenset(flags.split())


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that OpenBLAS reads while it is loaded, and nobody else."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
