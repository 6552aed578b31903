"""An operator built on symbols and evaluated by the oracle, beside what PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hidet
import numpy as np
import torch
from hidet.graph import Tensor

from hidet_dist.soundness.plans import evaluate_graph

LOOSE = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 2e-6, "float64": 1e-12}


def traced(build: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[list[Tensor], hidet.FlowGraph]:
    """The symbols' function as a graph, with the outputs in order."""
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        symbols = [hidet.symbol(list(x.shape), str(x.dtype).removeprefix("torch."), "cpu") for x in inputs]
        found = build(*symbols)
        outputs = list(found) if isinstance(found, list | tuple) else [found]
        return outputs, hidet.trace_from(outputs, symbols)


def compare(
    build: Callable[..., Any], reference: Callable[..., Any], *inputs: torch.Tensor, atol: float = 1e-6
) -> hidet.FlowGraph:
    """Assert that both give the same values, shapes and dtypes for these inputs; the graph of the first."""
    outputs, graph = traced(build, inputs)
    arrays = [x.double().numpy() if x.dtype.is_floating_point else x.numpy() for x in inputs]
    got = evaluate_graph(graph, arrays)
    expected = reference(*inputs)
    wanted = list(expected) if isinstance(expected, list | tuple) else [expected]
    assert len(got) == len(wanted)
    for own, symbol, want in zip(got, outputs, wanted, strict=True):
        dtype = str(want.dtype).removeprefix("torch.")
        assert symbol.dtype.name == dtype
        assert tuple(int(n) for n in symbol.shape) == tuple(want.shape) == np.shape(own)
        if want.dtype.is_floating_point:
            peer = want.double().numpy()
            np.testing.assert_allclose(own, peer, rtol=LOOSE[dtype], atol=max(atol, LOOSE[dtype] / 10))
        else:
            np.testing.assert_array_equal(own, want.numpy())
    return graph


_generator = torch.Generator()


def floats(*shape: int) -> torch.Tensor:
    """Normally distributed numbers, the same for a shape every time."""
    return torch.randn(shape, generator=_generator.manual_seed(sum(shape)))


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    """int64 numbers of [low, high), the same for a shape every time."""
    return torch.randint(low, high, shape, generator=_generator.manual_seed(sum(shape)))


def booleans(*shape: int) -> torch.Tensor:
    """Truth values, the same for a shape every time."""
    return integers(0, 2, *shape).bool()
