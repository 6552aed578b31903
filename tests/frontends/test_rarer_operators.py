"""Operators of few models: bags of embeddings, bilinear layers, scatters, shifts, resampling, empty tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.frontends.test_corner_cases import Function
from torch.nn import functional

import hidet_dist
from hidet_dist.errors import TraceError, UnsupportedModelError
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import evaluate_graph

MODES = ("sum", "mean", "max")
REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def places(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Compare what a function's graph computes, by the oracle, with PyTorch's results."""
    graph = hidet_dist.from_torch(Function(function).eval(), inputs)
    got = evaluate_graph(graph, [x.double().numpy() if x.dtype.is_floating_point else x.numpy() for x in inputs])
    want = function(*inputs)
    for symbol, own, peer in zip(graph.outputs, got, want if isinstance(want, tuple) else (want,), strict=True):
        assert symbol.dtype.name == str(peer.dtype).removeprefix("torch.")
        np.testing.assert_allclose(own, peer.double().numpy(), rtol=1e-5, atol=2e-6)


def test_bags_of_embeddings():
    def bags(table: torch.Tensor, even: torch.Tensor, flat: torch.Tensor, begins: torch.Tensor, factors: torch.Tensor):
        bag = functional.embedding_bag
        return (
            *(bag(even, table, mode=mode) for mode in MODES),
            *(bag(even, table, mode=mode, padding_idx=3) for mode in ("sum", "mean")),
            *(bag(flat, table, begins, mode=mode) for mode in MODES),
            bag(flat, table, torch.tensor([0, 3, 3, 7]), mode="mean", include_last_offset=True),
            bag(even, table, mode="sum", per_sample_weights=factors),
        )

    even = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6], [3, 3, 3, 3]])
    check(
        lambda table, flat, begins, factors: bags(table, even, flat, begins, factors),
        *(numbers(10, 3), places(10, 7), torch.tensor([0, 2, 2]), numbers(3, 4)),
    )


def test_scatters_that_reduce():
    def scattered(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kinds = [(reduction, own) for reduction in REDUCTIONS for own in (True, False)]
        return (
            *(x.scatter_reduce(0, index, source, reduction, include_self=own) for reduction, own in kinds),
            (x * 9).int().scatter_reduce(0, index, (source * 9).int(), "mean"),
        )

    check(scattered, numbers(5, 3), places(4, 6, 3), numbers(6, 3))


@pytest.mark.parametrize("shape", [(2, 5, 1), (2, 5, 4), (5, 1), (1, 1, 1)])
@pytest.mark.parametrize("is_broadcast", [True, False])
def test_elements_take_the_places_of_a_mask(shape: tuple[int, ...], is_broadcast: bool) -> None:
    """Whole rows at once where the mask is broadcast over them."""

    def replaced(x: torch.Tensor, choice: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        mask = choice > 0
        return x.masked_scatter(mask.expand_as(x) if is_broadcast else mask, source)

    choice = numbers(*shape)
    choice.view(-1)[0] = 1.0
    check(replaced, numbers(2, 5, 4), choice, numbers(10, 4))


def test_a_mask_of_too_many_places_is_refused() -> None:
    module = Function(lambda x: x.masked_scatter(x > 0, x)).eval()
    with pytest.raises(UnsupportedModelError, match="a mask of 90000 places"):
        hidet_dist.from_torch(module, (torch.empty(300, 300, device="meta"),))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(lambda x: (x.any(1), x.all(0), x.any()), [places(2, 3, 4).byte()], id="any of uint8"),
        pytest.param(
            lambda a, b: (a << b, a >> b, a << 2, a >> 1, b - (3 >> b)), [places(50, 4), places(4, 4)], id="bits"
        ),
        pytest.param(torch._int_mm, [places(9, 17, 16).char(), places(9, 16, 8).char()], id="a product of int8"),
        pytest.param(
            lambda x: functional.interpolate(x, (3, 4), None, "bilinear", antialias=True),
            [numbers(1, 2, 8, 9)],
            id="aa",
        ),
        pytest.param(
            lambda x: functional.interpolate(x, None, 0.4, "bicubic", False, True, True),
            [numbers(1, 2, 8, 9)],
            id="cubic",
        ),
        pytest.param(
            lambda x, grid: functional.grid_sample(x, grid, "bicubic", "reflection", True),
            [numbers(1, 2, 4, 5), numbers(1, 3, 3, 2)],
            id="points of an image",
        ),
        pytest.param(
            lambda x, grid: functional.grid_sample(x, grid, align_corners=False),
            [numbers(1, 2, 4, 5, 3), numbers(1, 3, 3, 2, 3)],
            id="points of a volume",
        ),
        pytest.param(functional.bilinear, [numbers(2, 6, 3), numbers(2, 6, 4), numbers(5, 3, 4)], id="bilinear"),
        pytest.param(lambda x: torch.cat([torch.tensor([]), x, x[:, :0]], -2 + 1), [numbers(2, 3)], id="an empty part"),
        pytest.param(lambda x: functional.rms_norm(x, (6,)), [numbers(4, 6) * 1e-3], id="the epsilon of float32"),
        pytest.param(lambda x: functional.rms_norm(x, (6,)), [numbers(4, 6).double() * 1e-7], id="that of float64"),
    ],
)
def test_results_are_pytorchs(function: Callable[..., Any], inputs: list[torch.Tensor]):
    check(function, *inputs)


