"""Where packages are installed, and their versions, without :mod:`importlib.metadata`, which takes long to import."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

_ENDING = ".dist-info"


def installed(name: str) -> tuple[Path, str] | None:
    """Return the folder that a package is installed in, such as site-packages, and its version; None where it is not.

    Both are those of :mod:`importlib.metadata`: of the first folder of the module search path that has the package.
    """
    for folder in sys.path:
        with suppress(OSError), os.scandir(folder or os.curdir) as entries:
            for entry in entries:
                if entry.name.startswith(f"{name}-") and entry.name.endswith(_ENDING):
                    return Path(folder or os.curdir), entry.name[len(name) + 1 : -len(_ENDING)]
    import importlib.metadata  # an installation of another form

    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file(""))), found.version
