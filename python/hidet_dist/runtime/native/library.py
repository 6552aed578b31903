"""The native library, loaded with the signatures of ``signatures.py``."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
from pathlib import Path

from hidet_dist.errors import HidetDistError
from hidet_dist.runtime.native.signatures import COLLECTIVES, HEADERS, PREFIX

LIBRARY_NAME = "hidet_dist"

ABI_VERSION = COLLECTIVES.constants["ABI_VERSION"]
"""The version of the C interface that this package requires."""


@functools.cache
def _package_dir() -> Path:
    """Find the installed package's folder with ``lib`` and ``include``.

    An editable install has the Python sources in the checkout, and these two folders in site-packages.
    """
    candidates = [Path(__file__).resolve().parents[2]]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        candidates.append(Path(str(importlib.metadata.distribution("hidet_dist").locate_file("hidet_dist"))))
    for candidate in candidates:
        if (candidate / "lib" / f"lib{LIBRARY_NAME}.so").is_file():
            return candidate
    tried = ", ".join(str(candidate / "lib") for candidate in candidates)
    raise HidetDistError(f"lib{LIBRARY_NAME}.so is not in {tried}: install hidet_dist (`make setup` in a checkout)")


def library_path() -> Path:
    """Return the path of the native library. Raises ``HidetDistError`` where hidet_dist is not installed."""
    return library_dir() / f"lib{LIBRARY_NAME}.so"


def library_dir() -> Path:
    """Return the folder of the library, for linking kernels with ``-lhidet_dist``."""
    return _package_dir() / "lib"


def include_dir() -> Path:
    """Return the folder of the headers, for ``#include <hidet_dist/collectives.h>``."""
    return _package_dir() / "include"


@functools.cache
def library() -> ctypes.CDLL:
    """Load the native library, with its symbols visible to kernels that are loaded later.

    Raises ``HidetDistError`` where it is missing, or its version is not this package's.
    """
    path = library_path()
    lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    lib.hidet_dist_abi_version.restype = ctypes.c_int32
    version = lib.hidet_dist_abi_version()
    if version != ABI_VERSION:
        raise HidetDistError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}: install it again")
    for header in HEADERS.values():
        for name, signature in header.functions.items():
            function = getattr(lib, PREFIX + name)
            function.restype = signature.result
            function.argtypes = signature.arguments
    return lib


def last_error() -> str:
    """Return the message of the calling thread's last failed native call, or an empty string."""
    return str(library().hidet_dist_last_error().decode(errors="replace"))