@pytest.mark.slow
def test_bags_scatters_and_norms_of_halves_sharded_and_built():
    def function(table: torch.Tensor, flat: torch.Tensor, begins: torch.Tensor, half: torch.Tensor) -> Any:
        bags = functional.embedding_bag(flat, table, begins, mode="mean")
        least = bags.scatter_reduce(0, flat[:4, None] % 4, table[:4, :1], "amin", include_self=False)
        return bags, least, functional.rms_norm(half, (6,))  # the squares of these halves overflow

    inputs = (numbers(8, 4), places(8, 6), torch.tensor([0, 2, 2, 5]), (numbers(4, 6) * 1000).half())
    graph = hidet_dist.from_torch(Function(function).eval(), inputs)
    program = hidet_dist.partition(graph, hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"mem_budget": 2000}))
    for own, want in zip(simulate(program, [x.numpy() for x in inputs]), function(*inputs), strict=True):
        np.testing.assert_allclose(own, want.numpy(), rtol=2e-3 if want.dtype == torch.float16 else 1e-5, atol=1e-6)


def test_an_empty_result_is_refused_by_name():
    with pytest.raises(TraceError, match=r"'\w+', which has no elements \(its shape is \[0, 6\]\)"):
        hidet_dist.from_torch(Function(lambda x: (x * 2, x[:0])).eval(), (numbers(4, 6),))


def _rotated(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings by complex numbers, as several models have them."""
    turns = torch.polar(torch.ones_like(frequencies), frequencies)
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turns
    return torch.view_as_real(turned).flatten(2)


def _arithmetic(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = torch.view_as_complex(x), torch.view_as_complex(y)
    known = torch.polar(torch.ones(4), torch.arange(4.0))
    complex_ones = (
        *(a + b, a - 1.5, a * (2 + 1j), 2 * a, a * y[:, 0], a / 3, -a, a.exp(), a.conj() * b, a * known),
        *(torch.cat([a, b]), a[1:3], a[None].expand(3, 4), torch.stack([a, b], 1).mT, a[torch.tensor([2, 0])]),
        *(a.sum(0), b.chunk(2)[1], torch.complex(x, y)),
    )
    return *map(torch.view_as_real, complex_ones), a.abs(), a.angle(), a.real, b.imag


def test_complex_numbers_are_pairs():
    check(_rotated, numbers(2, 4, 6), numbers(4, 3))
    check(_arithmetic, numbers(4, 2), numbers(4, 2) * 2)


@pytest.mark.slow
def test_complex_rotations_sharded_and_built():
    inputs = (numbers(2, 4, 6), numbers(4, 3))
    graph = hidet_dist.from_torch(Function(_rotated).eval(), inputs)
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"input_specs": ["(S0, R, R)", "(R, R)"]})
    (got,) = simulate(hidet_dist.partition(graph, plan), [x.numpy() for x in inputs])
    np.testing.assert_allclose(got, _rotated(*inputs).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.view_as_real(torch.view_as_complex(x).sin()), "aten.sin.*for complex numbers"),
        (lambda x: torch.view_as_real(x.to(torch.complex64)), "between real and complex"),
        (torch.view_as_complex, "view_as_real of it"),
    ],
)
def test_other_uses_of_complex_numbers_are_refused(function: Callable[..., Any], reason: str):
    with pytest.raises(TraceError, match=reason):
        hidet_dist.from_torch(Function(function).eval(), (numbers(4, 2),))
