"""The Python sources that generate kernels, as a part of the keys of caches of kernels.

hidet caches a kernel by its operator's name and definition, and does not generate the source of a kernel that the cache
has. So a changed generator must change the key.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

GENERATORS = tuple(str(_PACKAGE / package) for package in ("compat", "compile", "partitioning"))
"""The folders of the sources. hidet's own sources are covered by its version, which hidet stores with each kernel."""
