"""The bytes that a buffer for an activation occupies: planned as they are placed when a program is built."""

from __future__ import annotations

ALIGNMENT = 128
"""Bytes to whose multiples buffers are rounded up; ``kBufferAlignment`` in ``hidet_dist/launcher.h``."""


def buffer_nbytes(nbytes: int) -> int:
    """Round up the bytes of a tensor to those of its buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
