"""Exact minimisation by variable elimination, for the problem without its memory budget.

The cost of a plan is a sum of small tables: one an entity, one a tensor over its producer and consumers. Eliminating
a variable adds up the tables that it occurs in and takes the minimum over it, which leaves a table over its neighbours
(Bertele and Brioschi, Nonserial Dynamic Programming, 1972; Dechter's bucket elimination, AI 113, 1999). Graphs of
neural networks are narrow, so the tables stay small.

Repeated blocks are solved once: tables are numbered by content, and an elimination of the same tables in the same way
is looked up. Layers need not be declared equal for that, and need not get the same plan.

A tensor that very many operators read (an attention mask, a table of cosines) would make one table over all of them.
It is relaxed: each reader pays its share of the least cost of the conversion, which gives a lower bound. A second
elimination, with the required specs of these readers fixed, gives a plan. Both bound and cost are reported.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import math
import string
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from hidet_dist.runtime.native.sums import lower_by_sums
from hidet_dist.search import tuning
from hidet_dist.search.limits import Limits
from hidet_dist.search.prices import Prices
from hidet_dist.search.problem import ConvertedTensor, Edge, Problem, evaluate, held_bytes, readers

Table = npt.NDArray[np.float64]

_DIMS = 64  # the most dims of an array in NumPy


class TooWide(Exception):
    """A graph with a part so densely connected that elimination would take too long, or too much memory."""


@dataclass(frozen=True)
class Eliminated:
    """The result of an elimination: choices, their cost in ``seconds``, and a lower ``bound`` of every plan's cost.

    Both include the price of memory, if there is one.
    """

    choices: tuple[int, ...]
    seconds: float
    bound: float


class Tables:
    """Numbered tables; tables of the same key are one table, computed once.

    Costs are multiples of a quantum so small that their sums are exact in double precision. Sums of the same terms are
    then equal to the last bit, in any order of addition. Along a chain of equal layers, the table that sums up all
    layers behind, less its least entry, soon stays the same: further layers are looked up.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self.nbytes = 0
        self.widest = 0.0  # additions of the largest step so far
        self.tables: list[Table] = []
        self.quantum = 0.0
        self.left: dict[Hashable, tuple[int, float]] = {}  # of each elimination: the resulting table, and its offset
        self.last: _Solved | None = None  # the last network that was eliminated without tensors treated exactly
        self._numbers: dict[Hashable, int] = {}

    def rounded(self, table: Table) -> Table:
        """Round down to multiples of the quantum: a lower bound stays a lower bound."""
        return np.floor(table / self.quantum) * self.quantum if self.quantum else table

    def make_room(self) -> None:
        """Drop the tables of earlier eliminations if they take much of the memory limit."""
        if self.nbytes > tuning.TABLES_KEPT * self.limits.nbytes:
            self.nbytes = 0
            self.tables.clear()
            self.left.clear()
            self.last = None
            self._numbers.clear()

    def reserve(self, entries: int) -> None:
        """Check that a table of so many entries fits the memory limit, before it is made. Raises TooWide."""
        if self.nbytes + 8 * entries > self.limits.nbytes:
            raise TooWide

    def add_content(self, table: Table) -> int:
        """Number a table by its content."""
        key: Hashable = ("content", table.shape, hashlib.sha256(np.ascontiguousarray(table).data).digest())
        number = self.find(key)
        return self.add(key, table) if number is None else number

    def find(self, key: Hashable) -> int | None:
        """Return the number of the table with this key."""
        return self._numbers.get(key)

    def add(self, key: Hashable, table: Table) -> int:
        """Number a table."""
        self._numbers[key] = len(self.tables)
        self.nbytes += table.nbytes
        self.tables.append(table)
        return len(self.tables) - 1


Factor = tuple[int, tuple[int, ...]]  # the number of a table, and the variable of each of its dims


@dataclass(frozen=True)
class Bucket:
    """An eliminated variable, the factors that it occurred in, and the number and offset of the resulting table."""

    variable: int
    factors: list[Factor]
    neighbours: tuple[int, ...]
    message: int
    offset: float


