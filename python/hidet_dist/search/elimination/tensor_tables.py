"""The tables of a tensor's conversions: their cost, and the price of the memory that they hold."""

from __future__ import annotations

import copy
import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from hidet_dist.search import tuning
from hidet_dist.search.elimination.layout import TensorTable
from hidet_dist.search.elimination.network import Table, Tables, TooWide
from hidet_dist.search.elimination.tensor_relaxation import TensorRelaxation
from hidet_dist.search.problem import ConvertedTensor, Edge
from hidet_dist.search.problem.equal_parts import EqualTensor, crossed
from hidet_dist.search.problem.prices import Prices

MOST_DIMS = 64
"""The most dims of an array in NumPy."""


def tensor_bytes(
    kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, tensor: EqualTensor
) -> tuple[TensorTable, ...]:
    """Make the tables of the priced bytes that a tensor's conversions hold.

    The tensor is one of a problem without costs (:attr:`Problem.without_costs`). The tables have the dims of those of
    :func:`network_of`, for a tensor that is not relaxed there.
    """
    recipe = tensor_tables(tables, kept, tensor, prices, math.inf)
    assert recipe is not None  # without a limit none is
    return recipe


def tensor_tables(
    tables: Tables, kept: Sequence[Sequence[int]], tensor: EqualTensor, prices: Prices, limit: float
) -> tuple[TensorTable, ...] | None:
    """Make the table of a tensor; None if it is to be relaxed: it has too many readers, or a large table.

    Only readers that may require several specs count, and ``limit`` is the most of them. Without a limit, a large table
    raises TooWide.
    """
    group, first = tensor.group, tensor.group[0]
    produced = tuple(map(first.produced.__getitem__, kept[first.producer]))
    consumed = [tuple(map(edge.consumed.__getitem__, kept[edge.consumer])) for edge in group]
    if len(group) == 1:
        return (_pair(tables, tensor, produced, consumed[0], prices),)
    required = [tuple(dict.fromkeys(specs)) for specs in consumed]
    if sum(len(specs) > 1 for specs in required) > limit:
        return None
    size = len(set(produced)) * math.prod(map(len, required))
    if size > tuning.TENSOR_ENTRIES and limit < math.inf:
        return None
    if size > tuning.TENSOR_ENTRIES:
        raise TooWide
    # A consumer that can only require one spec needs no dim, but extends the live interval of that spec.
    fixed = [i for i, specs in enumerate(required) if len(specs) == 1]
    open_ = [i for i, specs in enumerate(required) if len(specs) > 1]
    certain = tuple(required[i][0] for i in fixed)
    priced = _priced(tensor, prices)
    if priced is None:
        certain = tuple(sorted(set(certain)))
    else:
        priced = priced.reordered((*fixed, *open_))
    consumers = [(i, group[i].consumer) for i in open_]
    return (_tensor(tables, tensor, produced, certain, consumers, [consumed[i] for i in open_], priced),)


def split_tables(
    tables: Tables,
    kept: Sequence[Sequence[int]],
    tensor: EqualTensor,
    prices: Prices,
    relaxation: TensorRelaxation,
) -> tuple[TensorTable, ...]:
    """Relax a tensor: each reader pays its portion of the least that the conversion can cost.

    Of the memory, a reader pays its portion of what its own conversion holds for it.
    """
    group, priced = tensor.group, _priced(tensor, prices)
    convert, producer = group[0].convert, group[0].producer
    sources = tuple(dict.fromkeys(map(group[0].produced.__getitem__, kept[producer])))
    least = tensor.convert[list(sources)].min(axis=0)
    portions = relaxation.of(tensor.tensor, len(group), len(least))
    held = None if priced is None else np.array(least_held(priced.memory, sources), dtype=float)
    result = []
    for end, edge in enumerate(group, 1):
        specs = tuple(map(edge.consumed.__getitem__, kept[edge.consumer]))
        price = 0.0 if priced is None else priced.spans.portion[end - 1]
        own = portions[end - 1][list(specs)]
        key = ("split", id(convert), sources, own.tobytes(), specs, price and priced and (id(priced.memory), price))
        number = tables.find(key)
        if number is None:
            seconds = tables.rounded(least[list(specs)] * own)
            if price and held is not None:
                seconds = seconds + tables.rounded(price * held[list(specs)])
            number = tables.add(key, seconds)
        result.append(TensorTable(number, ((end, len(specs), None),)))
    return tuple(result)


