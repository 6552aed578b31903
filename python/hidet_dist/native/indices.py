"""Search for integers outside a range, in strided memory."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64

from hidet_dist.native.library import library

_WRAP = 1 << 64


class StridedRange:
    """A search for integers outside ``[least, greatest]`` in views of a shape, with strides in elements.

    Parameters
    ----------
    itemsize: int
        The bytes of an integer: 1, 2, 4 or 8.
    signed: bool
        Whether they are signed.
    """

    def __init__(
        self, itemsize: int, signed: bool, shape: Sequence[int], strides: Sequence[int], least: int, greatest: int
    ):
        dims = len(shape)
        array = c_int64 * max(dims, 1)
        self._find = library().hidet_dist_find_outside
        self._signed = signed
        self._arguments = (itemsize, signed, dims, array(*shape), array(*strides), least, greatest)

    def first_outside(self, address: int) -> tuple[int, int] | None:
        """Find the first such integer from ``address`` on. Returns its offset in elements and its value, or None."""
        outside = (c_int64 * 2)()
        status = self._find(address, *self._arguments, outside)
        if status < 0:
            raise ValueError(f"integers must have 1, 2, 4 or 8 bytes, not {self._arguments[0]}")
        if not status:
            return None
        offset, value = outside
        return offset, value if self._signed else value % _WRAP
