"""Variable elimination, computed by the native solvers; see elimination.h."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_double, c_int64, c_uint8
from typing import Any

import numpy as np
import numpy.typing as npt

from hidet_dist.native.search.library import library
from hidet_dist.native.search.signatures import ELIMINATION
from hidet_dist.native.search.stop_check import StopCheck

Table = npt.NDArray[np.float64]
Integers = Sequence[int] | npt.NDArray[np.int64]

_MOST_DIMS = 64  # of an array in NumPy
_DOUBLE = np.dtype(np.float64).str

_STOPPED = ELIMINATION.constants["ELIMINATION_STOPPED"]
_TOO_WIDE = ELIMINATION.constants["ELIMINATION_TOO_WIDE"]
_NO_MEMORY = ELIMINATION.constants["ELIMINATION_NO_MEMORY"]


class TooWide(Exception):
    """A graph with a part so densely connected that elimination would take too long, or too much memory."""


class TableStore:
    """Tables numbered by content: equal tables have one number, and are kept once.

    Parameters
    ----------
    byte_limit: int
        The most bytes of all tables.
    """

    def __init__(self, byte_limit: int):
        self.byte_limit = byte_limit
        self.handle = library().hidet_dist_tables_create(byte_limit)
        if not self.handle:
            raise MemoryError("a store of tables needs more memory than there is")
        weakref.finalize(self, library().hidet_dist_tables_destroy, self.handle)

    @property
    def nbytes(self) -> int:
        """The bytes of all tables."""
        return int(library().hidet_dist_tables_bytes(self.handle))

    def add(self, table: Table) -> int:
        """Copy a table, unless there is an equal one, and return its number. No entry is NaN."""
        entries = np.ascontiguousarray(table, dtype=np.float64)
        number: int = library().hidet_dist_tables_add(
            self.handle,
            table.ndim,
            (c_int64 * max(1, table.ndim))(*table.shape),
            ctypes.cast(entries.ctypes.data, POINTER(c_double)),
        )
        if number < 0:
            raise MemoryError(f"a table of {table.size} entries needs more memory than there is")
        return number

    def __getitem__(self, number: int) -> Table:
        """Return a table, which stays valid after the store is gone; it must not be changed."""
        sizes = (c_int64 * _MOST_DIMS)()
        dims = library().hidet_dist_tables_shape(self.handle, number, sizes)
        entries = library().hidet_dist_tables_entries(self.handle, number)
        address = ctypes.cast(entries, ctypes.c_void_p).value
        return np.asarray(_View(self, address, tuple(sizes[:dims])))


class _View:
    """The entries of a table, as NumPy takes them; they keep the store."""

    def __init__(self, store: TableStore, address: int | None, shape: tuple[int, ...]):
        self.store = store
        self.__array_interface__ = {"data": (address, True), "shape": shape, "typestr": _DOUBLE, "version": 3}


class NativeNetwork:
    """Variables of some numbers of values, and factors over them.

    Parameters
    ----------
    store: TableStore
        The tables of the factors; further tables are added to it.
    sizes: integers
        The number of values of each variable.
    factors: integers
        The tables of the factors.
    ends, variables: integers
        The variables of the factors, one factor after the other, and for each where its own end. They are distinct.
    check: callable
        Called now and then; an exception from it ends the call that it comes from, which raises it again.

    Attributes
    ----------
    handle: the native network.
    count: the number of variables.
    stop: the callback for native functions, whose status goes to :meth:`check_status`.
    """

    def __init__(
        self,
        store: TableStore,
        sizes: Integers,
        factors: Integers,
        ends: Integers,
        variables: Integers,
        check: Callable[[], None],
    ):
        self._store, self.count = store, len(sizes)
        self._check = StopCheck(check)
        self.stop = self._check.callback
        begins = np.concatenate(([0], np.asarray(ends, dtype=np.int64)))
        arrays = [np.ascontiguousarray(each, dtype=np.int64) for each in (sizes, factors, begins, variables)]
        pointers = [_integers(array) for array in arrays]
        self.handle = library().hidet_dist_network_create(
            store.handle, len(sizes), pointers[0], len(factors), *pointers[1:]
        )
        if not self.handle:
            raise MemoryError("a network of variables needs more memory than there is")
        weakref.finalize(self, library().hidet_dist_network_destroy, self.handle)

    @property
    def constant(self) -> float:
        """The sum of the factors over no variable, and of what was subtracted from the tables that steps left."""
        return float(library().hidet_dist_network_constant(self.handle))

    def order(
        self, work_limit: float, kept: Sequence[int] = (), by_table: bool = False
    ) -> tuple[npt.NDArray[np.int64], float, float]:
        """Choose an order of eliminating all variables but ``kept``, greedily.

        Returns the order; the additions of all steps, where equal numbers count once; and those of the largest step.
        Both are infinite, and the order is incomplete, if a step has more than ``work_limit``. The variable of least
        work is next, or with ``by_table`` that which leaves the smallest table.
        """
        is_kept = np.zeros(self.count, dtype=np.uint8)
        is_kept[list(kept)] = 1
        order, work, length = np.empty(self.count, dtype=np.int64), (c_double * 2)(), c_int64()
        self._call(
            "order",
            is_kept.ctypes.data_as(POINTER(c_uint8)),
            int(by_table),
            work_limit,
            self.stop,
            _integers(order),
            ctypes.byref(length),
            work,
        )
        return order[: length.value], work[0], work[1]

    def eliminate(self, order: npt.NDArray[np.int64]) -> None:
        """Eliminate variables, once. Raises TooWide."""
        self._call("eliminate", len(order), _integers(order), self.stop)

    def values(self) -> list[int]:
        """Return values of all variables whose sum is the constant, after all were eliminated."""
        result = np.empty(self.count, dtype=np.int64)
        self._call("values", _integers(result))
        values: list[int] = result.tolist()
        return values

    def least_over(self, kept: Sequence[int], shape: Sequence[int]) -> Table:
        """Tabulate the least sum, less the constant, over the variables of these sizes that were not eliminated."""
        result = np.empty(shape)
        self._call("least_over", len(kept), (c_int64 * max(1, len(kept)))(*kept), _doubles(result))
        return result

    def marginals(self, sizes: Sequence[int], work_limit: float) -> list[Table]:
        """Find the least sum for each value of each of the first variables, which have these sizes.

        All variables must have been eliminated. Raises TooWide if a step has more than ``work_limit`` additions.
        """
        ends = list(itertools.accumulate(sizes))
        result = np.empty(ends[-1] if ends else 0)
        self._call("marginals", len(sizes), work_limit, self.stop, _doubles(result))
        return [result[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def _call(self, name: str, *arguments: Any) -> None:
        self.check_status(getattr(library(), f"hidet_dist_network_{name}")(self.handle, *arguments))

    def check_status(self, status: int) -> None:
        """Raise the exception of the status that a native function returned."""
        if status == _STOPPED:
            self._check.raise_again()
        if status == _TOO_WIDE:
            raise TooWide
        if status == _NO_MEMORY:
            raise MemoryError("an elimination needs more memory than there is")


def _integers(array: npt.NDArray[np.int64]) -> Any:
    return array.ctypes.data_as(POINTER(c_int64))


def _doubles(array: Table) -> Any:
    return array.ctypes.data_as(POINTER(c_double))
