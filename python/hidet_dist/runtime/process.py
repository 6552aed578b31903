"""The memory of this process, as the operating system counts it."""

from __future__ import annotations

import os
from pathlib import Path

_PAGES = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Return the bytes of this process in memory, mapped files included; None on a system that does not tell.

    Linux tells the number of pages (proc_pid_statm(5), the second field).
    """
    try:
        return int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
