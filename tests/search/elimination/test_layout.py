"""Layouts of networks, and numbers of equal tensors, against loops over single tensors."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hidet_dist.search.elimination.layout import TensorTable, VariableLayout
from hidet_dist.search.problem import ConvertedTensor

Recipe = tuple[TensorTable, ...]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Tables over the first three entities of a tensor, some over specs."""
    dims = st.tuples(st.integers(0, 2), st.integers(1, 9), st.none() | st.integers(0, 99))
    tables = st.builds(TensorTable, st.integers(0, 99), st.lists(dims, max_size=3).map(tuple))
    return tuple(draw(st.lists(tables, min_size=1, max_size=3)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.lists(recipes(), min_size=1, max_size=4),
    st.lists(st.integers(0, 10**6), max_size=8),
)
def test_a_layout_has_the_variables_and_factors_of_one_tensor_after_the_other(
    entities: list[int], made: list[Recipe], seeds: list[int]
) -> None:
    numbers = [seed % len(made) for seed in seeds]
    ends = [[(seed + n) % len(entities) for n in range(3)] for seed in seeds]
    sizes, factors = list(entities), [(100 + entity, [entity]) for entity in range(len(entities))]
    of_tensor = []
    for number, own in zip(numbers, ends, strict=True):
        of_tensor.append(list[int]())
        of_specs: dict[tuple[int, int], int] = {}
        for table in made[number]:
            variables = []
            for end, size, tie in table.dims:
                variables.append(own[end])
                if tie is not None:
                    if (end, tie) not in of_specs:  # the tables of a tensor have one variable for the specs of an end
                        of_specs[end, tie] = len(sizes)
                        factors.append((tie, [own[end], len(sizes)]))
                        sizes.append(size)
                    variables[-1] = of_specs[end, tie]
            of_tensor[-1].append(len(factors))
            factors.append((table.table, variables))
    of_entities = 100 + np.arange(len(entities))
    flat, begins = np.array(ends, dtype=np.int64).ravel(), 3 * np.arange(len(ends))
    layout = VariableLayout(entities, of_entities, made, numbers, flat, begins)
    assert layout.sizes.tolist() == sizes
    assert layout.factors.tolist() == [table for table, _ in factors]
    split = np.split(layout.variables, layout.ends)[:-1]
    assert [own.tolist() for own in split] == [variables for _, variables in factors]
    assert [layout.of_tensor(n) for n in range(len(ends))] == of_tensor


def test_the_bytes_of_conversions_are_tabulated_once() -> None:
    asked = []

    def buffers() -> list[list[int]]:
        asked.append(True)
        return [[0, 1, 2], [10, 11, 12], [20, 21, 22]]

    memory = ConvertedTensor((0, 1, 0), (5, 6, 7), buffers)
    assert memory.held.tolist() == [[0, 6, 0], [5, 0, 7], [0, 6, 0]]
    assert not asked
    assert memory.worked.tolist() == [[0, 1, 0], [10, 0, 12], [0, 21, 0]]
    assert [memory.working(s, d) for s, d in ((0, 1), (1, 2), (2, 1))] == [1, 12, 21]
    assert asked == [True]