def pair_tables(
    tables: Tables, kept: Sequence[Sequence[int]], tensor: EqualTensor, prices: Prices, relaxation: TensorRelaxation
) -> tuple[TensorTable, ...]:
    """Relax a tensor: each reader pays its portion of the conversion from the spec that the producer makes.

    The bound is greater than that of :func:`split_tables`, and the graph wider: all readers are beside the producer. Of
    the memory, a reader pays its portion of what its own conversion holds for it.
    """
    group, priced = tensor.group, _priced(tensor, prices)
    convert = group[0].convert
    portions = relaxation.of(tensor.tensor, len(group), len(convert[0]))
    result = []
    for reader in range(len(group)):
        produced, consumed = _specs_of_pair(kept, group, reader)
        rows, columns = _values(produced), _values(consumed)
        price = 0.0 if priced is None else priced.spans.portion[reader]
        own = portions[reader][list(columns)]
        key = ("pairs", id(convert), rows, columns, own.tobytes(), price and priced and (id(priced.memory), price))
        number = tables.find(key)
        if number is None:
            at = crossed(rows, columns)
            seconds = tables.rounded(tensor.convert[at] * own)
            if price and priced is not None:
                seconds = seconds + tables.rounded(price * priced.memory.held[at])
            number = tables.add(key, seconds)
        dims = _pair_dim(tables, 0, produced, rows), _pair_dim(tables, 1 + reader, consumed, columns)
        result.append(TensorTable(number, dims))
    return tuple(result)


