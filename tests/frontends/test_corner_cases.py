"""Corner cases of PyTorch's operators, evaluated without kernels, and modules that no graph can stand for."""

from __future__ import annotations

import itertools
import math
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
        pytest.param(lambda x: x.var((-1, 0)), [_numbers(2, 3, 5)], id="the variance over dims in another order"),
        pytest.param(lambda x: torch.xlogy(x, torch.tensor(2.0)), [_numbers(3, 4)], id="a choice by a known number"),
        pytest.param(lambda x: x.masked_fill(torch.tensor(True), 2), [_numbers(3, 4)], id="a mask of one number"),
        pytest.param(lambda x: x.var(0, correction=0), [torch.tensor(3.0)], id="the variance of a number"),
        pytest.param(lambda x: x.topk(1)[1], [torch.tensor(math.nan)], id="the place of a number that is not one"),
        pytest.param(lambda x: x.tril(2**40), [_numbers(3, 4)], id="a diagonal above all elements"),
        pytest.param(lambda x: x.triu(-(2**31)), [_numbers(3, 4)], id="a diagonal below all elements"),
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


_ONE, _PLACE = torch.tensor([0]), torch.tensor(0)


def _at_places_of_numbers(number: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Index tensors without dims, and by them: PyTorch takes them for rows of one element."""
    results = [number.flip(0), number.unfold(0, 1, 1), number.movedim(0, -1), row.gather(0, _PLACE)]
    results += [functional.cosine_similarity(number, number, 0)]
    for place in (_ONE, _PLACE):
        results += [number.index_select(-1, place), row.index_select(0, place)]
        results += [number.index_add(0, place, number, alpha=2), number.index_copy(-1, place, number)]
        results += [row.index_add(0, place, number[None]), row.index_fill(0, place, 7)]
    return (*results, row.scatter(0, _PLACE, number), row.scatter_add(0, _PLACE, number), row.scatter(0, _PLACE, 7))


def _beyond_the_range(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Combine integers with numbers that their dtype does not have, which wrap around."""
    results = [x + -1, 300 - x, x * -3, x // -2, x % -3, x & -2, x << -1, x == -1, x < -2, x.clamp_min(-100)]
    results += [x.masked_fill(x > 1, -1), torch.where(x > 1, -1, x), torch.full_like(x, -1) + x]
    return (*results, 127**x, (-3) ** x, x**9, (x > 1) ** True)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (_at_places_of_numbers, [torch.tensor(1.5), _numbers(4)]),
        (_beyond_the_range, [torch.tensor([0, 1, 5, 100], dtype=torch.uint8)]),
        (_beyond_the_range, [torch.tensor([0, 1, 5, 100], dtype=torch.int8)]),
    ],
)
def test_numbers_as_tensors_and_beyond_a_dtype(function: Callable[..., Any], inputs: list[torch.Tensor]):
    graph = hidet_dist.from_torch(Function(function).eval(), tuple(inputs))
    arrays = [x.double().numpy() if x.dtype.is_floating_point else x.numpy() for x in inputs]
    for own, want in zip(evaluate_graph(graph, arrays), function(*inputs), strict=True):
        assert own.shape == want.shape
        np.testing.assert_allclose(own, want.numpy(), rtol=1e-6)


class Cut(nn.Module):
    """A part of its argument that may have no elements."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 4:].exp()


class Around(nn.Module):
    """A sum over such a part."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = Cut()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cut(x).sum(1)


@pytest.mark.parametrize(
    ("module", "shapes", "reason"),
    [
        (
            Around(),
            [(2, 4)],
            r"Around computes with tensors of no elements: aten.slice.Tensor cut \(test_corner_cases.py:\d+\) makes "
            r"one of the shape \[2, 0\]; aten.exp.default cut",
        ),
        (
            Function(lambda x, y: torch.cat([x, y])),
            [(2, 4), (0, 4)],
            r"Tensor 1 of the arguments of Function .*\[0, 4\]",
        ),
    ],
)
def test_tensors_without_elements_are_refused_by_place(module: nn.Module, shapes: list[tuple[int, ...]], reason: str):
    with pytest.raises(TraceError, match=reason):
        hidet_dist.from_torch(module.eval(), tuple(torch.zeros(shape) for shape in shapes))


