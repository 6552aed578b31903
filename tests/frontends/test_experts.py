"""Layers of experts of transformers, each token by some of them, beside what PyTorch computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist.errors import InfeasibleError, UnsupportedModelError
from hidet_dist.soundness.plans import evaluate_program

transformers = pytest.importorskip("transformers")


def experts(implementation: str) -> torch.nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = transformers.MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4)
    config._experts_implementation = implementation
    module = MixtralExperts(config).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0.0, 0.3)
    return module


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_compute_what_pytorch_does(implementation):
    torch.manual_seed(0)
    module = experts(implementation)
    tokens = torch.randn(6, 8)
    chosen = torch.tensor([[0, 1], [3, 0], [3, 1], [1, 3], [0, 3], [3, 0]])  # and none of them the third one
    inputs = (tokens, chosen, torch.rand(6, 2))
    with torch.no_grad():
        want = module(*inputs).numpy()
    graph = hidet_dist.from_torch(module, inputs)
    with pytest.raises(InfeasibleError) as refused:
        hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"mem_budget": 1})
    for budget in (None, refused.value.least_budget):
        plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {} if budget is None else {"mem_budget": budget})
        program = hidet_dist.partition(graph, plan)
        arrays = [x.double().numpy() if x.is_floating_point() else x.numpy() for x in inputs]
        (output,) = plan.stages[0].outputs
        for rank, (y,) in enumerate(evaluate_program(program, arrays)):
            part = want[output.spec.slices(want.shape, program.mesh, program.mesh.coordinate(rank))]
            np.testing.assert_allclose(y, part, rtol=1e-4, atol=1e-5)


def test_experts_one_by_one_are_refused():
    inputs = (torch.randn(6, 8), torch.zeros(6, 2, dtype=torch.int64), torch.rand(6, 2))
    with pytest.raises((UnsupportedModelError, hidet_dist.errors.TraceError)):
        hidet_dist.from_torch(experts("eager"), inputs)