def relaxed_bytes(kept: Sequence[Sequence[int]], tensor: EqualTensor, paired: bool) -> list[Table]:
    """Tabulate what each reader of a relaxed tensor pays for of the bytes at a point of its own live interval.

    The tables have the dims of those of :func:`pair_tables`, or of :func:`split_tables` unless ``paired``.
    """
    group, memory, beside = tensor.group, tensor.memory, overlapping(tensor.group)
    assert memory is not None
    result: list[Table] = []
    for reader in range(len(group)):
        produced, consumed = _specs_of_pair(kept, group, reader)
        if paired:
            result.append(memory.held[crossed(_values(produced), _values(consumed))] // beside[reader])
        else:
            nbytes = least_held(memory, sorted(set(produced)))
            result.append(np.array([float(nbytes[spec] // beside[reader]) for spec in consumed]))
    return result


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
    portion: from the reader's begin to its end, divided by the number of readers that may hold the tensor beside it.
    order: the readers in the order of their begin.
    key: equal for equal spans.
    """

    def __init__(self, prices: Prices, group: Sequence[Edge]):
        until, start = prices.until, min(edge.begin for edge in group)
        self.before = tuple(until[edge.begin] - until[start] for edge in group)
        self.after = tuple(until[edge.end + 1] - until[edge.begin] for edge in group)
        self.making = tuple(prices.at[edge.begin] for edge in group)
        self.portion = tuple(after / n for after, n in zip(self.after, overlapping(group), strict=True))
        self.order = tuple(sorted(range(len(group)), key=lambda i: group[i].begin))
        self.key = self.before, self.after, self.making, self.portion, self.order

    def reordered(self, order: Sequence[int]) -> Spans:
        """The same, with the readers in another order."""
        result = copy.copy(self)
        result.before, result.after, result.making, result.portion = (
            tuple(values[i] for i in order) for values in (self.before, self.after, self.making, self.portion)
        )
        place = {reader: n for n, reader in enumerate(order)}
        result.order = tuple(place[reader] for reader in self.order)
        result.key = result.before, result.after, result.making, result.portion, result.order
        return result


class Priced:
    """The cost, at given prices, of the memory of a tensor's conversions."""

    def __init__(self, memory: ConvertedTensor, spans: Spans):
        self.memory, self.spans = memory, spans
        self.key = (id(memory), spans.key)

    def reordered(self, order: Sequence[int]) -> Priced:
        """The same, with the readers in another order."""
        return Priced(self.memory, self.spans.reordered(order))

    def seconds(self, sources: Sequence[int], specs: Sequence[int], requires: Sequence[npt.NDArray[np.bool_]]) -> Table:
        """Cost the tensor's bytes in each of ``specs`` (first dim), in seconds, by source (second dim).

        ``requires`` tells for each reader, in equally many dims, whether it requires the spec.
        """
        shape = np.broadcast_shapes(*(mask.shape for mask in requires))
        first = np.full(shape, np.inf)
        last = np.full(shape, -np.inf)
        making = np.zeros(shape)
        spans = self.spans
        for i in reversed(spans.order):
            first = np.where(requires[i], np.minimum(first, spans.before[i]), first)
            last = np.where(requires[i], np.maximum(last, spans.before[i] + spans.after[i]), last)
            making = np.where(requires[i], spans.making[i], making)
        span = np.where(last >= first, last - first, 0.0)
        column = [len(specs), len(sources)] + [1] * (len(shape) - 2)
        at = crossed(sources, specs)
        result: Table = self.memory.held[at].T.reshape(column) * span
        if making.any():
            result = result + self.memory.worked[at].T.reshape(column) * making
        return result


def _priced(tensor: EqualTensor, prices: Prices) -> Priced | None:
    """Return the price of the memory of a tensor's conversions, if it has one."""
    if tensor.memory is None or not prices.total or not prices.span(tensor.begin, tensor.end):
        return None
    return Priced(tensor.memory, Spans(prices, tensor.group))


def _pair(
    tables: Tables, tensor: EqualTensor, produced: tuple[int, ...], consumed: tuple[int, ...], prices: Prices
) -> TensorTable:
    """Make the table of a tensor with one reader, over specs on a side where choices share them, else over choices."""
    memory, edge = tensor.memory, tensor.group[0]
    sides, held, making = (_values(produced), _values(consumed)), 0.0, 0.0
    if memory is not None and prices.total:
        held, making = prices.span(edge.begin, edge.end), prices.at[edge.begin]
    key: Hashable = ("pair", id(edge.convert), *sides, held and (id(memory), held, making))
    number = tables.find(key)
    if number is None:
        at = crossed(*sides)
        table = tensor.convert[at]
        if memory is not None and held:
            priced = memory.held[at] * held
            table += priced + memory.worked[at] * making if making else priced
        number = tables.add(key, tables.rounded(table))
    return TensorTable(number, (_pair_dim(tables, 0, produced, sides[0]), _pair_dim(tables, 1, consumed, sides[1])))


def _specs_of_pair(
    kept: Sequence[Sequence[int]], group: Sequence[Edge], reader: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the specs that the choices of a tensor's producer make, and those that one reader's require."""
    edge = group[reader]
    produced = map(edge.produced.__getitem__, kept[edge.producer])
    return tuple(produced), tuple(map(edge.consumed.__getitem__, kept[edge.consumer]))


def _values(specs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the specs of the values of a dim: each spec once, where choices share them, else one for each choice."""
    distinct = tuple(dict.fromkeys(specs))
    return distinct if len(distinct) * tuning.SHARED_SPECS < len(specs) else specs


def _pair_dim(tables: Tables, end: int, specs: tuple[int, ...], values: tuple[int, ...]) -> tuple[int, int, int | None]:
    """Make the dim over the ``values`` of an entity's specs (:func:`_values`)."""
    return (end, len(specs), None) if values is specs else _dim(tables, end, specs, True)


def _tensor(
    tables: Tables,
    tensor: EqualTensor,
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
    convert, producer = tensor.group[0].convert, tensor.group[0].producer
    sources = tuple(dict.fromkeys(produced))
    required = [tuple(dict.fromkeys(specs_required)) for specs_required in consumed]
    key: Hashable = ("tensor", id(convert), sources, certain, tuple(required), priced and priced.key)
    number = tables.find(key)
    if number is None:
        shape = [len(sources), *map(len, required)]
        if len(shape) >= MOST_DIMS:
            raise TooWide
        tables.reserve(math.prod(shape))
        table, always = np.zeros(shape), np.zeros(len(sources))
        places = [{spec: n for n, spec in enumerate(specs)} for specs in required]
        specs = sorted(set(certain).union(*required))
        each = max(1, tuning.CHUNK_ENTRIES // (len(sources) << len(required)))
        for at in range(0, len(specs), each):
            tables.limits.check()
            some = specs[at : at + each]
            # For one spec it only matters which readers require it: two values a reader.
            requires = _requires(some, certain, len(required))
            paid = tables.rounded(tensor.convert[crossed(sources, some)].T)
            needed = functools.reduce(np.logical_or, requires)
            lines: Table = np.where(needed, paid.reshape([*paid.shape] + [1] * len(required)), 0.0)
            if priced is not None:
                lines = lines + tables.rounded(priced.seconds(sources, some, requires))
            always += lines.reshape(len(some), len(sources), -1)[:, :, 0].sum(axis=0)
            for spec, line in zip(some, lines, strict=True):
                _add_readers(table, line, [of_reader.get(spec) for of_reader in places])
        table += always.reshape([-1] + [1] * len(required))
        number = tables.add(key, table)
    dims = [_dim(tables, 0, produced, False)]
    taken = {producer} if dims[0][2] is None else set()
    for (place, entity), own_specs in zip(consumers, consumed, strict=True):
        dims.append(_dim(tables, 1 + place, own_specs, entity in taken))
        if dims[-1][2] is None:
            taken.add(entity)
    return TensorTable(number, tuple(dims))


def _add_readers(table: Table, line: Table, places: Sequence[int | None]) -> None:
    """Add to the table of a tensor what it costs that readers require one spec, beyond its cost if none does.

    ``line`` has the cost for each source (first dim) by which readers require the spec, and ``places`` where that is in
    the dims of the table, if they may. What a reader adds to the readers before it is added where it requires the spec
    alone: sums are exact, so that their order does not matter.
    """
    readers = len(places)
    for reader, place in enumerate(places):
        if place is None:
            continue
        behind = [0] * (readers - reader - 1)
        before, after = (line[(..., bit, *behind)] for bit in (0, 1))  # equal ones may be infinite
        added = np.subtract(after, before, out=np.zeros_like(after), where=after != before)
        if not added.any():
            continue
        for dim, other in enumerate(places[:reader], 1):
            asks = np.zeros(table.shape[dim], dtype=np.int8)
            if other is not None:
                asks[other] = 1
            added = added.take(asks, axis=dim)
        slab = table[(slice(None),) * (1 + reader) + (place,)]
        slab += added.reshape([*added.shape] + [1] * len(behind))


def _requires(specs: Sequence[int], certain: Sequence[int], readers: int) -> list[npt.NDArray[np.bool_]]:
    """Tell whether readers require each of ``specs`` (first dim; the second is for the sources).

    First those that certainly require one, then those that may: another dim for each, with 0 if it does not.
    """
    column = [-1] + [1] * (1 + readers)
    each = np.array(specs).reshape(column)
    result: list[npt.NDArray[np.bool_]] = [each == spec for spec in certain]
    for reader in range(readers):
        line = [1] * (2 + readers)
        line[2 + reader] = 2
        result.append(np.array([False, True]).reshape(line))
    return result


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
