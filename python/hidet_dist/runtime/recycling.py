"""Reuse of the memory of results, once no tensor refers to it.

The operating system zeroes new memory page by page when it is first written to, and a virtual machine may have to ask
its host for each page. For a large result, this can take a good part of the time of computing it, at each call.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Alignment of results in bytes: a cache line, and the widest vector register."""

LEAST_BYTES = 2**20
"""The least size, in bytes, of recycled results. The allocator itself reuses smaller pieces."""


class Recycler:
    """A pool that lends memory, and takes it back when no array refers to it any more. Any thread may use it.

    The unused memory in it is at most twice as large as the largest piece that was requested.
    """

    def __init__(self) -> None:
        self._unused: deque[np.ndarray] = deque()
        self._most_bytes = 0

    def take(self, nbytes: int) -> np.ndarray:
        """Lend uint8[nbytes] of undefined content. It returns to the pool once it and all its views are deleted."""
        self._most_bytes = max(self._most_bytes, 2 * nbytes)
        return np.asarray(_Loan(self, self._fitting(nbytes), nbytes))

    def _fitting(self, nbytes: int) -> np.ndarray:
        # Loans may end meanwhile in other threads; each operation on the queue is atomic.
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
        """Bytes in the pool that are not lent."""
        return sum(block.nbytes for block in tuple(self._unused))

    def give_back(self, block: np.ndarray) -> None:
        """Return a block to the pool, and free the oldest blocks while the pool is too large."""
        self._unused.append(block)
        while self.unused_bytes > self._most_bytes:
            try:
                self._unused.popleft()
            except IndexError:
                break

    def close(self) -> None:
        """Free the unused memory now, and lent memory when it is returned."""
        self._most_bytes = 0
        self._unused.clear()


class _Loan:
    """The owner of lent memory, which NumPy's arrays keep alive as long as they use the memory."""

    def __init__(self, recycler: Recycler, block: np.ndarray, nbytes: int):
        self._recycler = recycler
        self._block = block
        self._nbytes = nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {**self._block[: self._nbytes].__array_interface__, "version": 3}

    def __del__(self) -> None:
        self._recycler.give_back(self._block)


def aligned(nbytes: int, zeros: bool = False) -> np.ndarray:
    """Allocate uint8[nbytes] at a multiple of ``ALIGNMENT``, of zeros or of undefined content."""
    buffer = (np.zeros if zeros else np.empty)(nbytes + ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % ALIGNMENT
    return buffer[offset : offset + nbytes]