class Network:
    """Variables, the tables over them, and their elimination.

    Attributes
    ----------
    sizes: the number of values of each variable.
    given: the tables that were added before the elimination, in order; those of the entities come first.
    of_tensor: for each tensor the numbers of its tables among ``given``.
    constant: the sum of the offsets of all tables.
    buckets: the eliminated variables, in order, after :meth:`minimum`.
    outside: for each variable the number and the offset of the table, over the neighbours of its bucket, of the least
        cost outside the bucket, after :meth:`marginals`.
    """

    def __init__(self, tables: Tables):
        self.tables = tables
        self.sizes: list[int] = []
        self.given: list[Factor] = []
        self.of_tensor: dict[int, list[int]] = {}
        self.factors: list[list[Factor]] = []  # by variable: the factors that it occurs in
        self.constant = 0.0
        self.buckets: list[Bucket] = []
        self.outside: dict[int, tuple[int, float]] = {}

    def variable(self, size: int) -> int:
        """Add a variable of ``size`` values, and return its number."""
        self.sizes.append(size)
        self.factors.append([])
        return len(self.sizes) - 1

    def give(self, table: int, variables: tuple[int, ...]) -> None:
        """Add a table over variables, before the elimination."""
        self.given.append((table, variables))
        self._add(table, variables)

    def give_at(self, given: TensorTable, ends: Sequence[int]) -> int:
        """Add a table over the choices or the specs of the entities ``ends``; return its number among ``given``."""
        variables = []
        for end, size, tie in given.dims:
            variable = ends[end]
            if tie is not None:
                variable = self.variable(size)
                self.give(tie, (ends[end], variable))
            variables.append(variable)
        self.give(given.table, tuple(variables))
        return len(self.given) - 1

    def _add(self, table: int, variables: tuple[int, ...]) -> None:
        if not variables:
            self.constant += float(self.tables.tables[table])
            return
        for variable in variables:
            self.factors[variable].append((table, variables))

    def minimum(self) -> tuple[float, list[int]]:
        """Find the least sum, and values of all variables with that sum. Raises TooWide."""
        for n, v in enumerate(self._order()):
            if not n % tuning.CHECK_STEPS:
                self.tables.limits.check()
            self.buckets.append(self._remove(v))
        values = [0] * len(self.sizes)
        for bucket in reversed(self.buckets):
            line = np.zeros(self.sizes[bucket.variable])
            for table, variables in bucket.factors:
                index = tuple(slice(None) if u == bucket.variable else values[u] for u in variables)
                line = line + self.tables.tables[table][index]
            values[bucket.variable] = int(line.argmin())
        return self.constant, values

    def least_over(self, kept: Sequence[int]) -> Table:
        """Tabulate the least sum for all values of the variables ``kept``, in their order. Raises TooWide."""
        for n, v in enumerate(self._order(frozenset(kept))):
            if not n % tuning.CHECK_STEPS:
                self.tables.limits.check()
            self._remove(v)
        left: list[Factor] = []
        for n, v in enumerate(kept):
            left += [factor for factor in self.factors[v] if not set(kept[:n]) & set(factor[1])]
        shape = tuple(self.sizes[v] for v in kept)
        self.tables.reserve(math.prod(shape))
        return np.broadcast_to(sum_of(self.parts(left, tuple(kept))), shape) + self.constant

    def _remove(self, v: int) -> Bucket:
        """Replace a variable's factors by one of its neighbours, its least sums. Raises TooWide."""
        factors = self.factors[v]
        neighbours = tuple(dict.fromkeys(u for _, variables in factors for u in variables if u != v))
        for u in neighbours:
            self.factors[u] = [factor for factor in self.factors[u] if v not in factor[1]]
        message, offset = self._eliminate(v, factors, neighbours)
        self.constant += offset
        self._add(message, neighbours)
        return Bucket(v, factors, neighbours, message, offset)

    def marginals(self) -> list[Table] | None:
        """Find the least sum for each value of each variable, after :meth:`minimum`; None if that would take long."""
        position = {bucket.variable: i for i, bucket in enumerate(self.buckets)}
        outside = self.outside
        # A bucket's message and the table outside give the marginals of its neighbours, mostly from fewer entries than
        # the neighbours' own buckets have: the smallest such table of each variable, its size first.
        smallest: dict[int, tuple[int, Bucket]] = {}
        for n, bucket in enumerate(reversed(self.buckets)):
            if not n % tuning.CHECK_STEPS:
                self.tables.limits.check()
            entries = math.prod(self.sizes[u] for u in bucket.neighbours)
            if entries * self.sizes[bucket.variable] > tuning.MARGINAL_LIMIT:
                return None
            if bucket.neighbours:
                # The message of a bucket went to its parent, the neighbour eliminated first; the rest there is outside.
                parent = self.buckets[min(position[u] for u in bucket.neighbours)]
                others = list(parent.factors)
                others.remove((bucket.message, bucket.neighbours))
                wide = (*parent.neighbours, parent.variable)
                above, offset = outside[parent.variable]
                number, least = self._least_outside(others, wide, above, bucket.neighbours)
                outside[bucket.variable] = number, offset + least - bucket.offset
            else:
                outside[bucket.variable] = self.tables.add_content(np.array(0.0)), self.constant - bucket.offset
            for u in bucket.neighbours:
                if u not in smallest or entries < smallest[u][0]:
                    smallest[u] = entries, bucket
        result: list[Table] = [np.zeros(0)] * len(self.sizes)
        for n, bucket in enumerate(self.buckets):
            if not n % tuning.CHECK_STEPS:
                self.tables.limits.check()
            v = bucket.variable
            entries = math.prod(self.sizes[u] for u in (*bucket.neighbours, v))
            if self.sizes[v] == 1:
                result[v] = np.array([self.constant])
                continue
            factors, scope, behind = bucket.factors, (*bucket.neighbours, v), bucket
            if v in smallest and smallest[v][0] < entries:
                behind = smallest[v][1]
                factors, scope = [(behind.message, behind.neighbours)], behind.neighbours
            above, offset = outside[behind.variable]
            number, least = self._least_outside(factors, scope, above, (v,), behind is bucket)
            result[v] = self.tables.tables[number] + (offset + least + (0.0 if behind is bucket else behind.offset))
        return result

    def _least_outside(
        self, factors: list[Factor], scope: tuple[int, ...], outside: int, left: tuple[int, ...], last: bool = True
    ) -> tuple[int, float]:
        """Minimise the sum of factors, and of the table ``outside`` over ``scope``, to the variables ``left``.

        With ``last`` the scope has a last variable that the table outside does not depend on. Returns the number of the
        resulting table less its least entry, and that entry. Equal sums are looked up.
        """
        position = {u: i for i, u in enumerate(scope)}
        shape = tuple(self.sizes[u] for u in scope)
        kept = tuple(position[u] for u in left)
        factors_in_scope = tuple((t, tuple(position[u] for u in variables)) for t, variables in factors)
        key = ("outside", factors_in_scope, outside, shape, kept, last)
        known = self.tables.left.get(key)
        if known is None:
            self.tables.limits.check()
            self.tables.reserve(math.prod(shape))
            parts = [
                *self.parts(factors, scope),
                self.tables.tables[outside][..., None] if last else self.tables.tables[outside],
            ]
            least = _least(parts, shape, kept, self.tables.limits).transpose([sorted(kept).index(i) for i in kept])
            offset = float(least.min())
            known = self.tables.left[key] = self.tables.add_content(least - offset), offset
        return known

    def parts(self, factors: list[Factor], scope: tuple[int, ...]) -> list[Table]:
        """Reshape the tables so that their dims are in the order of ``scope``."""
        return [self.in_scope(self.tables.tables[table], variables, scope) for table, variables in factors]

    def in_scope(self, table: Table, variables: tuple[int, ...], scope: tuple[int, ...]) -> Table:
        """Reshape a table over ``variables`` to the dims of ``scope``, in its order; missing ones have size 1."""
        position = [scope.index(u) for u in variables]
        order = sorted(range(len(variables)), key=position.__getitem__)
        full = [1] * len(scope)
        for i in order:
            full[position[i]] = self.sizes[variables[i]]
        return table.transpose(order).reshape(full)

    def most_work(self) -> float:
        """Compute the additions of the largest step of an elimination."""
        return self._greedy_order(False, frozenset())[2]

    def _order(self, kept: frozenset[int] = frozenset()) -> list[int]:
        """Choose the order of elimination of all but ``kept``. Raises TooWide if both have a step of too much work.

        One candidate eliminates the variable of least work next. Where that leads to a wide step, another candidate
        eliminates the variable that leaves the smallest table. The candidate of less total work is chosen.
        """
        order, work, most = self._greedy_order(False, kept)
        if most > tuning.WIDE_WORK and work > tuning.ORDER_WORK * len(self.sizes):
            other = self._greedy_order(True, kept)
            if other[1] < work:
                order, work, most = other
        if most > tuning.WORK_LIMIT:
            raise TooWide
        self.tables.widest = max(self.tables.widest, most)
        return order

    def _greedy_order(self, by_table: bool, kept: frozenset[int]) -> tuple[list[int], float, float]:
        """Eliminate symbolically: return the order, its additions, and those of its largest step.

        Steps of equally many additions count once: they are mostly those of equal layers, which are looked up.
        """
        sizes = self.sizes
        adjacent: list[set[int]] = [set() for _ in sizes]
        for v, factors in enumerate(self.factors):
            for _, variables in factors:
                adjacent[v].update(variables)
            adjacent[v].discard(v)

        def key(v: int) -> tuple[float, float]:
            # An array cannot have more dims.
            table: float = 1
            for u in adjacent[v]:
                table *= sizes[u]
            if len(adjacent[v]) >= _DIMS:
                table = math.inf
            return (table, table * sizes[v]) if by_table else (table * sizes[v], 0.0)

        keys = [key(v) for v in range(len(sizes))]
        heap = [(priority, v) for v, priority in enumerate(keys) if v not in kept]
        heapq.heapify(heap)
        alive = [v not in kept for v in range(len(self.sizes))]
        order: list[int] = []
        works: set[float] = set()
        while heap:
            priority, v = heapq.heappop(heap)
            if not alive[v] or priority != keys[v]:
                continue
            work = priority[by_table]
            works.add(work)
            if work > tuning.WORK_LIMIT:
                return order, math.inf, math.inf
            if not len(order) % tuning.CHECK_STEPS:
                self.tables.limits.check()
            alive[v] = False
            order.append(v)
            around = adjacent[v]
            for u in around:
                adjacent[u] |= around
                adjacent[u] -= {u, v}
            for u in around:
                keys[u] = key(u)
                heapq.heappush(heap, (keys[u], u))
        return order, math.fsum(works), max(works, default=0.0)

    def _eliminate(self, v: int, factors: list[Factor], neighbours: tuple[int, ...]) -> tuple[int, float]:
        position = {u: i for i, u in enumerate((*neighbours, v))}
        key = (
            "eliminated",
            tuple((t, tuple(position[u] for u in variables)) for t, variables in factors),
            self.sizes[v],
        )
        known = self.tables.left.get(key)
        if known is not None:
            return known
        self.tables.limits.check()
        shape = tuple(self.sizes[u] for u in position)
        self.tables.reserve(math.prod(shape[:-1]))
        kept = tuple(range(len(neighbours)))
        least = _least(self.parts(factors, (*neighbours, v)), shape, kept, self.tables.limits)
        offset = float(least.min())
        self.tables.left[key] = self.tables.add_content(least - offset), offset
        return self.tables.left[key]


