"""Einsums beside PyTorch's, with ellipses for dims without letters, and letters that repeat."""

from __future__ import annotations

import pytest
import torch
from tests.operators.against_torch import compare, floats, traced

from hidet_dist.operators import products


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
        ("..., f -> ... f", [(4,), (3,)]),
        ("...ij, j -> ...i", [(2, 2, 3, 4), (4,)]),
        ("...ij, ...ij -> ...", [(2, 3, 4), (2, 3, 4)]),
        ("a...,b...->ab...", [(2, 5, 3), (4, 5, 3)]),
        ("...i,i...->...", [(5, 3, 2), (2, 3)]),
        ("...i,i->", [(2, 3), (3,)]),
        ("ij,jk", [(2, 3), (3, 4)]),
        ("ii->i", [(3, 3)]),
        ("iji,bjj->bi", [(3, 2, 3), (4, 2, 2)]),
        ("...ii", [(2, 3, 3)]),
    ],
)
def test_einsums(equation, shapes):
    operands = [floats(*shape) for shape in shapes]
    compare(lambda *x: products.einsum(equation, x), lambda *x: torch.einsum(equation, *x), *operands, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("ij->ijj", [(2, 3)]), ("ij->k", [(3, 3)]), ("...i,...i->...", [(2, 3), (1, 3)])],
)
def test_einsums_that_are_not_supported_are_refused(equation, shapes):
    with pytest.raises(NotImplementedError, match="is not supported"):
        traced(lambda *x: products.einsum(equation, x), [floats(*shape) for shape in shapes])
