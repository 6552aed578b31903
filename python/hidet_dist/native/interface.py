"""The declarations of a C header as data."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PREFIX = "hidet_dist_"
"""The prefix of each name in C; constants have ``HIDET_DIST_``."""


class Signature(NamedTuple):
    """The type of a C function's result, ``None`` for ``void``, and those of its arguments."""

    result: Any
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Header:
    """The declarations of one header, by C name without the prefix."""

    functions: dict[str, Signature]
    structures: dict[str, type[ctypes.Structure]] = field(default_factory=dict)
    callbacks: dict[str, type] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
