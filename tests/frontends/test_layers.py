"""Layers that a module has several times are exported once, and computed as PyTorch computes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hidet.graph import FlowGraph

import hidet_dist
from hidet_dist.frontends.pytorch import patterns
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.weights.named import names_of

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


class Sharing(Block):
    """A layer that computes something from what all layers are given."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().forward(x, weight) @ (weight.t() @ weight).relu()


class Undoing(Block):
    """A layer that begins with the inverse of how its argument is made."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().forward(x.t(), weight.t().t()).t()


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
    _check(Stack(kind).eval(), calls)


def _check(module: Stack, calls: int | None = None) -> FlowGraph:
    """Compare a graph with its module, which must be as before; count the calls of layers while it is traced."""
    x = torch.randn(3, 4)
    Block.calls = type(module.layers[0]).calls = 0
    graph = hidet_dist.from_torch(module, (x,))
    if calls is not None:
        assert type(module.layers[0]).calls == calls
    with torch.no_grad():
        want = module(x).numpy()
    (got,) = evaluate_graph(graph, [x.double().numpy()])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert all("forward" not in vars(layer) for layer in module.layers)
    assert [layer.number for layer in module.layers] == list(range(COUNT))
    assert all(type(part._parameters) is dict and type(part._buffers) is dict for part in module.modules())
    return graph


class Scaled(Stack):
    """A module that reads the weights of its layers."""

    def __init__(self, read: Callable[[torch.nn.Module], torch.Tensor]):
        super().__init__(Block)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(self)


def _sum_of_weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.stack([weight.sum() for weight in module.parameters()]).sum()


def _one_weight(module: torch.nn.Module) -> torch.Tensor:
    return module.get_submodule("layers.5.linear").weight[0]


def _one_buffer(module: torch.nn.Module) -> torch.Tensor:
    return dict(module.named_buffers())["layers.4.scale"]


def _whether_there_is_one(module: torch.nn.Module) -> torch.Tensor:
    return torch.tensor(2.0 if hasattr(module.get_submodule("layers.3.linear"), "bias") else 3.0)


class Turned(Stack):
    """A module whose layers have transposed arguments, by turns of two tensors that are computed from a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, weights = x * 2, (self.weight.t(), self.weight.t() * 2)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden.t(), weights[number % 2]).t() + hidden
        return hidden


def _text(graph: FlowGraph) -> list[str]:
    """Describe the operators of a graph, with the numbers of those that make their inputs."""
    number = {op: place for place, op in enumerate(graph.nodes)}
    names = {x: name for name, x in names_of(x for op in graph.nodes for x in op.inputs).items()}
    return [
        f"{op.name} {op.attrs} of {[number[x.op] if x.op in number else names.get(x) for x in op.inputs]}"
        for op in graph.nodes
    ]


@pytest.mark.parametrize(
    ("stack", "kind"),
    [
        *((stack, kind) for stack in (Stack, Turned) for kind in (Block, Alternating, WithBoth, Sharing)),
        (Turned, Undoing),
    ],
)
def test_operators_of_equal_layers_are_copied_from_the_first_one(monkeypatch, stack, kind):
    """The graph is the one in which each layer is lowered by itself, as PyTorch computes it."""
    copies = []
    copy = patterns.LayerPattern.copy

    def copied(pattern, operands):
        copies.append(copy(pattern, operands))
        return copies[-1]

    torch.manual_seed(0)
    module = stack(kind).eval()
    x = torch.randn(4, 4)
    monkeypatch.setattr(patterns.LayerPattern, "copy", copied)
    graph = hidet_dist.from_torch(module, (x,))
    assert any(results is not None for results in copies)
    monkeypatch.setattr(patterns.LayerPattern, "copy", lambda pattern, operands: None)
    assert _text(graph) == _text(hidet_dist.from_torch(module, (x,)))
    with torch.no_grad():
        want = module(x).numpy()
    (got,) = evaluate_graph(graph, [x.double().numpy()])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("read", [_sum_of_weights, _one_weight, _one_buffer, _whether_there_is_one])
def test_a_module_reads_the_weights_of_its_layers(read):
    torch.manual_seed(0)
    _check(Scaled(read).eval())


class Narrowing(Stack):
    """A module that calls some of its layers with fewer rows."""

    def __init__(self, narrowed: tuple[int, ...]):
        super().__init__(Block)
        self.narrowed = narrowed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        for layer in self.layers:
            y = layer(hidden[:1] if layer.number in self.narrowed else hidden, self.weight)
            hidden = hidden + y
        return hidden


@pytest.mark.parametrize("narrowed, calls", [((4,), 6), ((4, 5, 6), 11), ((1, 3, 5, 7, 8), 12)])
def test_layers_are_called_with_other_arguments(narrowed, calls):
    """A layer that has other arguments than those before it is traced, too, in another attempt."""
    torch.manual_seed(0)
    _check(Narrowing(narrowed).eval(), calls)


def test_layers_share_a_weight():
    torch.manual_seed(0)
    module = Stack(Block)
    for layer in module.layers[1:3]:
        layer.linear.weight = module.layers[0].linear.weight
    module.layers[9].linear.weight = module.weight
    graph = _check(module.eval())
    names = names_of(x for op in graph.nodes for x in op.inputs)
    found = sorted(name for name in names if name.endswith("weight"))
    assert found == sorted(
        ["weight", *(f"layers.{number}.linear.weight" for number in range(COUNT) if number not in (1, 2, 9))]
    )
