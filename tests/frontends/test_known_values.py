"""Sizes and control flow that depend on positions alone can be traced; those that depend on arguments cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hidet_dist
from hidet_dist.errors import TraceError
from hidet_dist.soundness.plans import evaluate_graph


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def lower_triangle(x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[0])
    return positions[None, :] <= positions[:, None]


def rows_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    """For each row, the mean of those that it sees, found by their numbers."""
    return torch.stack([x[torch.nonzero(seen).flatten()].mean(0) for seen in lower_triangle(x)])


def by_a_mask(x: torch.Tensor) -> torch.Tensor:
    odd = torch.arange(x.shape[0]) % 2 == 1
    return x[odd] * odd.sum().item()


def written_by_a_mask(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for number in range(3):  # no row has the last number
        own = torch.arange(x.shape[0]) % 2 == number
        y[own] = x[own] * (number + 2)
    return y


def branches(x: torch.Tensor) -> torch.Tensor:
    mask = x.new_ones(x.shape[0], dtype=torch.int64)
    mask = mask if mask.sum() < 3 else mask * 2
    return x * 2 if mask.max().item() == 2 and lower_triangle(x).any() else x


def changed_in_place(x: torch.Tensor) -> torch.Tensor:
    """A view of a tensor of numbers is written to: what the tensor holds follows."""
    counts = torch.zeros(x.shape[0], dtype=torch.int64)
    counts[1:].add_(torch.arange(x.shape[0] - 1))
    counts[0] = 2
    return x[counts]


def split(x: torch.Tensor) -> torch.Tensor:
    first, second = x.split(torch.tensor([1, 3]).tolist())
    return second - first


X = torch.arange(8.0).reshape(4, 2)


@pytest.mark.parametrize("function", [rows_in_a_loop, by_a_mask, written_by_a_mask, branches, changed_in_place, split])
def test_what_positions_decide_is_traced(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    (got,) = evaluate_graph(hidet_dist.from_torch(Function(function).eval(), (X,)), [X.numpy()])
    np.testing.assert_array_equal(got, function(X).numpy())


def written_by_an_argument(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(x.shape[0], dtype=torch.bool)
    view = mask[:2]
    mask[:] = x[:, 0] > 3
    return x[view.nonzero().flatten()]


def drawn(x: torch.Tensor) -> torch.Tensor:
    return x[torch.rand(4).round().nonzero().flatten()]


def _chosen(change: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The rows of an argument that a tensor of ones chooses, after what changes it in place."""

    def choose(x: torch.Tensor) -> torch.Tensor:
        chosen = torch.ones(4)
        view = chosen[:]
        change(chosen, x[:, 0])
        return x[view.nonzero().flatten()]

    return choose


def _drop_out(chosen: torch.Tensor, _: torch.Tensor) -> None:
    nn.functional.dropout(chosen, 0.5, training=True, inplace=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[(x > 3).nonzero()[:, 0]],
        written_by_an_argument,
        drawn,
        _chosen(_drop_out),
        _chosen(lambda chosen, x: torch.ops.aten.bernoulli_.float(chosen, 0.5)),
        _chosen(torch.ops.aten.copy_.default),
        _chosen(lambda chosen, x: torch._foreach_mul_([chosen], [x])),
        _chosen(lambda chosen, x: torch._foreach_mul_([chosen], [torch.tensor([0.0, 1.0, 1.0, 0.0])])),
    ],
)
def test_what_arguments_and_chance_decide_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(TraceError):
        hidet_dist.from_torch(Function(function).eval(), (X,))
