"""The tables of a tensor's conversions: their cost, and the price of the memory that they hold."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from hidet_dist.search import tuning
from hidet_dist.search.network import Table, Tables, TensorTable, TooWide
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import ConvertedTensor, Edge, Problem

MOST_DIMS = 64
"""The most dims of an array in NumPy."""


def tensor_bytes(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, tensor: int
) -> tuple[TensorTable, ...]:
    """Make the tables of the priced bytes that a tensor's conversions hold.

    ``problem`` has no costs (:attr:`Problem.without_costs`). The tables have the dims of those of :func:`network_of`,
    for a tensor that is not relaxed there.
    """
    group, memory = problem.groups[tensor], problem.activations.tensors[tensor]
    recipe = tensor_tables(tables, kept, group, Priced(memory, Spans(prices, group)), math.inf)
    assert recipe is not None  # without a limit none is
    return recipe


def tensor_tables(
    tables: Tables, kept: Sequence[Sequence[int]], group: Sequence[Edge], priced: Priced | None, limit: float
) -> tuple[TensorTable, ...] | None:
    """Make the table of a tensor; None if it is to be relaxed: it has too many readers, or a large table.

    Only readers that may require several specs count, and ``limit`` is the most of them. Without a limit, a large table
    raises TooWide.
    """
    first = group[0]
    produced = tuple(map(first.produced.__getitem__, kept[first.producer]))
    consumed = [tuple(map(edge.consumed.__getitem__, kept[edge.consumer])) for edge in group]
    if len(group) == 1:
        return (_pair(tables, first.convert, produced, consumed[0], priced),)
    required = [tuple(dict.fromkeys(specs)) for specs in consumed]
    size = len(dict.fromkeys(produced)) * math.prod(map(len, required))
    if sum(len(specs) > 1 for specs in required) > limit or (size > tuning.TENSOR_ENTRIES and limit < math.inf):
        return None
    if size > tuning.TENSOR_ENTRIES:
        raise TooWide
    # A consumer that can only require one spec needs no dim, but extends the live interval of that spec.
    fixed = [i for i, specs in enumerate(required) if len(specs) == 1]
    open_ = [i for i, specs in enumerate(required) if len(specs) > 1]
    certain = tuple(required[i][0] for i in fixed)
    if priced is None:
        certain = tuple(sorted(set(certain)))
    else:
        priced = priced.reordered((*fixed, *open_))
    consumers = [(i, group[i].consumer) for i in open_]
    return (_tensor(tables, group, produced, certain, consumers, [consumed[i] for i in open_], priced),)


def share_tables(
    tables: Tables, kept: Sequence[Sequence[int]], group: Sequence[Edge], priced: Priced | None
) -> tuple[TensorTable, ...]:
    """Relax a tensor: each reader pays its share of the least that the conversion can cost.

    Of the memory, it pays its share of what its own conversion holds for it.
    """
    convert, producer = group[0].convert, group[0].producer
    sources = tuple(dict.fromkeys(map(group[0].produced.__getitem__, kept[producer])))
    least = np.array(convert)[list(sources)].min(axis=0) / len(group)
    held = None if priced is None else np.array(least_held(priced.memory, sources), dtype=float)
    result = []
    for end, edge in enumerate(group, 1):
        specs = tuple(map(edge.consumed.__getitem__, kept[edge.consumer]))
        price = 0.0 if priced is None else priced.spans.share[end - 1]
        key = ("share", id(convert), sources, len(group), specs, price and priced and (id(priced.memory), price))
        number = tables.find(key)
        if number is None:
            seconds = tables.rounded(least[list(specs)])
            if price and held is not None:
                seconds = seconds + tables.rounded(price * held[list(specs)])
            number = tables.add(key, seconds)
        result.append(TensorTable(number, ((end, len(specs), None),)))
    return tuple(result)


def least_held(memory: ConvertedTensor, sources: Sequence[int]) -> list[int]:
    """List the bytes that a tensor in each spec holds at least, if it is converted from one of the ``sources``."""
    layouts = {memory.layout[source] for source in sources}
    return [0 if layout in layouts else n for layout, n in zip(memory.layout, memory.nbytes, strict=True)]


def overlapping(group: Sequence[Edge]) -> list[int]:
    """Count, for each edge of a tensor, those for which a converted tensor is held at one of its program points."""
    begins, ends = sorted(edge.begin for edge in group), sorted(edge.end for edge in group)
    return [bisect_right(begins, edge.end) - bisect_left(ends, edge.begin) for edge in group]


class Spans:
    """The prices of the time that a tensor's conversions are held for its readers, in seconds per byte, by reader.

    Attributes
    ----------
    before: from the first reader's begin to the reader's own.
    after: from the reader's begin to its end.
    making: at the reader's begin.
    share: from the reader's begin to its end, divided by the number of readers that may hold the tensor beside it.
    order: the readers in the order of their begin.
    key: equal for equal spans.
    """

    def __init__(self, prices: Prices, group: Sequence[Edge]):
        until, start = prices.until, min(edge.begin for edge in group)
        self.before = tuple(until[edge.begin] - until[start] for edge in group)
        self.after = tuple(until[edge.end + 1] - until[edge.begin] for edge in group)
        self.making = tuple(prices.at[edge.begin] for edge in group)
        self.share = tuple(after / n for after, n in zip(self.after, overlapping(group), strict=True))
        self.order = tuple(sorted(range(len(group)), key=lambda i: group[i].begin))
        self.key = self.before, self.after, self.making, self.share, self.order

    def reordered(self, order: Sequence[int]) -> Spans:
        """The same, with the readers in another order."""
        result = copy.copy(self)
        result.before, result.after, result.making, result.share = (
            tuple(values[i] for i in order) for values in (self.before, self.after, self.making, self.share)
        )
        place = {reader: n for n, reader in enumerate(order)}
        result.order = tuple(place[reader] for reader in self.order)
        result.key = result.before, result.after, result.making, result.share, result.order
        return result


class Priced:
    """The cost, at given prices, of the memory of a tensor's conversions."""

    def __init__(self, memory: ConvertedTensor, spans: Spans):
        self.memory, self.spans = memory, spans
        self.key = (id(memory), spans.key)

    def reordered(self, order: Sequence[int]) -> Priced:
        """The same, with the readers in another order."""
        return Priced(self.memory, self.spans.reordered(order))

    def seconds(self, sources: Sequence[int], spec: int, requires: Sequence[npt.NDArray[np.bool_]]) -> Table:
        """Cost the tensor's bytes in ``spec``, in seconds, by source (first dim) and the readers' required specs."""
        shape = np.broadcast_shapes(*(mask.shape for mask in requires))
        first = np.full(shape, np.inf)
        last = np.full(shape, -np.inf)
        making = np.zeros(shape)
        spans = self.spans
        for i in reversed(spans.order):
            first = np.where(requires[i], np.minimum(first, spans.before[i]), first)
            last = np.where(requires[i], np.maximum(last, spans.before[i] + spans.after[i]), last)
            making = np.where(requires[i], spans.making[i], making)
        span = np.where(last >= first, last - first, 0.0) if shape else np.zeros(())
        layout = self.memory.layout
        column = [len(sources)] + [1] * (len(shape) - 1)
        other = np.array([float(layout[s] != layout[spec]) for s in sources]).reshape(column)
        working = np.zeros(column)
        if making.any():
            flat = [self.memory.working(s, spec) if layout[s] != layout[spec] else 0 for s in sources]
            working = np.array(flat, dtype=float).reshape(column)
        return other * self.memory.nbytes[spec] * span + working * making


