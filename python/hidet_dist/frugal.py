"""Settings of the process that save tracing, planning and building time: the collector's, and torch's threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS_BETWEEN_COLLECTIONS = 50_000  # of some 100 bytes; with Python's 700 a build collects a thousand times


def collect_rarely() -> None:
    """Have Python look for garbage less often from now on, as a program does before it imports much.

    Modules consist of millions of objects that stay, and with Python's settings it looks through them all the time.
    """
    young, *older = gc.get_threshold()
    gc.set_threshold(max(_OBJECTS_BETWEEN_COLLECTIONS, young), *older)


@contextmanager
def older_objects_kept() -> Iterator[None]:
    """Leave objects that exist already out of garbage collections while the block runs.

    Tracing and a build make so many objects that Python looks through all objects of the process several times, most of
    which are those of imported modules. Objects made in the block are collected, but less often than usual. If the
    process has frozen objects by itself (``gc.freeze``), nothing is changed.
    """
    if gc.get_freeze_count():
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    collect_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def copies_in_one_thread() -> Iterator[None]:
    """Let torch copy tensors in one thread while the block runs.

    A build copies many slices of weights, most of which take less time than torch's threads take to wait for another.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: a search makes millions of small tuples without cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
