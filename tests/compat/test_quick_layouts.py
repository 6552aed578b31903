"""Layouts of kernels in half precision: those that hidet's own functions make."""

from __future__ import annotations

from typing import Any

import hidet
import pytest
from hidet.ir.cute import layout as cute
from hypothesis import given
from hypothesis import strategies as st

from hidet_dist.compat import quick_layouts

pytestmark = pytest.mark.usefixtures("quick")

NESTED = st.recursive(st.integers(1, 8), lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple), max_leaves=6)
FACTORS = st.sampled_from([1, 2, 4])
REPEATED = st.tuples(FACTORS, FACTORS)


def described(made: tuple[Any, Any]) -> Any:
    shape, layout = made
    return shape, type(layout), layout.shape, layout.stride


@given(NESTED, NESTED)
def test_the_same_tuples_are_nested_alike(a: Any, b: Any) -> None:
    assert cute.congruent is quick_layouts._congruent
    assert cute.congruent(a, b) == quick_layouts.hidet_congruent(a, b)
    assert cute.congruent(a, a)
    as_lists = list(a) if isinstance(a, tuple) else a
    assert cute.tuple_([as_lists, b]) == quick_layouts.hidet_tuple([as_lists, b]) == (a, b)


@given(REPEATED, REPEATED)
def test_repeated_atoms_are_those_of_hidet(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert cute.zoom is quick_layouts._zoom
    atom = cute.TensorLayout(((4, 8), (2, 2)), ((32, 1), (16, 8)))
    for repeat in (one, other, one):
        expected = quick_layouts.hidet_zoom((16, 8), atom, repeat, cute.TensorLayout(repeat))
        assert described(cute.zoom((16, 8), atom, repeat, cute.TensorLayout(repeat))) == described(expected)


def test_extents_that_are_no_ints_are_left_to_hidet() -> None:
    n = hidet.symbol_var("n")
    assert cute.congruent((n, 2), (1, n))
    assert not cute.congruent((n, 2), n)
    assert cute.tuple_([n, None]) == (n, None)
    layout = cute.TensorLayout((4, n))
    assert layout.shape == (4, n)
    assert not quick_layouts._of_ints(layout.shape)
    assert not quick_layouts._of_ints((True, 1))
