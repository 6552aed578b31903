from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.runtime.native.sums import Table, lower_by_sums


@st.composite
def sums(draw: st.DrawFn) -> tuple[list[Table], tuple[int, ...], list[int]]:
    """Tables of whole numbers and infinities with any order of their dims in memory, a shape, and dims of a result."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = []
    for _ in range(draw(st.integers(1, 4))):
        order = random.permutation(len(shape))
        size = [shape[dim] if random.random() < 0.6 else 1 for dim in range(len(shape))]
        table = random.integers(0, 99, [size[dim] for dim in order]).astype(float)
        table[random.random(table.shape) < 0.1] = np.inf
        tables.append(table.transpose(np.argsort(order)))
    return tables, shape, [dim for dim in range(len(shape)) if draw(st.booleans())]


@settings(max_examples=150, deadline=None)
@given(sums())
def test_sums_are_least_over_the_other_dims(case: tuple[list[Table], tuple[int, ...], list[int]]) -> None:
    tables, shape, kept = case
    total = np.broadcast_to(np.sum([np.broadcast_to(table, shape) for table in tables], axis=0), shape)
    least = total.min(axis=tuple(dim for dim in range(len(shape)) if dim not in kept))
    before = np.full(least.shape, 50.0)
    result = before.copy()
    lower_by_sums(tables, shape, kept, result)
    assert np.array_equal(result, np.minimum(before, least))
