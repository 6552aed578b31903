"""LSTM, GRU and RNN layers of PyTorch: unrolled, whole and sharded, beside what PyTorch computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hidet_dist
from hidet_dist.errors import InfeasibleError, TraceError
from hidet_dist.soundness.plans import evaluate_graph, evaluate_program
from hidet_dist.spec.interface import interface_of

LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm, two layers, both directions, batch first": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "lstm with a projection, without biases": lambda: nn.LSTM(3, 4, proj_size=2, bias=False),
    "gru": lambda: nn.GRU(3, 4),
    "gru, two layers, both directions": lambda: nn.GRU(3, 4, 2, bidirectional=True, dropout=0.5),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


def flat(value):
    return [value] if isinstance(value, torch.Tensor | np.ndarray) else [x for part in value for x in flat(part)]


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_compute_what_pytorch_does(name):
    torch.manual_seed(0)
    module, x = LAYERS[name]().eval(), torch.randn(5, 2, 3)
    with torch.no_grad():
        want = module(x)
    graph = hidet_dist.from_torch(module, x)
    interface = interface_of(graph)
    assert interface is not None
    got = interface.nest(evaluate_graph(graph, [x.double().numpy()]))
    for own, peer in zip(flat(got), flat(want), strict=True):
        np.testing.assert_allclose(own, peer.numpy(), rtol=1e-5, atol=1e-6)


def test_given_states_and_sharded_weights():
    torch.manual_seed(0)
    module = nn.LSTM(4, 8).eval()
    x, h, c = torch.randn(3, 2, 4), torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    with torch.no_grad():
        want = module(x, (h, c))
    graph = hidet_dist.from_torch(module, (x, (h, c)))
    with pytest.raises(InfeasibleError) as refused:
        hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"mem_budget": 1})
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"mem_budget": refused.value.least_budget})
    names = {weight.label for weight in plan.stages[0].weights if weight.spec.mesh_axes}
    assert names & {"weight_ih_l0", "weight_hh_l0"}
    program = hidet_dist.partition(graph, plan)
    outputs = evaluate_program(program, [value.double().numpy() for value in (x, h, c)])
    for rank, own in enumerate(outputs):
        for y, spec, peer in zip(own, plan.stages[0].outputs, flat(want), strict=True):
            part = peer.numpy()[spec.spec.slices(peer.shape, program.mesh, program.mesh.coordinate(rank))]
            np.testing.assert_allclose(y, part, rtol=1e-5, atol=1e-6)


def test_a_recurrent_layer_without_data_has_named_weights():
    with torch.device("meta"):
        module, x = nn.GRU(16, 32), torch.empty(2, 4, 16)
    plan = hidet_dist.make_plan(hidet_dist.from_torch(module.eval(), x), {"mesh_shape": [2]})
    shapes = {weight.label: weight.shape for weight in plan.stages[0].weights if weight.label}
    assert shapes["weight_ih_l0"] == (96, 16)
    assert all(weight.device.type == "meta" for weight in module._flat_weights)


def test_a_symbolic_number_of_steps_is_refused():
    steps = torch.export.Dim("steps", min=2, max=64)
    with pytest.raises(TraceError, match="steps"):
        hidet_dist.from_torch(nn.LSTM(3, 4).eval(), torch.zeros(5, 2, 3), ({0: steps},))