def _pair(
    tables: Tables,
    convert: tuple[tuple[float, ...], ...],
    produced: tuple[int, ...],
    consumed: tuple[int, ...],
    priced: Priced | None,
) -> TensorTable:
    """Make the table of a tensor with one reader, over specs on a side where choices share them, else over choices."""
    dims: list[tuple[int, int, int | None]] = []
    sides = []
    for end, specs in enumerate((produced, consumed)):
        distinct = tuple(dict.fromkeys(specs))
        shared = len(distinct) * tuning.SHARED_SPECS < len(specs)
        dims.append(_dim(tables, end, specs, True) if shared else (end, len(specs), None))
        sides.append(distinct if shared else specs)
    key: Hashable = ("pair", id(convert), *sides, priced and priced.key)
    number = tables.find(key)
    if number is None:
        table = np.array(convert)[np.ix_(*sides)]
        if priced is not None:
            always = [np.ones((1,), dtype=bool)]
            columns = {spec: priced.seconds(sides[0], spec, always) for spec in dict.fromkeys(sides[1])}
            table = table + np.stack([columns[spec] for spec in sides[1]], axis=1)
        number = tables.add(key, tables.rounded(table))
    return TensorTable(number, tuple(dims))


def _tensor(
    tables: Tables,
    group: Sequence[Edge],
    produced: tuple[int, ...],
    certain: tuple[int, ...],
    consumers: Sequence[tuple[int, int]],
    consumed: Sequence[tuple[int, ...]],
    priced: Priced | None,
) -> TensorTable:
    """Make the table of a tensor with several readers: each distinct required spec is paid once.

    ``certain`` are the specs of readers that can only require one; ``consumers`` are the others, each with its number
    among the readers.
    """
    convert = group[0].convert
    sources = tuple(dict.fromkeys(produced))
    required = [tuple(dict.fromkeys(specs_required)) for specs_required in consumed]
    key: Hashable = ("tensor", id(convert), sources, certain, tuple(required), priced and priced.key)
    number = tables.find(key)
    if number is None:
        seconds = np.array(convert)[list(sources)]
        shape = [len(sources), *map(len, required)]
        if len(shape) > MOST_DIMS:
            raise TooWide
        tables.reserve(math.prod(shape))
        table = np.zeros(shape)
        for spec in sorted(set(certain).union(*required)):
            tables.limits.check()
            # For one spec it only matters which readers require it: two values a reader.
            asking = [i for i, own_specs in enumerate(required, 1) if spec in own_specs]
            requires = [np.full([1] * len(shape), specs_required == spec) for specs_required in certain]
            needed = np.full([1] * len(shape), spec in certain)
            for dim in range(1, len(shape)):
                line = [1] * len(shape)
                line[dim] = 2 if dim in asking else 1
                requires.append(np.arange(line[dim]).reshape(line) == 1)
                needed = needed | requires[-1]
            paid = tables.rounded(seconds[:, spec].reshape([-1] + [1] * len(required)))
            own = needed * paid
            if priced is not None:
                own = own + tables.rounded(priced.seconds(sources, spec, requires))
            for dim in asking:
                own = own.take([int(other == spec) for other in required[dim - 1]], axis=dim)
            table += own
        number = tables.add(key, table)
    dims = [_dim(tables, 0, produced, False)]
    taken = {group[0].producer} if dims[0][2] is None else set()
    for (place, entity), specs in zip(consumers, consumed, strict=True):
        dims.append(_dim(tables, 1 + place, specs, entity in taken))
        if dims[-1][2] is None:
            taken.add(entity)
    return TensorTable(number, tuple(dims))


def _dim(tables: Tables, end: int, specs: tuple[int, ...], tied: bool) -> tuple[int, int, int | None]:
    """Make a dim over the specs of an entity's choices: over the choices, if each has another spec, unless ``tied``."""
    distinct = tuple(dict.fromkeys(specs))
    if len(distinct) == len(specs) and not tied:
        return end, len(specs), None
    key: Hashable = ("spec", specs)
    number = tables.find(key)
    if number is None:
        number = tables.add(key, np.where(np.array(specs)[:, None] == np.array(distinct)[None, :], 0.0, math.inf))
    return end, len(distinct), number
