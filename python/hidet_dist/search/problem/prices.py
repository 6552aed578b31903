"""Prices on bytes at program points: they turn the memory budget into a part of the cost (Lagrangian relaxation)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import accumulate

from hidet_dist.search import tuning


class Prices:
    """Seconds per byte at each program point, 0 or more.

    Prices are multiples of a quantum, so that their sums are exact: tensors held equally long, at points of equal
    prices, cost the same to the last bit wherever they are in the graph.

    Points of a *joint* peak have one price, for the most bytes that are held at any of them: that is a constraint of
    the budget, too, and a stronger one than any mean of the bytes at the points.

    Attributes
    ----------
    at: the price at each program point, 0 at those of a joint peak.
    joint: the price of each joint peak, and its points.
    until: the sum of the prices before each program point, and that of all.
    total: seconds for a byte that is held during the whole run.
    """

    def __init__(self, second_per_byte: Sequence[float], joint: Sequence[tuple[int, ...]] = ()):
        most = max(second_per_byte)
        quantum = 2.0 ** (math.frexp(most)[1] - tuning.PRICE_BITS) if most > 0 else 1.0
        self.at = tuple(math.floor(price / quantum) * quantum for price in second_per_byte)
        self.joint: tuple[tuple[float, tuple[int, ...]], ...] = ()
        if joint:
            at = list(self.at)
            prices = [sum(at[m] for m in points) for points in joint]
            for points in joint:
                for m in points:
                    at[m] = 0.0
            self.at = tuple(at)
            self.joint = tuple((price, points) for price, points in zip(prices, joint, strict=True) if price)
        self.until = (0.0, *accumulate(self.at))
        self.total = self.until[-1] + sum(price for price, _ in self.joint)

    @classmethod
    def at_point(cls, point: int, price: float, points: int) -> Prices:
        """Make prices that are 0 at all but one of ``points`` program points."""
        prices = cls([price])
        before, behind = (0.0,) * point, points - point - 1
        prices.at = (*before, *prices.at, *(0.0,) * behind)
        prices.until = (*before, *prices.until, *(prices.total,) * behind)
        return prices

    @property
    def key(self) -> Hashable:
        """A value that is equal for equal prices."""
        return self.at, self.joint

    def span(self, begin: int, end: int) -> float:
        """Seconds for a byte held from point ``begin`` to ``end`` (included)."""
        return self.until[end + 1] - self.until[begin]

    def of(self, nbytes: Sequence[int]) -> float:
        """Seconds for ``nbytes[m]`` bytes at each point m."""
        alone = (price * n for price, n in zip(self.at, nbytes, strict=True) if price)
        return math.fsum((*alone, *(price * max(nbytes[m] for m in points) for price, points in self.joint)))
