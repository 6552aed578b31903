"""The native library of solvers, loaded with the signatures of its headers. Serving needs none of it."""

from __future__ import annotations

import ctypes
import functools

from hidet_dist.native.library import library_dir, load
from hidet_dist.native.search.signatures import HEADERS, SOLVERS

LIBRARY_NAME = "hidet_dist_search"

ABI_VERSION = SOLVERS.constants["SEARCH_ABI_VERSION"]
"""The version of the C interface of the solvers that this package requires."""


@functools.cache
def library() -> ctypes.CDLL:
    """Load the solvers. Raises ``HidetDistError`` where they are missing, or their version is not this package's."""
    return load(library_dir() / f"lib{LIBRARY_NAME}.so", HEADERS, "search_abi_version", ABI_VERSION)


def last_error() -> str:
    """Return the message of the calling thread's last failed call of a solver, or an empty string."""
    return str(library().hidet_dist_search_last_error().decode(errors="replace"))
