"""Layers of experts of transformers, each token by some of them, beside what PyTorch computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist.errors import InfeasibleError
from hidet_dist.normalize import normalize
from hidet_dist.operators.experts import ExpertProductOp
from hidet_dist.soundness.plans import evaluate_graph, evaluate_program
from hidet_dist.spec.interface import interface_of
from hidet_dist.testing.tiny_configurations import causal_types, tiny_causal_model
from hidet_dist.traits import routed_of, traits_of

transformers = pytest.importorskip("transformers")
ALL_EXPERTS_FUNCTIONS = pytest.importorskip("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS


def filled(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0.0, 0.3)
    return module.eval()


def experts(implementation: str) -> torch.nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = transformers.MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4)
    config._experts_implementation = implementation
    return filled(MixtralExperts(config))


def biased() -> torch.nn.Module:
    """Experts with biases, whose two projections are interleaved, and whose matrices are not transposed."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return filled(GptOssExperts(transformers.GptOssConfig(hidden_size=8, intermediate_size=12, num_local_experts=4)))


class Exported(torch.nn.Module):
    """Experts by an implementation of transformers that is called as it is, and not by its name."""

    def __init__(self, implementation: str):
        super().__init__()
        self.experts = experts(implementation)
        self.function = ALL_EXPERTS_FUNCTIONS[implementation]

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.function(self.experts, hidden, chosen, weights)


MODULES = {
    "by the name that the configuration has": lambda: experts("grouped_mm"),
    "one after the other": lambda: experts("eager"),
    "with biases, interleaved": biased,
    "by grouped products": lambda: Exported("grouped_mm").eval(),
    "by gathered matrices": lambda: Exported("batched_mm").eval(),
}


@pytest.mark.parametrize("name", MODULES)
def test_experts_compute_what_pytorch_does(name):
    torch.manual_seed(0)
    module = MODULES[name]()
    tokens = torch.randn(6, 8)
    chosen = torch.tensor([[0, 1], [3, 0], [3, 1], [1, 3], [0, 3], [3, 0]])  # and none of them the third one
    inputs = (tokens, chosen, torch.rand(6, 2))
    with torch.no_grad():
        want = module(*inputs).numpy()
    graph = hidet_dist.from_torch(module, inputs)
    routed = [routed_of(op) for op in normalize(graph).nodes if traits_of(op).is_product]
    assert None not in routed
    products = sum(len(one.matrices) for one in routed)
    assert products == (6 if name == "with biases, interleaved" else 3)  # both projections by themselves
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


@pytest.mark.parametrize("module", [experts("grouped_mm"), Exported("grouped_mm").eval()], ids=["named", "sorted"])
def test_the_number_of_tokens_may_be_symbolic(module):
    tokens = torch.export.Dim("tokens", min=1)
    example = (torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2))
    graph = hidet_dist.from_torch(module, example, ({0: tokens}, {0: tokens}, {0: tokens}))
    for count in (1, 9):
        generator = torch.Generator().manual_seed(count)
        chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(count)])
        inputs = torch.randn(count, 8, generator=generator), chosen, torch.rand(count, 2, generator=generator)
        with torch.no_grad():
            want = module(*inputs).numpy()
        arrays = [x.double().numpy() if x.is_floating_point() else x.numpy() for x in inputs]
        (y,) = evaluate_graph(graph, arrays)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choices", [1, 2])
def test_llama_4_computes_the_chosen_experts_alone(choices):
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    config = transformers.Llama4TextConfig(
        hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=choices
    )
    torch.manual_seed(choices)
    module = filled(Llama4TextMoe(config))
    tokens = torch.randn(1, 6, 8)
    with torch.no_grad():
        want, logits = (x.numpy() for x in module(tokens))
    graph = hidet_dist.from_torch(module, (tokens,))
    products = [op for op in graph.nodes if isinstance(op, ExpertProductOp)]
    assert len(products) == 2
    for got, wanted in zip(evaluate_graph(graph, [tokens.double().numpy()]), (want, logits), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "products"),
    [
        ("DbrxForCausalLM", 3),
        pytest.param("LongcatFlashForCausalLM", 2, marks=pytest.mark.slow),
        ("JetMoeForCausalLM", 4),
    ],
)
def test_experts_that_a_model_computes_in_its_own_way(kind: str, products: int):
    (name,) = [name for name, own in causal_types().items() if own == kind]
    module, inputs = tiny_causal_model(name)
    with torch.no_grad():
        want = module(**inputs, use_cache=False).logits
    graph = hidet_dist.from_torch(module, inputs)
    assert sum(isinstance(op, ExpertProductOp) for op in graph.nodes) >= products
    interface = interface_of(graph)
    assert interface is not None
    got = evaluate_graph(graph, [x.numpy() for x in interface.flatten(**inputs)])[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