@pytest.mark.parametrize("result", [None, (), 3])
def test_a_module_that_returns_no_tensors_is_refused(result: Any):
    with pytest.raises(TraceError, match="Function computes nothing: it returns no tensors"):
        hidet_dist.from_torch(Function(lambda x: result).eval(), (_numbers(3),))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x: x * 2 if x.shape[0] % 2 else x,
            r"takes sizes n with `\(n % 2\) != 0` alone: declare other sizes, as by `Dim\('n', min=",
        ),
        (lambda x: x * 2 if x.shape[0] > 3 else x, r"takes sizes n with `4 <= n and n <= 64` alone: declare `n = Dim"),
        (lambda x: x.roll(1, 0), "needs sizes that are known, and has symbolic ones"),
        (lambda x: x.unfold(0, 2, 1), "needs sizes that are known, and has symbolic ones"),
    ],
)
def test_sizes_that_a_module_does_not_take_are_named(function: Callable[..., Any], reason: str):
    sizes = {0: torch.export.Dim("n", min=2, max=64)}
    with pytest.raises(TraceError, match=reason):
        hidet_dist.from_torch(Function(function).eval(), (_numbers(5, 6),), ((sizes,),))


def test_sizes_that_must_be_equal_are_named():
    n, m = (torch.export.Dim(name, min=2, max=64) for name in "nm")
    with pytest.raises(TraceError, match=r"values of m .* and n .* must always be equal"):
        hidet_dist.from_torch(Function(lambda x, y: x + y).eval(), (_numbers(5), _numbers(5)), (({0: n}, {0: m}),))


_KNOWN = [torch.tensor(2, dtype=kind) for kind in (torch.bool, torch.int32, torch.bfloat16, torch.float64)]


def _with_known_scalars(*tensors: torch.Tensor) -> list[torch.Tensor]:
    results = []
    for x, number in itertools.product(tensors, _KNOWN):
        results += [x + number, number * x, torch.maximum(x, number), x < number, torch.clamp(x, max=number)]
        results += [torch.where(x > 0, number, -3.0), torch.where(x > 0, x, number)]
        results += [] if x.dtype == number.dtype == torch.bool else [torch.pow(number, x)]
    return results


def test_known_tensors_without_dims_promote_dtypes_as_others_do():
    kinds = (torch.bool, torch.int64, torch.bfloat16)
    inputs = [torch.tensor([1, 0, 1]).to(kind) for kind in kinds] + [torch.tensor(1, dtype=torch.float16)]
    graph = hidet_dist.from_torch(Function(_with_known_scalars).eval(), tuple(inputs))
    arrays = [x.double().numpy() if x.dtype.is_floating_point else x.numpy() for x in inputs]
    with np.errstate(all="ignore"):
        got = evaluate_graph(graph, arrays)
    for symbol, own, want in zip(graph.outputs, got, _with_known_scalars(*inputs), strict=True):
        assert symbol.dtype.name == str(want.dtype).removeprefix("torch.")
        np.testing.assert_allclose(own, want.double().numpy(), rtol=1e-2)


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


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("antialias", [False, True])
def test_integers_are_not_interpolated_by_rounded_weights(mode: str, antialias: bool):
    x = torch.arange(42, dtype=torch.uint8).reshape(1, 1, 7, 6)
    resized = Function(
        lambda x: functional.interpolate(x, (4, 9), mode=mode, antialias=antialias and mode != "nearest")
    )
    if mode == "nearest":
        (got,) = evaluate_graph(hidet_dist.from_torch(resized.eval(), (x,)), [x.numpy()])
        np.testing.assert_array_equal(got, resized(x).numpy())
        return
    with pytest.raises(UnsupportedModelError, match="elements of uint8"):
        hidet_dist.from_torch(resized.eval(), (x,))


