"""Memory of results that is reused once no tensor refers to it.

Memory that the system gives is zeroed page by page when it is first written to, and a virtual machine may have to ask
its host for each page. For a large result that can take a good part of the time that computing it takes, at each call.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""

LEAST_BYTES = 2**20
"""Smaller results get their memory from the allocator, which keeps such pieces anyway."""


class Recycler:
    """Lends memory, and takes it back when its users are gone. Any thread may use it.

    What lies unused is at most twice as large as the largest piece that was asked for.
    """

    def __init__(self) -> None:
        self._unused: deque[np.ndarray] = deque()
        self._most_bytes = 0

    def take(self, nbytes: int) -> np.ndarray:
        """uint8[nbytes] with undefined content, which comes back once it and all views of it are gone."""
        self._most_bytes = max(self._most_bytes, 2 * nbytes)
        return np.asarray(_Loan(self, self._fitting(nbytes), nbytes))

    def _fitting(self, nbytes: int) -> np.ndarray:
        # Loans may end meanwhile, in any thread: each step on the queue is atomic.
        for _ in range(len(self._unused)):
            try:
                block = self._unused.popleft()
            except IndexError:
                break
            if nbytes <= block.nbytes <= 2 * nbytes:
                return block
            self._unused.append(block)
        return aligned(nbytes)

    @property
    def unused_bytes(self) -> int:
        """Bytes that are not lent."""
        return sum(block.nbytes for block in tuple(self._unused))

    def give_back(self, block: np.ndarray) -> None:
        """Keep a block for later, and let go of the oldest ones if these are too many."""
        self._unused.append(block)
        while self.unused_bytes > self._most_bytes:
            try:
                self._unused.popleft()
            except IndexError:
                break

    def close(self) -> None:
        """Free the unused memory, and the rest as it is returned."""
        self._most_bytes = 0
        self._unused.clear()


class _Loan:
    """The owner of lent memory, which NumPy keeps as long as it uses the memory."""

    def __init__(self, recycler: Recycler, block: np.ndarray, nbytes: int):
        self._recycler = recycler
        self._block = block
        self._nbytes = nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {**self._block[: self._nbytes].__array_interface__, "version": 3}

    def __del__(self) -> None:
        self._recycler.give_back(self._block)


def aligned(nbytes: int) -> np.ndarray:
    """uint8[nbytes] that begins at a multiple of ``ALIGNMENT``."""
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % ALIGNMENT
    return buffer[offset : offset + nbytes]
