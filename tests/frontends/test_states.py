"""Modules of PyTorch that write to their buffers: the buffers become states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist.errors import TraceError
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.weights.states import new_values


class Keeping(torch.nn.Module):
    """A module that updates buffers in the ways in which models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("pool", torch.zeros(12, 4, 2))
        self.register_buffer("hidden", torch.full((4, 2), 0.5))
        self.register_buffer("window", torch.zeros(2, 8, 4), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(2, 3, 6, 4))

    def forward(self, x: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k = self.linear(x).view(-1, 4, 2)
        before = self.hidden.reshape(1, 8) + x
        self.pool[slots] = k
        keys = self.pool[rows]
        self.hidden.copy_(torch.tanh(self.hidden * 0.5 + k.sum(0)))
        self.window.copy_(torch.cat([self.window[:, :, 1:], x[:2].reshape(2, 8, 1)], -1))
        self.table.index_copy_(2, slots[:2] % 6, k.reshape(-1)[:12].reshape(2, 3, 2, 1).expand(2, 3, 2, 4))
        self.table[:, 1:2] = x[0, :4]
        self.count.add_(1)
        mixed = (torch.softmax(keys, 1) * keys).sum(1).reshape(-1, 8)
        return before + mixed, self.count, self.hidden, self.window.sum(), self.table, self.pool.reshape(3, -1)


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 8), torch.randperm(12)[:3], torch.randint(0, 12, (3, 3))


def test_buffers_that_are_written_become_states_with_their_values():
    torch.manual_seed(0)
    module = Keeping().eval()
    graph = hidet_dist.from_torch(module, inputs())
    states: dict[str, np.ndarray] = {}
    for _ in range(3):
        call = inputs()
        got = evaluate_graph(graph, [x.double().numpy() if x.is_floating_point() else x.numpy() for x in call], states)
        with torch.no_grad():
            expected = module(*call)
        for y, want in zip(got, expected, strict=True):
            np.testing.assert_allclose(y, want.numpy(), rtol=1e-5, atol=1e-5)
    buffers = dict(module.named_buffers())
    assert states.keys() == buffers.keys()
    for name, value in states.items():
        np.testing.assert_allclose(value, buffers[name].numpy(), rtol=1e-5, atol=1e-5)


def test_rows_are_written_in_place_and_not_by_a_pass_over_the_state():
    graph = hidet_dist.from_torch(Keeping().eval(), inputs())
    updates = {type(y.op).__name__ for y in new_values(graph.outputs).values()}
    assert updates == {"WriteRowsOp", "ReplaceStateOp"}
    passing = [
        node.name
        for node in graph.nodes
        if node.name != "WriteRows" and [12, 4, 2] in [list(y.shape) for y in node.outputs]
    ]
    assert passing == []


def test_equal_layers_share_operators_whether_they_read_states_or_not():
    """A lowering is copied for equal arguments; a state's is not equal to a tensor's of its shape."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pool", torch.zeros(6, 4))

        def forward(self, x: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            other = x.index_put((slots,), rows)
            self.pool.index_put_((slots,), rows)
            return other + self.pool

    graph = hidet_dist.from_torch(Both().eval(), (torch.zeros(6, 4), torch.tensor([0, 2]), torch.ones(2, 4)))
    assert sorted(node.name for node in graph.nodes if "Rows" in node.name) == ["ScatterRows", "WriteRows"]


def test_writing_to_an_argument_is_still_refused():
    class Writes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    with pytest.raises(TraceError, match=r"argument 'x'.*buffer of the module, which becomes a state"):
        hidet_dist.from_torch(Writes().eval(), torch.zeros(2))