def sum_of(parts: Sequence[Table]) -> Table:
    """Add up tables that broadcast to each other: small ones first, so that few additions are of all entries."""
    return reduce(np.add, sorted(parts, key=lambda part: part.size), np.zeros(()))


def _least(parts: Sequence[Table], shape: tuple[int, ...], kept: Sequence[int], limits: Limits) -> Table:
    """Minimise the sum of ``parts``, which broadcast to ``shape``, over all dims but ``kept``, in ascending order."""
    entries = math.prod(shape)
    left = sorted(kept)
    if entries <= tuning.NATIVE_ENTRIES:
        dropped = tuple(dim for dim in range(len(shape)) if dim not in left)
        total = np.broadcast_to(sum_of(parts), shape)
        return total.min(axis=dropped) if dropped else total
    result = np.full([shape[dim] for dim in left], np.inf)
    # Pieces of the longest dim, so that the clock is looked at in time.
    cut = max(range(len(shape)), key=shape.__getitem__)
    step = max(1, tuning.PIECE_ENTRIES * shape[cut] // entries)
    for begin in range(0, shape[cut], step):
        if begin:
            limits.check()
        at = (slice(None),) * cut + (slice(begin, begin + step),)
        pieces = [part[at] if part.shape[cut] > 1 else part for part in parts] if step < shape[cut] else parts
        piece = (*shape[:cut], min(step, shape[cut] - begin), *shape[cut + 1 :])
        lower_by_sums(pieces, piece, left, result[at[cut - left.index(cut) :]] if cut in left else result)
    return result


def eliminate(
    problem: Problem,
    kept: Sequence[Sequence[int]],
    tables: Tables,
    prices: Prices,
    gap: float = 0.0,
    coarse: bool = False,
) -> Eliminated:
    """Minimise the cost over the choices ``kept`` of each entity, with priced memory and without a budget.

    Tensors of many readers are relaxed first, and fewer of them until bound and cost are within the relative ``gap``.
    With ``coarse`` the first relaxation is the answer, whatever its gap.

    Raises
    ------
    TooWide
        When the graph is too densely connected for the limits on work and memory.
    OutOfTimeError
        When the time limit is reached.
    """
    best: Eliminated | None = None
    most = 0  # readers of tensors that were treated exactly
    for limit in tuning.READERS_LIMITS:
        if limit < most:
            continue  # with more tensors relaxed, the bound is no greater
        try:
            result = _eliminate(problem, kept, tables, prices, limit, gap)
        except TooWide:
            continue
        most = limit
        if best is not None:
            choices, seconds = min((best.choices, best.seconds), (result.choices, result.seconds), key=lambda p: p[1])
            result = Eliminated(choices, seconds, max(best.bound, result.bound))
        best = result
        if coarse or best.seconds - best.bound <= gap * abs(best.seconds):
            break
    if best is None:
        raise TooWide
    return best


def boundary_table(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, ends: Sequence[int]
) -> Table:
    """Tabulate a lower bound of the cost for all choices of the entities ``ends``, one dim each, in their order.

    It is exact unless a tensor of many readers had to be relaxed. Raises TooWide when the graph is too densely
    connected.
    """
    for limit in sorted(tuning.READERS_LIMITS, reverse=True):
        tables.make_room()
        try:
            network, _ = network_of(problem, kept, tables, prices, (), limit)
            return network.least_over(ends)
        except TooWide:
            continue
    raise TooWide


def marginals(problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices) -> list[Table] | None:
    """Bound the cost of plans with each choice ``kept`` of each entity from below: the min-marginals.

    None when the graph is too densely connected.
    """
    for limit in tuning.READERS_LIMITS:
        try:
            result = minimized(problem, kept, tables, prices, (), limit).network.marginals()
        except TooWide:
            continue
        if result is not None:
            return result[: len(kept)]
    return None


def _eliminate(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, limit: int, gap: float
) -> Eliminated:
    bound, choices, relaxed = _solve(problem, kept, tables, prices, (), limit)
    groups = readers(problem)

    def cost(choices: Sequence[int]) -> float:
        seconds = evaluate(problem, choices)
        return seconds + prices.of(held_bytes(problem, groups, choices)) if prices.total else seconds

    best, seconds = choices, cost(choices)
    for same in (True, False) if relaxed else ():
        if seconds - bound <= gap * abs(seconds):
            break
        narrowed = [list(entity_choices) for entity_choices in kept]
        for tensor in relaxed:
            fix_required(groups[tensor], choices, narrowed, same)
        _, other, _ = _solve(problem, narrowed, tables, prices, relaxed, limit)
        if cost(other) < seconds:
            best, seconds = other, cost(other)
    return Eliminated(tuple(best), seconds, min(bound, seconds))


def fix_required(group: list[Edge], choices: Sequence[int], kept: list[list[int]], same: bool) -> None:
    """Restrict each reader of a tensor to choices that require one spec: its present one, or the ``same`` for all.

    ``choices`` are the present choices of all entities, and ``kept`` is changed.
    """
    required = [edge.consumed[choices[edge.consumer]] for edge in group]
    commonest = max(required, key=required.count)
    for edge, present in zip(group, required, strict=True):
        for spec in (commonest, present) if same else (present,):
            left = [k for k in kept[edge.consumer] if edge.consumed[k] == spec]
            if left:
                kept[edge.consumer] = left
                break


def _solve(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, exact: Sequence[int], limit: int
) -> tuple[float, list[int], list[int]]:
    """Solve once: return the bound, the choices, and the relaxed tensors (those in ``exact`` never are)."""
    solved = minimized(problem, kept, tables, prices, exact, limit)
    return solved.bound, [choices[solved.values[entity]] for entity, choices in enumerate(kept)], solved.relaxed


@dataclass(frozen=True)
class _Solved:
    """A network after its elimination, with the least sum and the values for it; and the relaxed tensors."""

    problem: Problem
    key: Hashable
    network: Network
    relaxed: list[int]
    bound: float
    values: list[int]


def minimized(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, exact: Sequence[int], limit: int
) -> _Solved:
    """Eliminate a network of :func:`network_of`. The last one without exact tensors is looked up. Raises TooWide."""
    key = prices.at, prices.joint, tuple(map(tuple, kept)), limit
    last = tables.last
    if last is not None and not exact and last.problem is problem and last.key == key:
        return last
    tables.make_room()
    network, relaxed = network_of(problem, kept, tables, prices, exact, limit)
    bound, values = network.minimum()
    solved = _Solved(problem, key, network, relaxed, bound, values)
    if not exact:
        tables.last = solved
    return solved


def network_of(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, exact: Sequence[int], limit: int
) -> tuple[Network, list[int]]:
    """Make the tables of a problem with priced memory; entities are the first variables.

    Returns the network, and the relaxed tensors: those of more readers than ``limit``, or with too large a table.
    Tensors in ``exact`` are never relaxed.
    """
    network = Network(tables)
    if not tables.quantum:
        most = sum(map(max, problem.cost)) + sum(max(map(max, edge.convert)) for edge in problem.edges)
        if not most:  # only memory has a price
            most = float(
                sum(map(max, problem.memory)) + sum(max(live.nbytes) for live in problem.activations.intervals)
            )
            most = max(most, 1.0)
        tables.quantum = 2.0 ** (math.frexp(most)[1] - tuning.COST_BITS)
    priced_intervals: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
    if prices.total:
        for interval in problem.activations.intervals:
            price = prices.span(interval.begin, interval.end)
            if price:
                priced_intervals.setdefault(interval.entity, []).append((price, interval.nbytes))
    # Equal entities mostly share their lists: the lists' identity saves reading them.
    known: dict[Hashable, int] = {}
    for entity, choices in enumerate(kept):
        network.variable(len(choices))
        paid, memory, live = problem.cost[entity], problem.memory[entity], priced_intervals.get(entity, ())
        same = id(paid), id(memory), tuple(choices), tuple((price, id(nbytes)) for price, nbytes in live)
        number = known.get(same)
        if number is None:
            costs = tuple(
                paid[k] + prices.total * memory[k] + sum(price * nbytes[k] for price, nbytes in live) for k in choices
            )
            key: Hashable = ("costs", costs)
            number = tables.find(key)
            if number is None:
                number = tables.add(key, tables.rounded(np.array(costs)))
            known[same] = number
        network.give(number, (entity,))
    relaxed = []
    # Tensors whose producers and readers have equal choices left, as in equal layers, get the same tables.
    lefts: dict[tuple[int, ...], int] = {}
    left = [lefts.setdefault(tuple(choices), len(lefts)) for choices in kept]
    recipes: dict[Hashable, tuple[TensorTable, ...] | None] = {}
    for count, (tensor, group) in enumerate(readers(problem).items()):
        if not count % tuning.CHECK_STEPS:
            tables.limits.check()
        first = group[0]
        memory_ = problem.activations.tensors.get(tensor) if prices.total else None
        if memory_ is not None and not prices.span(min(e.begin for e in group), max(e.end for e in group)):
            memory_ = None
        spans = None if memory_ is None else _Spans(prices, group)
        consumers = [edge.consumer for edge in group]
        recipe_key = (
            *(id(first.convert), id(first.produced), left[first.producer], tensor in exact),
            tuple((id(edge.consumed), left[edge.consumer], consumers.index(edge.consumer)) for edge in group),
            spans and (id(memory_), spans.key),
        )
        if recipe_key not in recipes:
            priced = None if memory_ is None or spans is None else _Priced(memory_, spans)
            recipes[recipe_key] = _recipe(tables, kept, group, priced, math.inf if tensor in exact else limit)
        recipe = recipes[recipe_key]
        if recipe is None:
            relaxed.append(tensor)
            priced = None if memory_ is None or spans is None else _Priced(memory_, spans)
            recipe = recipes.get(("shares", recipe_key)) or _shares(tables, kept, group, priced)
            recipes["shares", recipe_key] = recipe
        ends = (first.producer, *consumers)
        network.of_tensor[tensor] = [network.give_at(given, ends) for given in recipe]
    for price, points in prices.joint:
        scope, peak = joint_peak(problem, kept, tables, points, relaxed)
        chosen = tuple(tuple(kept[entity]) for entity in scope)
        joint_key: Hashable = ("joint", price, points, chosen, tuple(relaxed))
        number = tables.find(joint_key)
        if number is None:
            number = tables.add(joint_key, tables.rounded(price * peak))
        network.give(number, scope)
    return network, relaxed


def joint_peak(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, points: Sequence[int], relaxed: Sequence[int]
) -> tuple[tuple[int, ...], Table]:
    """Tabulate the most transient bytes at any of some points, over the choices of the entities that it depends on.

    Returns these entities and the table. Tensors in ``relaxed`` hold no bytes. Raises TooWide if it is too large.
    """
    free, count = problem.without_costs, problem.activations.points
    at: dict[int, list[tuple[Table, tuple[int, ...]]]] = {m: [] for m in points}
    for interval in problem.activations.intervals:
        for m in points:
            if interval.begin <= m <= interval.end:
                line = np.array([interval.nbytes[k] for k in kept[interval.entity]], dtype=float)
                at[m].append((line, (interval.entity,)))
    for tensor, group in free.groups.items():
        if tensor in relaxed or tensor not in problem.activations.tensors:
            continue
        begin, end = min(edge.begin for edge in group), max(edge.end for edge in group)
        ends = group[0].producer, *(edge.consumer for edge in group)
        for m in points:
            if begin <= m <= end:
                for given in tensor_bytes(free, kept, tables, Prices.at_point(m, 1.0, count), tensor):
                    at[m].append(_over_choices(tables, given, ends))
    scope = tuple(sorted({entity for terms in at.values() for table, own in terms for entity in own if table.any()}))
    shape = [len(kept[entity]) for entity in scope]
    if len(scope) > _DIMS or math.prod(shape) > tuning.JOINT_ENTRIES:
        raise TooWide
    peak: Table = np.zeros(shape)
    for terms in at.values():
        held: Table = np.zeros(())
        for table, own in terms:
            if table.any():
                held = held + table.reshape([len(kept[entity]) if entity in own else 1 for entity in scope])
        peak = np.maximum(peak, held)
    return scope, peak


def _over_choices(tables: Tables, given: TensorTable, ends: Sequence[int]) -> tuple[Table, tuple[int, ...]]:
    """Expand a table over choices or specs of the entities ``ends`` to one over choices, in the entities' order."""
    table, scope = tables.tables[given.table], [ends[end] for end, _, _ in given.dims]
    for dim, (_, _, tie) in enumerate(given.dims):
        if tie is not None:
            table = table.take(tables.tables[tie].argmin(axis=1), axis=dim)
    own = sorted(set(scope))
    # An entity that occurs twice, by its choices and by its specs, takes one choice.
    letters = dict(zip(own, string.ascii_letters, strict=False))
    diagonal = "".join(map(letters.__getitem__, scope)) + "->" + "".join(map(letters.__getitem__, own))
    taken: Table = np.einsum(diagonal, table)
    return taken, tuple(own)


def tensor_bytes(
    problem: Problem, kept: Sequence[Sequence[int]], tables: Tables, prices: Prices, tensor: int
) -> tuple[TensorTable, ...]:
    """Make the tables of the priced bytes that a tensor's conversions hold.

    ``problem`` has no costs (:attr:`Problem.without_costs`). The tables have the dims of those of :func:`network_of`,
    for a tensor that is not relaxed there.
    """
    group, memory = problem.groups[tensor], problem.activations.tensors[tensor]
    recipe = _recipe(tables, kept, group, _Priced(memory, _Spans(prices, group)), math.inf)
    assert recipe is not None  # without a limit none is
    return recipe


@dataclass(frozen=True)
class TensorTable:
    """A table for a network, wherever its tensor is: the number of the table, and its dims.

    A dim has the number of the entity among the tensor's producer and readers. If the dim is not over that entity's
    choices but over its specs, it also has the number of specs, and of the table that ties them to the choices.
    """

    table: int
    dims: tuple[tuple[int, int, int | None], ...]


def _recipe(
    tables: Tables, kept: Sequence[Sequence[int]], group: Sequence[Edge], priced: _Priced | None, limit: float
) -> tuple[TensorTable, ...] | None:
    """Make the table of a tensor; None if it is to be relaxed: it has more readers than ``limit``, or a large table.

    Without a limit, a large table raises TooWide.
    """
    first = group[0]
    produced = tuple(map(first.produced.__getitem__, kept[first.producer]))
    consumed = [tuple(map(edge.consumed.__getitem__, kept[edge.consumer])) for edge in group]
    if len(group) == 1:
        return (_pair(tables, first.convert, produced, consumed[0], priced),)
    required = [tuple(dict.fromkeys(specs)) for specs in consumed]
    size = len(dict.fromkeys(produced)) * math.prod(map(len, required))
    if len(group) > limit or (size > tuning.TENSOR_ENTRIES and limit < math.inf):
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


def _shares(
    tables: Tables, kept: Sequence[Sequence[int]], group: Sequence[Edge], priced: _Priced | None
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


class _Spans:
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

    def reordered(self, order: Sequence[int]) -> _Spans:
        """The same, with the readers in another order."""
        result = copy.copy(self)
        result.before, result.after, result.making, result.share = (
            tuple(values[i] for i in order) for values in (self.before, self.after, self.making, self.share)
        )
        place = {reader: n for n, reader in enumerate(order)}
        result.order = tuple(place[reader] for reader in self.order)
        result.key = result.before, result.after, result.making, result.share, result.order
        return result


class _Priced:
    """The cost, at given prices, of the memory of a tensor's conversions."""

    def __init__(self, memory: ConvertedTensor, spans: _Spans):
        self.memory, self.spans = memory, spans
        self.key = (id(memory), spans.key)

    def reordered(self, order: Sequence[int]) -> _Priced:
        """The same, with the readers in another order."""
        return _Priced(self.memory, self.spans.reordered(order))

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
    priced: _Priced | None,
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
    priced: _Priced | None,
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
        if len(shape) > _DIMS:
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
