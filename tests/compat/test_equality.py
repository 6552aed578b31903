"""How values are compared and hashed, in the whole process."""

from __future__ import annotations

import importlib
import math

import hidet
import pytest
from hidet.ir.dtypes import float32, int32

values = importlib.import_module("hidet.utils.py")


def test_tensors_are_keys_by_identity() -> None:
    x, y = (hidet.symbol([2], "float32", "cpu") for _ in range(2))
    assert {x: 1, y: 2}[x] == 1 and len({x, y, x}) == 2
    assert hash(x) == object.__hash__(x)


@pytest.mark.parametrize("value", [3, "3", (3,), 3.0, math.inf, int32(3), float32(math.inf)])
def test_values_that_equal_themselves_are_compared_by_equality(value: object) -> None:
    assert values._is_immutable(value)


@pytest.mark.parametrize("value", [math.nan, float32(math.nan), [3]])
def test_others_are_compared_by_identity(value: object) -> None:
    assert not values._is_immutable(value)
