"""Layers that a module has several times are exported once, and computed as PyTorch computes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist.soundness.plans import evaluate_graph

COUNT = 12


class Block(torch.nn.Module):
    """A layer that knows its number, and counts the calls of all layers."""

    calls = 0

    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.rand(4), persistent=number < COUNT // 2)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return torch.relu(self.linear(x)) * self.scale + x


class ByNumber(Block):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().forward(x, weight) + self.number


class Alternating(Block):
    """A layer that looks at an integer that every other one shares, beside its number."""

    def __init__(self, number: int):
        super().__init__(number)
        self.is_rotated = int(number % 2)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flip(0) if self.is_rotated else x, weight)


class Writing(Block):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = super().forward(x, weight)
        x.add_(1)
        return y


class Returning(Block):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.view(-1).view(x.shape)


class ByOthers(Block):
    """A layer that reads a weight which is neither an argument nor a part of it."""

    outside: torch.Tensor

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().forward(x, weight) @ ByOthers.outside


class WithBoth(Block):
    """A layer with several results, one of them a part of an object, and a constant."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x, weight)
        return hidden @ weight + torch.tensor([1.0, 2.0, 3.0, 4.0])


class Stack(torch.nn.Module):
    def __init__(self, kind: Callable[[int], Block]):
        super().__init__()
        self.layers = torch.nn.ModuleList(kind(number) for number in range(COUNT))
        self.weight = torch.nn.Parameter(torch.rand(4, 4))
        ByOthers.outside = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        for layer in self.layers:
            hidden = layer(hidden, self.weight) + hidden
        return hidden


@pytest.mark.parametrize(
    "kind, calls",
    [
        (Block, 4),  # of two kinds, by whether the buffer is saved; one of each is traced, and exported by itself
        (Alternating, 8),
        (WithBoth, 4),
        (ByNumber, None),
        (Writing, None),
        (Returning, None),
        (ByOthers, None),
    ],
)
def test_equal_layers_are_called_as_pytorch_calls_them(kind, calls):
    torch.manual_seed(0)
    module = Stack(kind).eval()
    x = torch.randn(3, 4)
    kind.calls = 0
    graph = hidet_dist.from_torch(module, (x,))
    if calls is not None:
        assert kind.calls == calls
    with torch.no_grad():
        want = module(x).numpy()
    (got,) = evaluate_graph(graph, [x.double().numpy()])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert all("forward" not in vars(layer) for layer in module.layers)
    assert [layer.number for layer in module.layers] == list(range(COUNT))
