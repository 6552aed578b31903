"""Prices on the bytes of moments, which turn a memory budget into a part of the cost (Lagrangian relaxation)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

_BITS = 24  # of the greatest price; what is below the last of them is cut off


class Prices:
    """Seconds a byte at each moment, 0 or more.

    Prices are multiples of a quantum, so that sums of them are exact: what is held as long, at moments priced alike,
    costs the same to the bit wherever it is in the graph.
    """

    def __init__(self, second_per_byte: Sequence[float]):
        most = max(second_per_byte)
        quantum = 2.0 ** (math.frexp(most)[1] - _BITS) if most > 0 else 1.0
        self.at = tuple(math.floor(price / quantum) * quantum for price in second_per_byte)
        self.until = (0.0, *accumulate(self.at))

    @property
    def total(self) -> float:
        """Seconds for a byte that is held throughout."""
        return self.until[-1]

    def span(self, begin: int, end: int) -> float:
        """Seconds for a byte held from moment ``begin`` to ``end`` (included)."""
        return self.until[end + 1] - self.until[begin]

    def of(self, nbytes: Sequence[int]) -> float:
        """Seconds for so many bytes at each moment."""
        return math.fsum(price * n for price, n in zip(self.at, nbytes, strict=True) if price)
