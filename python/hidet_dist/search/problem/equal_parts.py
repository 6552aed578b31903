"""The numbers of equal entities and tensors of a problem, and of those that are equal at given prices and choices.

Equal layers have equal entities and tensors: their tables are made once. What tells them apart, apart from prices and
choices, is found once for a problem. The rest is filled in for all of them at once, as rows of 64-bit numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hidet_dist.search.problem.prices import Prices
    from hidet_dist.search.problem.problem import ConvertedTensor, Edge, LiveInterval, Problem

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Numbers:
    """Numbers of keys: equal keys have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._of_lists: dict[int, int] = {}

    def of(self, key: Hashable) -> int:
        """Number a key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def of_list(self, values: Sequence[float]) -> int:
        """Number a list by its content. The same object, which must live on, is only read once."""
        number = self._of_lists.get(id(values))
        if number is None:
            number = self._of_lists[id(values)] = self.of(tuple(values))
        return number


class _Arrays:
    """Lists as arrays; the same object, which must live on, is only read once."""

    def __init__(self) -> None:
        self._arrays: dict[int, Floats] = {}

    def of(self, values: Sequence[float] | Sequence[Sequence[float]]) -> Floats:
        array = self._arrays.get(id(values))
        if array is None:
            array = self._arrays[id(values)] = np.array(values, dtype=np.float64)
        return array


@dataclass(frozen=True)
class Alike:
    """Numbers of equal things.

    Attributes
    ----------
    first: for each number what tells its things from others, and the place of the first of them.
    numbers: the number of each thing, in order.
    """

    first: list[tuple[bytes, int]]
    numbers: list[int]


class EqualParts:
    """What equal entities, and equal tensors, of a problem have in common.

    Attributes
    ----------
    tensors: the tensors with their numbers.
    kinds: the number of each entity; those with equal costs and bytes have the same.
    costs, memory: the seconds and the bytes of each entity's choices.
    held: the first and the last program point of each entity's live intervals, and the bytes by choice.
    ends: the producer and the consumers of each tensor, one tensor after the other.
    ends_begin: where the ends of each tensor begin.
    """

    def __init__(self, problem: Problem):
        number, array = Numbers(), _Arrays()
        self._number_entities(problem, number, array)
        self._number_tensors(problem, number, array)

    def _number_entities(self, problem: Problem, number: Numbers, array: _Arrays) -> None:
        own: list[list[LiveInterval]] = [[] for _ in problem.cost]
        for interval in problem.activations.intervals:
            own[interval.entity].append(interval)
        self.costs = [array.of(costs) for costs in problem.cost]
        self.memory = [array.of(memory) for memory in problem.memory]
        self.held = [[((i.begin, i.end), array.of(i.nbytes)) for i in intervals] for intervals in own]
        self.kinds = [
            number.of((number.of_list(cost), number.of_list(memory), *(number.of_list(i.nbytes) for i in intervals)))
            for cost, memory, intervals in zip(problem.cost, problem.memory, own, strict=True)
        ]
        self._entities = _RaggedRows([2 + len(intervals) for intervals in own])
        self._entities.fixed[self._entities.begins] = self.kinds
        self._held_at = self._entities.places(2, [len(intervals) for intervals in own])
        self._held_begin = np.array([i.begin for intervals in own for i in intervals], dtype=np.int64)
        self._held_end = np.array([i.end for intervals in own for i in intervals], dtype=np.int64)

    def _number_tensors(self, problem: Problem, number: Numbers, array: _Arrays) -> None:
        self.tensors = [
            EqualTensor(tensor, group, problem.activations.tensors.get(tensor), number, array.of(group[0].convert))
            for tensor, group in problem.groups.items()
        ]
        counts = [len(tensor.ends) for tensor in self.tensors]
        converted = [tensor if tensor.memory is not None else None for tensor in self.tensors]
        lives = [() if tensor is None else tensor.lives for tensor in converted]
        self.ends = np.array([end for tensor in self.tensors for end in tensor.ends], dtype=np.int64)
        self.ends_begin = np.cumsum([0, *counts])[:-1]
        self._rows = _RaggedRows([2 + count + 3 * len(own) for count, own in zip(counts, lives, strict=True)])
        self._rows.fixed[self._rows.begins] = [tensor.kind for tensor in self.tensors]
        self._ends_at = self._rows.places(2, counts)
        behind = 2 + np.array(counts, dtype=np.int64)
        self._lives_at = self._rows.places(behind, [3 * len(own) for own in lives])
        self._live_begin = np.array([begin for own in lives for begin, _ in own], dtype=np.int64)
        self._live_end = np.array([end for own in lives for _, end in own], dtype=np.int64)
        self._live_first = np.array(
            [tensor.begin for tensor in converted if tensor is not None for _ in tensor.lives], dtype=np.int64
        )

    def entities(self, left: Integers, prices: Prices) -> Alike:
        """Number the entities: equal ones have equal tables, here and at other prices with an equal key.

        ``left`` numbers the choices that are left of each entity.
        """
        rows = self._entities.fixed.copy()
        rows[self._entities.begins + 1] = left
        if prices.total:
            until = np.array(prices.until)
            rows[self._held_at] = (until[self._held_end + 1] - until[self._held_begin]).view(np.int64)
        return self._entities.numbers(rows)

    def tensors_alike(self, left: Integers, prices: Prices, limits: Mapping[int, float]) -> Alike:
        """Number the tensors by position: equal ones have equal tables, here and at other prices with an equal key.

        ``left`` numbers the choices that are left of each entity. ``limits`` are those of readers, for the tensors that
        have one of their own: they differ from tensors with another limit.
        """
        rows = self._rows.fixed.copy()
        if limits:
            own_limits = np.array([limits.get(tensor.tensor, 0.0) for tensor in self.tensors], dtype=np.float64)
            rows[self._rows.begins + 1] = own_limits.view(np.int64)
        rows[self._ends_at] = left[self.ends]
        if prices.total:
            until, at = np.array(prices.until), np.array(prices.at)
            first = until[self._live_first]
            own = (until[self._live_begin] - first, until[self._live_end + 1] - first, at[self._live_begin])
            rows[self._lives_at] = np.stack(own, axis=-1).ravel().view(np.int64)
        return self._rows.numbers(rows)


class _RaggedRows:
    """Rows of 64-bit numbers, of different lengths, one after the other.

    Attributes
    ----------
    begins: where each row begins.
    fixed: the numbers; 0 where they depend on prices or choices.
    """

    def __init__(self, lengths: Sequence[int]):
        ends = np.cumsum(lengths, dtype=np.int64)
        self.begins = ends - np.array(lengths, dtype=np.int64)
        self.fixed = np.zeros(sum(lengths), dtype=np.int64)
        size = self.fixed.itemsize
        self._slices = [*map(slice, (self.begins * size).tolist(), (ends * size).tolist())]

    def places(self, offset: int | Integers, counts: Sequence[int]) -> Integers:
        """List the places of ``counts[n]`` numbers of each row n, from an offset on."""
        return ranges(self.begins + offset, np.array(counts, dtype=np.int64))

    def numbers(self, rows: Integers) -> Alike:
        """Number equal rows in the order of their first ones."""
        keys = [*map(rows.tobytes().__getitem__, self._slices)]
        first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        return Alike([(key, first[key]) for key in number], [*map(number.__getitem__, keys)])


def ranges(begins: Integers, counts: Integers) -> Integers:
    """Join the ranges of ``counts[n]`` numbers from ``begins[n]`` on."""
    ends = np.cumsum(counts)
    joined: Integers = np.repeat(begins - ends + counts, counts)
    return joined + np.arange(len(joined))


def crossed(rows: Sequence[int], columns: Sequence[int]) -> tuple[Integers, Integers]:
    """Return the indices of some rows and some columns of a matrix (as :func:`numpy.ix_`, which takes longer)."""
    return np.array(rows, dtype=np.int64)[:, None], np.array(columns, dtype=np.int64)


class EqualTensor:
    """A tensor with its number among equal ones.

    Attributes
    ----------
    tensor, group: the tensor's number in the problem, and its edges.
    kind: the number of the tensors with equal conversions, specs, memory and order of the readers' live intervals.
    convert: the seconds of its conversions.
    memory: the memory of its conversions, if they hold any.
    ends: the producer and the consumers.
    begin, end: the program points of the first and the last reader.
    lives: the first and the last program point of each reader.
    """

    __slots__ = ("begin", "convert", "end", "ends", "group", "kind", "lives", "memory", "tensor")

    def __init__(
        self, tensor: int, group: Sequence[Edge], memory: ConvertedTensor | None, number: Numbers, convert: Floats
    ):
        first, consumers = group[0], [edge.consumer for edge in group]
        self.tensor, self.group, self.memory, self.convert = tensor, group, memory, convert
        self.ends = (first.producer, *consumers)
        self.lives = tuple((edge.begin, edge.end) for edge in group)
        self.begin, self.end = min(begin for begin, _ in self.lives), max(end for _, end in self.lives)
        order = sorted(range(len(group)), key=lambda i: group[i].begin)
        begins, first_of = [group[i].begin for i in order], dict[int, int]()
        for i, consumer in enumerate(consumers):
            first_of.setdefault(consumer, i)
        self.kind = number.of(
            (
                *(id(first.convert), number.of_list(first.produced), id(memory), first.producer in first_of),
                tuple((number.of_list(edge.consumed), first_of[edge.consumer]) for edge in group),
                # Which of the readers' intervals begin before which others end, and their order.
                tuple(bisect_right(begins, end) for _, end in self.lives) if len(group) > 1 else (),
                tuple(order),
            )
        )
