"""The native libraries, loaded with the signatures of their headers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path

from hidet_dist.errors import HidetDistError
from hidet_dist.native.installed import installed
from hidet_dist.native.interface import PREFIX, Header
from hidet_dist.native.signatures import COLLECTIVES, HEADERS

LIBRARY_NAME = "hidet_dist"

ABI_VERSION = COLLECTIVES.constants["ABI_VERSION"]
"""The version of the C interface that this package requires."""


@functools.cache
def _package_dir() -> Path:
    """Find the installed package's folder with ``lib`` and ``include``.

    An editable install has the Python sources in the checkout, and these two folders in site-packages.
    """
    candidates = [Path(__file__).resolve().parents[1]]
    if (found := installed("hidet_dist")) is not None:
        candidates.append(found[0] / "hidet_dist")
    for candidate in candidates:
        if (candidate / "lib" / f"lib{LIBRARY_NAME}.so").is_file():
            return candidate
    tried = ", ".join(str(candidate / "lib") for candidate in candidates)
    raise HidetDistError(f"lib{LIBRARY_NAME}.so is not in {tried}: install hidet_dist (`make setup` in a checkout)")


def library_path() -> Path:
    """Return the path of the library of kernels. Raises ``HidetDistError`` where hidet_dist is not installed."""
    return library_dir() / f"lib{LIBRARY_NAME}.so"


def library_dir() -> Path:
    """Return the folder of the libraries, for linking kernels with ``-lhidet_dist``."""
    return _package_dir() / "lib"


def include_dir() -> Path:
    """Return the folder of the headers, for ``#include <hidet_dist/collectives.h>``."""
    return _package_dir() / "include"


def load(path: Path, headers: Mapping[str, Header], version: str, required: int, mode: int = 0) -> ctypes.CDLL:
    """Load a library, and declare the functions of its headers.

    Parameters
    ----------
    version: the name, without the prefix, of the function that returns the library's version.
    required: the version that this package needs.
    mode: the flags of ``dlopen``.

    Raises
    ------
    HidetDistError: the file is missing, or its version is another.
    """
    if not path.is_file():
        raise HidetDistError(f"{path} is missing: install hidet_dist (`make setup` in a checkout)")
    lib = ctypes.CDLL(str(path), mode=mode)
    found = getattr(lib, PREFIX + version)()
    if found != required:
        raise HidetDistError(f"{path} has ABI version {found}, this package needs {required}: install it again")
    for header in headers.values():
        for name, signature in header.functions.items():
            function = getattr(lib, PREFIX + name)
            function.restype = signature.result
            function.argtypes = signature.arguments
    return lib


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library of kernels and collectives; kernels that are loaded later see its symbols.

    Raises ``HidetDistError`` where it is missing, or its version is not this package's.
    """
    return load(library_path(), HEADERS, "abi_version", ABI_VERSION, ctypes.RTLD_GLOBAL)


def last_error() -> str:
    """Return the message of the calling thread's last failed native call, or an empty string."""
    return str(library().hidet_dist_last_error().decode(errors="replace"))
