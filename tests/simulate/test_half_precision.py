"""Functions of half precision in the simulator, whose kernels are those of hidet."""

from __future__ import annotations

from collections.abc import Callable

import hidet
import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist.operators import elementwise
from hidet_dist.simulate import simulate

A, B = torch.tensor([[5.5, -5.5, 3.0, -0.25], [7.25, 0.5, 100.0, -8.0]]), torch.tensor([[2.0, 2.0, -2.0, 1.0]] * 2)
BINARY = ("fmod", "remainder", "floor_divide", "atan2", "fmax", "pow")
UNARY = ("expm1", "log1p", "tan", "asinh", "trunc", "abs", "isfinite")


def _all(
    functions: Callable[[str], Callable[..., torch.Tensor]], x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    two = [functions(name)(x, y) for name in BINARY]
    one = [functions(name)(y) for name in UNARY]
    return [*two, *one, functions("rsqrt")(functions("abs")(x)), functions("elu")(x), functions("mish")(x)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_functions_that_hidet_lacks(dtype: str) -> None:
    x, y = (hidet.symbol([2, 4], dtype, "cpu") for _ in range(2))
    graph = hidet.trace_from(_all(lambda name: getattr(elementwise, name), x, y), [x, y])
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"pins": {"x0": "(S0, R)", "x1": "(S0, R)"}})
    a, b = (v.to(getattr(torch, dtype)) for v in (A, B))
    wanted = _all(lambda name: getattr(torch, name, None) or getattr(torch.nn.functional, name), a, b)
    with np.errstate(all="ignore"):
        computed = simulate(hidet_dist.partition(graph, plan), [a, b])
    for value, want in zip(computed, wanted, strict=True):
        np.testing.assert_allclose(value.astype(np.float64), want.double().numpy(), rtol=1e-2, equal_nan=True)
