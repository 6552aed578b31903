"""Reductions, running reductions and sorting beside PyTorch's."""

from __future__ import annotations

import math

import hidet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.against_torch import booleans, compare, floats, integers

from hidet_dist.operators import reductions, sorting
from hidet_dist.rules.rule import derive

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return floats(*shape).to(dtype) if dtype.is_floating_point else integers(-3, 4, *shape).to(dtype)


@dtypes
@pytest.mark.parametrize("name", ["sum", "amax", "amin", "any", "all"])
def test_reductions_of_numbers(name, dtype):
    x, own, peer = numbers(dtype, 3, 4, 2), getattr(reductions, name), getattr(torch, name)
    for dim in (0, -1, (0, 1)):
        compare(lambda v, d=dim: own(v, d, True), lambda v, d=dim: peer(v, d, keepdim=True), x)
        compare(lambda v, d=dim: own(v, d), lambda v, d=dim: peer(v, d), x)
    if name not in ("amax", "amin"):
        compare(own, peer, x)


def test_integers_that_float32_does_not_hold():
    x = torch.tensor([[2**40 + 1, 2**40], [3, 2**40 + 2]])
    for name in ("sum", "amax", "amin"):
        own, peer = getattr(reductions, name), getattr(torch, name)
        compare(lambda v, f=own: f(v, 1), lambda v, f=peer: f(v, 1), x)


def test_statistics():
    x = floats(3, 4, 5)
    for dim in (None, 0, (1, -1)):
        compare(lambda v, d=dim: reductions.mean(v, d), lambda v, d=dim: v.mean(d), x)
        compare(lambda v, d=dim: reductions.var(v, d), lambda v, d=dim: v.var(d), x)
        compare(
            lambda v, d=dim: reductions.std(v, d, 0, True), lambda v, d=dim: v.std(d, correction=0, keepdim=True), x
        )
        compare(
            lambda v, d=dim: reductions.linalg_vector_norm(v, 2, d),
            lambda v, d=dim: torch.linalg.vector_norm(v, 2, d),
            x,
        )
    for order in (0, 1, 3, math.inf):
        compare(
            lambda v, o=order: reductions.linalg_vector_norm(v, o, 1),
            lambda v, o=order: torch.linalg.vector_norm(v, o, 1),
            x,
        )


def test_softmax_and_its_kin():
    x = floats(3, 5) * 20
    compare(lambda v: reductions.softmax(v, -1), lambda v: v.softmax(-1), x)
    compare(lambda v: reductions.log_softmax(v, 0), lambda v: v.log_softmax(0), x)
    x[1] = -math.inf
    x[0, 2] = -math.inf
    compare(lambda v: reductions.logsumexp(v, 1), lambda v: v.logsumexp(1), x)
    compare(lambda v: reductions.safe_softmax(v, -1), lambda v: torch.ops.aten._safe_softmax(v, -1), x)


@dtypes
@pytest.mark.parametrize("dim", [0, -1])
def test_places_and_running_reductions(dim, dtype):
    x = numbers(dtype, 3, 4)
    compare(lambda v: reductions.prod(v, dim), lambda v: v.prod(dim), x)
    compare(lambda v: reductions.argmax(v, dim), lambda v: v.argmax(dim), x)
    compare(lambda v: reductions.argmin(v, dim, True), lambda v: v.argmin(dim, True), x)
    compare(lambda v: reductions.max(v, dim), lambda v: tuple(v.max(dim)), x)
    compare(lambda v: reductions.cumsum(v, dim), lambda v: v.cumsum(dim), x)
    compare(lambda v: reductions.cumprod(v, dim), lambda v: v.cumprod(dim), x)
    compare(lambda v: reductions.cummax(v, dim), lambda v: tuple(v.cummax(dim)), x)
    compare(lambda v: reductions.cummin(v, dim), lambda v: tuple(v.cummin(dim)), x)
    compare(reductions.argmax, torch.argmax, x)


def test_running_sums_from_behind_and_without_the_element_itself():
    x = floats(3, 5)
    compare(lambda v: reductions.cumsum(v, 1, reverse=True), lambda v: v.flip(1).cumsum(1).flip(1), x)
    compare(lambda v: reductions.cumsum(v, 1, exclusive=True), lambda v: v.cumsum(1) - v, x)


def test_booleans_are_counted():
    x = booleans(3, 4)
    compare(lambda v: reductions.sum(v, 1), lambda v: v.sum(1), x)
    compare(lambda v: reductions.cumsum(v, 1), lambda v: v.cumsum(1), x)
    compare(lambda v: reductions.amax(v, 1), lambda v: v.amax(1), x)


@settings(max_examples=30, derandomize=True)
@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=7, max_size=7), min_size=1, max_size=3),
    descending=st.booleans(),
    dim=st.integers(-2, 1),
    floating=st.booleans(),
)
def test_equal_elements_keep_their_order(rows, descending, dim, floating):
    x = torch.tensor(rows).float() if floating else torch.tensor(rows)
    compare(
        lambda v: sorting.sort(v, dim, descending),
        lambda v: tuple(torch.sort(v, dim=dim, descending=descending, stable=True)),
        x,
    )


def test_nan_is_the_greatest():
    x = floats(3, 5)
    x[0, 2], x[1, 0] = math.nan, math.inf
    for descending in (False, True):
        compare(
            lambda v, d=descending: sorting.sort(v, -1, d),
            lambda v, d=descending: tuple(torch.sort(v, dim=-1, descending=d, stable=True)),
            x,
        )


@pytest.mark.parametrize("largest", [False, True])
def test_largest_and_smallest_elements(largest):
    x = floats(4, 6, 3)
    compare(lambda v: sorting.topk(v, 2, 1, largest), lambda v: tuple(torch.topk(v, 2, 1, largest)), x)


def test_all_dims_shard_but_the_one_that_is_run_through():
    def symbol() -> hidet.Tensor:
        return hidet.symbol([4, 6, 8], "float32", "cpu")

    places = derive(sorting.topk(symbol(), 3, 1)[1].op)
    assert places.notation() == "([i,*,k])->([i,j,k]) {i=4,j=3,k=8} whole={j}"
    running = derive(reductions.cumsum(symbol(), 1).op)
    assert [(d.variable, d.extent) for d in running.factors] == [(0, 4), (2, 8)]
    total = derive(reductions.sum(hidet.symbol([4, 6, 8], "int64", "cpu"), 1).op)
    assert len(total.factors) == 3


def test_the_mean_of_integers_is_refused():
    with pytest.raises(ValueError, match="floating point"):
        reductions.mean(hidet.symbol([3], "int64", "cpu"))
