"""Tiles of rows in shared memory, which the threads of a block fill together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, no_type_check

from hidet.ir import primitives
from hidet.ir.type import DataType
from hidet.lang import grid, register_tensor
from hidet.lang.cuda import cp_async, threadIdx

from hidet_dist.compile.cuda.inlined import script_part

_BYTES = 16  # that a thread copies at once
_AT_ONCE = 8  # elements that a thread loads before it stores them

Place = Callable[[Sequence[Any], Sequence[Any], Any, Any], list[Any]]
"""The indices of an element, from a tensor's outer dims, a head, a row and a column."""


class Tiles:
    """The filling of tiles with rows of ``size`` elements by the threads of a block.

    A tile gets the ``rows`` from row ``first`` on of a head of a tensor with the dims ``outer`` around its rows and
    columns. Rows from ``end`` on are zeros.
    """

    def __init__(self, dtype: DataType, size: int, threads: int, place: Place):
        self.dtype, self.size, self.threads, self.place = dtype, size, threads, place
        self.vector = _BYTES // dtype.nbytes
        self.row_vectors = size // self.vector

    def turns(self, items: int) -> int:
        """Return how often each thread takes an item until there are none."""
        return -(-items // self.threads)

    def within(self, row: Any, rows: int, items: int, at_once: int = 1) -> Any:
        """Tell whether a row is one of the tile's, as a condition of a script; True where threads take no others.

        A row has ``items``, of which a thread takes ``at_once`` in a turn.
        """
        return True if rows * items % (self.threads * at_once) == 0 else row < rows

    @no_type_check
    @script_part
    def copy(self, tile, tensor, outer, head, first, rows, end):
        """Begin to copy rows as they are in memory, 16 bytes at a time."""
        for i in grid(self.turns(rows * self.row_vectors), "u+"):
            row = (i * self.threads + threadIdx.x) // self.row_vectors
            d = (i * self.threads + threadIdx.x) % self.row_vectors * self.vector
            if self.within(row, rows, self.row_vectors):
                cp_async(
                    ~tile[row, d],
                    ~tensor[self.place(outer, head, primitives.min(first + row, end - 1), d)],
                    cp_size=_BYTES,
                    src_size=(first + row < end) * _BYTES,
                )

    @no_type_check
    @script_part
    def load(self, tile, tensor, outer, head, first, rows, end):
        """Load rows element by element, so that hidet can fuse their computation as a prologue."""
        # A thread issues all its loads before it uses the first.
        loaded = register_tensor(self.dtype, shape=[_AT_ONCE])
        for part in range(-(-self.turns(rows * self.size) // _AT_ONCE)):
            for i in grid(_AT_ONCE, "u+"):
                row = ((part * _AT_ONCE + i) * self.threads + threadIdx.x) // self.size
                d = ((part * _AT_ONCE + i) * self.threads + threadIdx.x) % self.size
                loaded[i] = self.dtype.zero
                if self.within(row, rows, self.size, _AT_ONCE) and first + row < end:
                    loaded[i] = tensor[self.place(outer, head, first + row, d)]
            for i in grid(_AT_ONCE, "u+"):
                row = ((part * _AT_ONCE + i) * self.threads + threadIdx.x) // self.size
                d = ((part * _AT_ONCE + i) * self.threads + threadIdx.x) % self.size
                if self.within(row, rows, self.size, _AT_ONCE):
                    tile[row, d] = loaded[i]
