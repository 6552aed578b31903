"""Python's garbage collector during a build."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def older_objects_kept() -> Iterator[None]:
    """Leave objects that exist already out of garbage collections while the block runs.

    A build makes so many objects that Python looks through all objects of the process several times, most of which are
    those of imported modules. Objects made in the block are collected as usual. If the process has frozen objects by
    itself (``gc.freeze``), nothing is changed.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
