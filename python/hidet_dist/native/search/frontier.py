"""All partial assignments that can become one below a sum, listed by the native solvers; see frontier.h."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int32, c_int64
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hidet_dist.native.search.elimination import NativeNetwork, Table, TableStore
from hidet_dist.native.search.library import library
from hidet_dist.native.search.signatures import FrontierBytes, FrontierLimits


@dataclass(frozen=True)
class FactorBytes:
    """The bytes of the factors that were given to a network, as numbers of tables; -1 where there are none.

    Attributes
    ----------
    tables: what the numbers stand for.
    paid: for each factor the priced bytes, a part of the factor's entries.
    always: for each factor the bytes that are always held.
    at: for each point the bytes of the factors that hold some there.
    least: for each point the bytes that are held there besides.
    floor: the most of ``least`` of points at which no factor holds bytes.
    most: the most bytes that may be held at any point.
    """

    tables: TableStore
    paid: Sequence[int]
    always: Sequence[int]
    at: Sequence[dict[int, int]]
    least: Sequence[float]
    floor: float
    most: float


@dataclass(frozen=True)
class LabelLimits:
    """How many labels there may be, as in ``hidet_dist_frontier_limits``."""

    below: float
    joined: int
    left: int
    comparisons: int
    halvings: int


class NativeFrontier:
    """The assignments of a network's variables below a sum that no other one beats in its sum and its bytes.

    Attributes
    ----------
    below: the sum below which all assignments were considered: that of ``limits``, or less if there were too many.
    sums: the sum of each assignment, in increasing order.
    paid: the priced bytes in each sum.
    """

    def __init__(self, network: NativeNetwork, factor_bytes: FactorBytes, limits: LabelLimits):
        """List the assignments, after the network's marginals.

        Raises
        ------
        TooWide
            When there are too many partial assignments below any sum, or they take more memory than the tables may.
        """
        self._network = network
        at = factor_bytes.at
        arrays = [
            np.array(line, dtype=np.int64)
            for line in (
                factor_bytes.paid,
                factor_bytes.always,
                np.cumsum([0, *map(len, at)]),
                [factor for line in at for factor in line],
                [table for line in at for table in line.values()],
            )
        ]
        paid, always, begin, factor, table = (array.ctypes.data_as(POINTER(c_int64)) for array in arrays)
        least = np.array(factor_bytes.least, dtype=np.float64)
        given = FrontierBytes(
            factor_bytes.tables.handle,
            paid,
            always,
            *(len(at), begin, factor, table),
            *(least.ctypes.data_as(POINTER(c_double)), factor_bytes.floor, factor_bytes.most),
        )
        limit = FrontierLimits(limits.below, limits.joined, limits.left, limits.comparisons, limits.halvings)
        status = c_int32()
        handle = library().hidet_dist_frontier_create(
            network.handle, ctypes.byref(given), ctypes.byref(limit), network.stop, ctypes.byref(status)
        )
        network.check_status(status.value)
        weakref.finalize(self, library().hidet_dist_frontier_destroy, handle)
        self._handle = handle
        count = library().hidet_dist_frontier_count(handle)
        self.below = float(library().hidet_dist_frontier_below(handle))
        self.sums: Table = np.empty(count)
        self.paid: Table = np.empty(count)
        library().hidet_dist_frontier_sums(
            handle, *(line.ctypes.data_as(POINTER(c_double)) for line in (self.sums, self.paid))
        )

    def values(self, number: int) -> npt.NDArray[np.int64]:
        """Return the values of all variables in an assignment."""
        result = np.empty(self._network.count, dtype=np.int64)
        library().hidet_dist_frontier_values(self._handle, number, result.ctypes.data_as(POINTER(c_int64)))
        return result