class Counter(nn.Module):
    """Counts its calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("calls", torch.zeros(3))
        self.weight = nn.Parameter(torch.zeros(3))
        self.last = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "buffer":
            self.calls.add_(1)
        elif self.kind == "parameter":
            self.weight.add_(1)
        else:
            self.last = self.last + 1
        return x + self.calls + self.weight + self.last


@pytest.mark.parametrize(("kind", "name"), [("parameter", "weight"), ("attribute", "last")])
def test_a_module_that_changes_a_parameter_or_an_attribute_is_refused(kind: str, name: str):
    with pytest.raises(TraceError, match=f"its {kind} '{name}'"):
        hidet_dist.from_torch(Counter(kind).eval(), torch.zeros(3))


def test_a_buffer_that_a_module_counts_in_is_a_state():
    graph = hidet_dist.from_torch(Counter("buffer").eval(), torch.zeros(3))
    states: dict[str, np.ndarray] = {}
    for calls in (1, 2, 3):
        np.testing.assert_array_equal(evaluate_graph(graph, [np.full(3, 0.5)], states)[0], np.full(3, 0.5 + calls))
    np.testing.assert_array_equal(states["calls"], np.full(3, 3.0))


class Cached(nn.Module):
    """Writes to a cache: its argument, a part of it, or a copy, as errors advise."""

    def __init__(self, write: Callable[..., Any]):
        super().__init__()
        self.write = write

    def forward(self, cache: torch.Tensor, place: torch.Tensor, x: torch.Tensor) -> Any:
        return self.write(cache, place, x), cache.sum(1)


def _write_to_argument(cache: torch.Tensor, place: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return cache.index_copy_(1, place, x)


def _write_to_view(cache: torch.Tensor, place: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.transpose(0, 1)[2:][0].add_(x[:, 0])
    return x


def _write_out(cache: torch.Tensor, place: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, 1, out=cache.view(-1)[:4].view(2, 1, 2))


def _write_without_autograd(cache: torch.Tensor, place: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        cache.detach().contiguous()[:, :1].copy_(x)
    return x


@pytest.mark.parametrize("write", [_write_to_argument, _write_to_view, _write_out, _write_without_autograd])
def test_writing_to_an_argument_is_refused(write: Callable[..., Any]):
    inputs = (_numbers(2, 5, 2), torch.tensor([3]), _numbers(2, 1, 2))
    for module in (Cached(write).eval(), torch.export.export(Cached(write).eval(), inputs)):
        with pytest.raises(TraceError, match=r"argument 'cache'.*clone\(\)"):
            hidet_dist.from_torch(module, inputs if isinstance(module, nn.Module) else None)


@pytest.mark.parametrize(
    "write",
    [
        lambda cache, place, x: cache.clone().index_copy_(1, place, x),
        lambda cache, place, x: cache.index_copy(1, place, x),
    ],
)
def test_a_copy_that_is_written_to_and_returned_is_right(write: Callable[..., Any]):
    inputs = (_numbers(2, 5, 2), torch.tensor([3]), _numbers(2, 1, 2))
    got = evaluate_graph(hidet_dist.from_torch(Cached(write).eval(), inputs), [x.numpy() for x in inputs])
    for own, want in zip(got, Cached(write)(*inputs), strict=True):
        np.testing.assert_allclose(own, want.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "rows", "reason"),
    [
        pytest.param(lambda x: x * 2, 1, "rows has size 1 in the example inputs.*2 or more", id="one row"),
        pytest.param(lambda x: x / math.sqrt(x.shape[0]), 4, "rows the number 4", id="a size as a number"),
        pytest.param(lambda x: x.reshape(2, -1), 4, r"`\(\(3\*rows\) % 2\) == 0`.*leave rows out", id="even sizes"),
        pytest.param(lambda x: x * 2 if x.shape[0] < 5 else x, 4, r"declare `rows = Dim\('rows', max=4\)`", id="few"),
        pytest.param(lambda x: x @ x, 4, r"\[4, 3\] X \[4, 3\].*test_corner_cases", id="shapes"),
        pytest.param(lambda x: x if x.sum() > 0 else -x, 4, "data-dependent(.|\n)*torch.where", id="control flow"),
        pytest.param(lambda x: {x}, 4, "returns a set", id="a set"),
        pytest.param(lambda: 0, 4, "takes 0 positional arguments", id="arguments"),
    ],
)
def test_errors_of_the_export_say_what_is_wrong(function: Callable[..., Any], rows: int, reason: str):
    dims = {"args": ({0: torch.export.Dim("rows")},)} if "row" in reason else None
    with pytest.raises(TraceError, match=reason) as caught:
        hidet_dist.from_torch(Function(function).eval(), (_numbers(rows, 3),), dims)
    assert ("Control flow" in str(caught.value)) == ("data" in reason)
    assert len(str(caught.value).splitlines()) <= 2


def test_a_size_among_the_results_is_refused():
    batch = torch.export.Dim("batch")
    with pytest.raises(TraceError, match="neither a tensor"):
        hidet_dist.from_torch(
            Function(lambda x: (x * 2, x.shape[0])).eval(), (_numbers(4, 3),), {"args": ({0: batch},)}
        )
