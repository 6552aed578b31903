"""Extremes of integers in the simulator, whose kernels are those of hidet."""

from __future__ import annotations

import hidet
import numpy as np
import pytest
from hidet import ops

import hidet_dist
from hidet_dist.simulate import simulate


@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint64"])
def test_extremes_of_integers(dtype: str) -> None:
    limits = np.iinfo(dtype)
    a = np.array([[limits.min, limits.max, 7, limits.max], [5, limits.min, limits.max, 0]], dtype)
    b = np.array([[limits.max, 3, 7, limits.min], [6, limits.min, 0, limits.max]], dtype)
    x, y = (hidet.symbol([2, 4], dtype, "cpu") for _ in range(2))
    results = [ops.maximum(x, y), ops.minimum(x, y), ops.max(x, [1]), ops.min(x, [0])]
    graph = hidet.trace_from(results, [x, y])
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"pins": {"x0": "(S0, R)", "x1": "(S0, R)"}})
    computed = simulate(hidet_dist.partition(graph, plan), [a, b])
    for value, expected in zip(computed, (np.maximum(a, b), np.minimum(a, b), a.max(1), a.min(0)), strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)
