"""Numbers that a module computes from symbolic sizes, such as ``1.0 / n``: whole, sharded and built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hidet
import numpy as np
import pytest
import torch
from torch import nn

import hidet_dist
from hidet_dist.errors import UnsupportedModelError
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import evaluate_graph, evaluate_program

ROWS = {"x": {0: torch.export.Dim("rows", min=2)}}
OPTIONS = {"symbols": {"rows": {"expected": 8, "multiple_of": 4}}, "input_specs": ["(S0, R)"]}


class Scaled(nn.Module):
    """The results of a function of a tensor and its number of rows."""

    def __init__(self, function: Callable[[torch.Tensor, Any], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, x.shape[0])


def graph_of(function: Callable[[torch.Tensor, Any], Any]) -> hidet.FlowGraph:
    return hidet_dist.from_torch(Scaled(function).eval(), (torch.zeros(4, 3),), ROWS)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count))


def _many(x: torch.Tensor, n: Any) -> list[torch.Tensor]:
    return [
        *(x * (1.0 / n), x * n**0.5, n / 2 - x, x / torch.sym_sqrt(n), x.double() + 1 / n, (1 / n) ** x, n // 3 - x),
        *(torch.where(x > 1 / n, x, 1 / n), x.clamp(max=1 / n), x.masked_fill(x > 0, n * 0.5)),
        *(x + torch.full((3,), 1 / n), (x > 0) * (n**-0.5), x.abs() ** (n / 4), x.sum(0) / n),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [8, 12])
def test_numbers_from_sizes_are_pythons_whole_and_sharded(count: int):
    graph, x = graph_of(_many), rows(count)
    program = hidet_dist.partition(graph, hidet_dist.make_plan(graph, {"mesh_shape": [2]}, OPTIONS))
    outputs = [y.spec for y in program.outputs]
    whole = evaluate_graph(graph, [x.double().numpy()])
    ranks = evaluate_program(program, [x.double().numpy()])
    for number, (own, want) in enumerate(zip(whole, _many(x, count), strict=True)):
        np.testing.assert_allclose(own, want.numpy(), rtol=1e-4, atol=1e-5)
        for rank, results in enumerate(ranks):
            part = own[outputs[number].slices(own.shape, program.mesh, program.mesh.coordinate(rank))]
            np.testing.assert_allclose(results[number], part, rtol=1e-6, atol=1e-7)


def test_numbers_from_sizes_are_built():
    graph = graph_of(lambda x, n: (x * n**-0.5, torch.where(x > 0, x, n / 2)))
    program = hidet_dist.partition(graph, hidet_dist.make_plan(graph, {"mesh_shape": [2]}, OPTIONS))
    for count in (4, 20):
        x = rows(count)
        scaled, chosen = simulate(program, [x.numpy()])
        np.testing.assert_allclose(scaled, x.numpy() * count**-0.5, rtol=1e-6)
        np.testing.assert_allclose(chosen, np.where(x > 0, x, count / 2), rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "operator", "reason"),
    [
        (lambda x, n: x * max(n, 5), "torch.sym_max", "Max"),
        (lambda x, n: x * torch.add(x, x, alpha=1 / n), "aten.add.Tensor", "computed from symbolic dims"),
        (lambda x, n: x * x.sum().item(), "aten._local_scalar_dense.default", "depends on data"),
    ],
)
def test_other_numbers_are_refused_by_name(function: Callable[..., Any], operator: str, reason: str):
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        graph_of(function)
    assert [call.operator for call in caught.value.missing] == [operator]
