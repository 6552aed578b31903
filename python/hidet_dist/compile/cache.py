"""The cache of what compilers have made, in hidet's cache folder: bounded in size, with what is used least removed.

An entry is a folder with a kernel's library, a launcher or precompiled headers. Its name, or that of a folder above it,
has a digest of what it was made of: source, flags, headers and compiler. Whoever uses an entry marks it
(:func:`mark_used`); :func:`prune` removes those that were marked longest ago.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from hidet_dist.limits import MOST_CACHE_BYTES
from hidet_dist.targets import TARGETS

_LAUNCHERS = "launchers"
_MARKS = ("lib.so", "*.gch")  # an entry has one of these, whose time of change is that of the entry's last use
_USED_LATELY_SECONDS = 3600.0  # a build that may still read an entry is done by then
_FILLED = 0.8  # of the bound, after old entries are removed, so that not every build has to


def mark_used(files: Iterable[Path]) -> None:
    """Note that entries are used now; ``files`` are their libraries, or precompiled headers."""
    for file in files:
        os.utime(file)


def prune(cache: Path, most_bytes: int = MOST_CACHE_BYTES, used_lately_seconds: float = _USED_LATELY_SECONDS) -> int:
    """Remove the entries that were used longest ago, if all together take more than ``most_bytes``.

    Entries that were used in the last ``used_lately_seconds`` stay in any case. Returns the bytes that are left.
    """
    entries = []
    # Folders in hidet's cache, those of kernels by their build target; the rest of it is hidet's own.
    ours = {_LAUNCHERS, *(target.memory for target in TARGETS.values())}
    for file in (file for part in sorted(ours) for mark in _MARKS for file in (cache / part).rglob(mark)):
        try:
            nbytes = sum(each.stat().st_blocks * 512 for each in file.parent.iterdir() if each.is_file())
            entries.append((file.stat().st_mtime, nbytes, file.parent))
        except OSError:  # removed by another process
            continue
    total = sum(nbytes for _, nbytes, _ in entries)
    if total <= most_bytes:
        return total
    before = time.time() - used_lately_seconds
    for used, nbytes, folder in sorted(entries):
        if used >= before or total <= _FILLED * most_bytes:
            break
        _remove(folder)
        total -= nbytes
    return total


def _remove(folder: Path) -> None:
    """Remove an entry; another process sees all of it or nothing."""
    aside = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
    try:
        os.rename(folder, aside)
    except OSError:  # another process was first
        return
    shutil.rmtree(aside, ignore_errors=True)
    Path(f"{folder}.lock").unlink(missing_ok=True)
