"""The choices and conversions that no plan within a budget contains, found by the native solvers; see capacity.h."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int32, c_int64, c_uint8
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hidet_dist.native.search.library import library
from hidet_dist.native.search.signatures import CAPACITY, CapacityProblem
from hidet_dist.native.search.stop_check import StopCheck

Mask = npt.NDArray[np.bool_]

_STOPPED = CAPACITY.constants["CAPACITY_STOPPED"]
_EXCEEDED = CAPACITY.constants["CAPACITY_EXCEEDED"]
_NO_MEMORY = CAPACITY.constants["CAPACITY_NO_MEMORY"]

_ANY = 2**62  # resident bytes


@dataclass
class Lists:
    """Lists of integers, one after the other; the same list is kept once."""

    values: list[int] = field(default_factory=list)
    _begins: dict[int, tuple[int, object]] = field(default_factory=dict)

    def begin(self, values: Sequence[int] | None) -> int:
        """Return where a list begins; -1 for none."""
        if values is None:
            return -1
        known = self._begins.get(id(values))
        if known is None:
            known = self._begins[id(values)] = len(self.values), values  # a list that is gone may leave its id
            self.values.extend(values)
        return known[0]


@dataclass(frozen=True)
class CapacityInterval:
    """The first and the last point of a live interval, and where the bytes of the entity's choices begin."""

    first: int
    last: int
    nbytes: int


@dataclass(frozen=True)
class Input:
    """An input, as in capacity.h."""

    producer: int
    first: int
    last: int
    produced: int
    consumed: int
    rows: int
    columns: int
    held: int
    working: int


class NativeCapacity:
    """A problem of capacity.h.

    Parameters
    ----------
    points: int
        The number of program points.
    choices: integers
        The number of choices of each entity.
    resident: integers
        For each entity where its resident bytes begin.
    intervals, inputs: lists
        The live intervals and the inputs of each entity.
    nbytes, specs: Lists
        What numbers for bytes and specs stand for.
    """

    def __init__(
        self,
        points: int,
        choices: Sequence[int],
        resident: Sequence[int],
        intervals: Sequence[Sequence[CapacityInterval]],
        inputs: Sequence[Sequence[Input]],
        nbytes: Lists,
        specs: Lists,
    ):
        self._choices = list(choices)
        lives = [interval for own in intervals for interval in own]
        edges = [one for own in inputs for one in own]
        self._sizes = [(one.rows, one.columns) for one in edges]
        lines = (
            *(choices, resident),
            *(np.cumsum([0, *map(len, intervals)]), [one.first for one in lives], [one.last for one in lives]),
            *([one.nbytes for one in lives], np.cumsum([0, *map(len, inputs)])),
            *([one.producer for one in edges], [one.first for one in edges], [one.last for one in edges]),
            *([one.produced for one in edges], [one.consumed for one in edges]),
            *([one.rows for one in edges], [one.columns for one in edges]),
            *([one.held for one in edges], [one.working for one in edges]),
            *(nbytes.values, specs.values),
        )
        self._arrays = [np.array(line, dtype=np.int64) for line in lines]
        pointers = [array.ctypes.data_as(POINTER(c_int64)) for array in self._arrays]
        self._problem = CapacityProblem(len(choices), points, *pointers)

    def fitting(
        self,
        kept: Sequence[Sequence[int]],
        budget: int,
        resident: tuple[int, int] | None,
        rounds: int,
        check: Callable[[], None],
    ) -> NativeFitting | None:
        """Remove what no plan within the budget contains, of plans whose resident bytes are within a range.

        None when no plan fits. ``check`` is called now and then; its exceptions are raised again.
        """
        begins = np.cumsum([0, *self._choices])
        given = np.zeros(begins[-1], dtype=np.uint8)
        for begin, choices in zip(begins.tolist(), kept, strict=False):
            given[[begin + k for k in choices]] = 1
        least, most = (0, _ANY) if resident is None else resident
        stop, status = StopCheck(check), c_int32()
        handle = library().hidet_dist_fitting_create(
            ctypes.byref(self._problem),
            given.ctypes.data_as(POINTER(c_uint8)),
            *(budget, least, most, rounds),
            *(stop.callback, ctypes.byref(status)),
        )
        if status.value == _STOPPED:
            stop.raise_again()
        if status.value == _NO_MEMORY:
            raise MemoryError("the bytes around a choice need more memory than there is")
        return None if status.value == _EXCEEDED else NativeFitting(handle, begins, self._sizes)


class NativeFitting:
    """What is left of a problem.

    Attributes
    ----------
    kept: the choices of each entity, at least one.
    resident: the least and the most resident bytes of plans that fit.
    """

    def __init__(self, handle: int, begins: npt.NDArray[np.int64], sizes: Sequence[tuple[int, int]]):
        self._handle, self._sizes = handle, sizes
        weakref.finalize(self, library().hidet_dist_fitting_destroy, handle)
        left = np.zeros(begins[-1], dtype=np.uint8)
        library().hidet_dist_fitting_kept(handle, left.ctypes.data_as(POINTER(c_uint8)))
        numbers = np.flatnonzero(left)
        ends = np.searchsorted(numbers, begins).tolist()
        flat = (numbers - np.repeat(begins[:-1], np.diff(ends))).tolist()
        self.kept: list[list[int]] = [flat[a:b] for a, b in itertools.pairwise(ends)]
        bounds = (c_int64 * 2)()
        library().hidet_dist_fitting_resident(handle, bounds)
        self.resident: tuple[int, int] = bounds[0], bounds[1]

    def allowed(self, number: int) -> Mask | None:
        """Tell for each conversion of an input, from the specs produced to those required, if it is left.

        None if all are.
        """
        pairs = library().hidet_dist_fitting_allowed(self._handle, number)
        if not pairs:
            return None
        rows, columns = self._sizes[number]
        return np.ctypeslib.as_array(pairs, (rows * columns,)).reshape(rows, columns).astype(np.bool_)
