"""Corner cases of PyTorch's operators, evaluated without kernels, and modules that no graph can stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hidet_dist
from hidet_dist.errors import TraceError, UnsupportedModelError
from hidet_dist.soundness.plans import evaluate_graph


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _resized(mode: str, factor: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: functional.interpolate(x, scale_factor=factor, mode=mode)


def _column_set(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1] = 5
    return y


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(_resized("nearest", 1.1), [_numbers(1, 2, 5)], id="a factor that changes no size"),
        pytest.param(_resized("nearest", 1.2), [_numbers(1, 2, 4, 4)], id="one of two dims"),
        pytest.param(_resized("nearest", (1.2, 2.0)), [_numbers(1, 2, 4, 4)], id="one of the two sizes"),
        pytest.param(_resized("nearest", 2.04), [_numbers(1, 1, 20, 20)], id="a factor of almost two"),
        pytest.param(_resized("bilinear", (1.2, 2.0)), [_numbers(1, 2, 4, 4)], id="linear, one of the sizes"),
        pytest.param(_resized("bicubic", 1.2), [_numbers(1, 2, 4, 4)], id="cubic"),
        pytest.param(lambda x: functional.pad(x, (-1, 2, 0, 1), "circular"), [_numbers(2, 3, 4, 5)], id="cut and wrap"),
        pytest.param(lambda x: x ** float("inf"), [_numbers(3).abs()], id="an infinite power"),
        pytest.param(torch.sign, [torch.tensor([0, 3], dtype=torch.uint8)], id="signs of unsigned integers"),
        pytest.param(lambda x: x.softmax(0), [torch.tensor(3.0)], id="softmax of a number"),
        pytest.param(lambda x: x[:1].var(0), [_numbers(3, 4)], id="the variance of one element"),
        pytest.param(_column_set, [_numbers(3, 4)], id="a column set to a number"),
        pytest.param(
            lambda x, i: torch.take_along_dim(x, i[:, None], 0), [_numbers(3, 4), torch.tensor([2, 0, 1])], id="along"
        ),
    ],
)
def test_corner_cases_are_as_pytorch_has_them(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]):
    graph = hidet_dist.from_torch(Function(function).eval(), tuple(inputs))
    arrays = [x.double().numpy() if x.dtype.is_floating_point else x.numpy() for x in inputs]
    with np.errstate(all="ignore"):
        (got,) = evaluate_graph(graph, arrays)
    np.testing.assert_allclose(got, function(*inputs).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        pytest.param(lambda x: x + torch.rand(3), "random numbers", id="random numbers"),
        pytest.param(lambda x: x[torch.randperm(3)], "random numbers", id="a random order"),
        pytest.param(
            lambda x: functional.max_pool1d(x[None], 2, return_indices=True), "result 1", id="places of maxima"
        ),
        pytest.param(
            lambda x: functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], None, 0.5),
            "dropout",
            id="dropout of attention",
        ),
    ],
)
def test_what_would_be_frozen_or_lost_is_refused(function: Callable[..., Any], reason: str):
    with pytest.raises(UnsupportedModelError, match=reason):
        hidet_dist.from_torch(Function(function).eval(), (_numbers(3),))


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


def test_a_module_with_a_state_is_refused():
    with pytest.raises(TraceError, match="'calls'"):
        hidet_dist.from_torch(Counter().eval(), torch.zeros(3))


def test_a_size_among_the_results_is_refused():
    batch = torch.export.Dim("batch")
    with pytest.raises(TraceError, match="neither a tensor"):
        hidet_dist.from_torch(
            Function(lambda x: (x * 2, x.shape[0])).eval(), (_numbers(4, 3),), {"args": ({0: batch},)}
        )
