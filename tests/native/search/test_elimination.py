from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.native.search.elimination import NativeNetwork, Table, TableStore, TooWide

Factor = tuple[int, tuple[int, ...]]  # the number of a table, and the variable of each of its dims

LIMIT = 2**30
UNLIMITED = math.inf


@dataclass
class Case:
    """Variables, tables of whole numbers and infinities, and factors, some of which share a table."""

    sizes: list[int]
    tables: list[Table]
    factors: list[Factor]

    def sum(self) -> Table:
        """The sum of all factors, over all variables."""
        total = np.zeros(self.sizes)
        for table, variables in self.factors:
            order = np.argsort(variables)
            full = [size if v in variables else 1 for v, size in enumerate(self.sizes)]
            total = total + self.tables[table].transpose(order).reshape(full)
        return total

    def network(self, store: TableStore, check: Callable[[], None] = lambda: None) -> NativeNetwork:
        numbers = [store.add(table) for table in self.tables]
        ends = list(itertools.accumulate(len(variables) for _, variables in self.factors))
        variables = [v for _, own in self.factors for v in own]
        return NativeNetwork(store, self.sizes, [numbers[t] for t, _ in self.factors], ends, variables, check)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Large sizes fill vectors, and rests of them; the sum of all factors stays small.
    sizes = [int(size) for size in random.choice([1, 2, 2, 3, 4, 7, 13, 18], draw(st.integers(1, 8)))]
    while math.prod(sizes) > 2**14:
        sizes[sizes.index(max(sizes))] = 2
    tables: list[Table] = []
    factors: list[Factor] = [(-1, (v,)) for v in range(len(sizes))]
    for _ in range(draw(st.integers(0, 9))):
        count = int(random.integers(1, min(4, len(sizes)) + 1))
        factors.append((-1, tuple(int(v) for v in random.permutation(len(sizes))[:count])))
    for n, (_, variables) in enumerate(factors):
        shape = tuple(sizes[v] for v in variables)
        alike = [number for number, table in enumerate(tables) if table.shape == shape]
        if alike and random.random() < 0.5:
            factors[n] = int(random.choice(alike)), variables
            continue
        factors[n] = len(tables), variables
        table = random.integers(-20, 99, shape).astype(float)
        table[random.random(shape) < 0.1] = np.inf
        table.flat[0] = 5.0  # something finite is left
        tables.append(table)
    return Case(sizes, tables, factors)


def least_of(total: Table, kept: tuple[int, ...]) -> Table:
    """The least of a table over all dims but ``kept``, in their order."""
    least = total.min(axis=tuple(v for v in range(total.ndim) if v not in kept))
    return least.transpose([sorted(kept).index(v) for v in kept])


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans())
def test_minimum_values_and_marginals_are_those_of_the_sum(case: Case, by_table: bool) -> None:
    total, store = case.sum(), TableStore(LIMIT)
    if not np.isfinite(total).any():
        return
    for _ in range(2):  # the second time, all is looked up
        network = case.network(store)
        order, work, largest = network.order(UNLIMITED, by_table=by_table)
        assert sorted(order) == list(range(len(case.sizes)))
        assert largest <= work <= largest * len(order)
        network.eliminate(order)
        assert network.constant == total.min()
        assert total[tuple(network.values())] == total.min()
        for v, line in enumerate(network.marginals(case.sizes, UNLIMITED)):
            assert np.array_equal(line, least_of(total, (v,)))


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_least_sums_over_some_variables(case: Case, data: st.DataObject) -> None:
    kept = tuple(data.draw(st.permutations(range(len(case.sizes))))[: data.draw(st.integers(0, 3))])
    network = case.network(TableStore(LIMIT))
    order, _, _ = network.order(UNLIMITED, kept)
    assert not set(kept) & set(order)
    network.eliminate(order)
    result = network.least_over(kept, [case.sizes[v] for v in kept]) + network.constant
    assert np.array_equal(result, least_of(case.sum(), kept))


def chain(length: int, size: int = 5) -> Case:
    """A chain of variables with the same table between neighbours."""
    table = np.random.default_rng(1).integers(0, 99, (size, size)).astype(float)
    return Case([size] * length, [table], [(0, (v, v + 1)) for v in range(length - 1)])


def test_equal_layers_are_looked_up() -> None:
    nbytes = []
    for length in (100, 400):
        store = TableStore(LIMIT)
        network = chain(length).network(store)
        network.eliminate(network.order(UNLIMITED)[0])
        network.marginals([5] * length, UNLIMITED)
        nbytes.append(store.nbytes)
    assert nbytes[0] == nbytes[1] < 100 * 5 * 5 * 8


def test_equal_tables_have_one_number_and_outlive_the_store() -> None:
    store = TableStore(LIMIT)
    table = np.arange(6.0).reshape(2, 3)
    number = store.add(table)
    assert store.add(np.asfortranarray(table)) == number
    assert store.add(table.reshape(3, 2)) != number
    assert store.add(np.array(3.0)) not in (number, store.add(np.array([3.0])))
    assert store.nbytes == 8 * (6 + 6 + 1 + 1)
    view = store[number]
    del store
    assert np.array_equal(view, table)
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1.0


def test_limits_of_bytes_and_of_work() -> None:
    # Each variable of a complete graph is tied to all others.
    pairs = list(itertools.combinations(range(7), 2))
    table = np.random.default_rng(1).integers(0, 99, (6, 6)).astype(float)
    case = Case([6] * 7, [table], [(0, pair) for pair in pairs])
    network = case.network(TableStore(8 * 6**6))
    order, work, largest = network.order(UNLIMITED)
    assert (len(order), work, largest) == (7, sum(6**n for n in range(1, 8)), 6**7)
    with pytest.raises(TooWide):
        network.eliminate(order)
    network = case.network(TableStore(LIMIT))
    assert network.order(6**7 - 1)[1:] == (math.inf, math.inf)
    network.eliminate(order)
    with pytest.raises(TooWide):
        network.marginals(case.sizes, 6**7 - 1)
    assert len(network.marginals(case.sizes, 6**7)) == 7


def test_an_exception_of_the_check_ends_the_call() -> None:
    def stop() -> None:
        raise KeyError("over")

    network = chain(3).network(TableStore(LIMIT), stop)
    with pytest.raises(KeyError, match="over"):
        network.order(UNLIMITED)
    with pytest.raises(KeyError, match="over"):
        network.eliminate(np.arange(3))
