"""Layers of experts that models of transformers compute in their own ways, by products by experts.

Llama 4 computes all rows by all experts, those that were not chosen from zeros. DBRX, LongCat-Flash and JetMoE loop
over the experts that have any row, or split sorted rows by their numbers, which no graph can do. While a module is
exported, the functions here take the place of the methods of these layers, and compute the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hidet_dist.compat.replacing import replaced
from hidet_dist.frontends.pytorch.experts import expert_product


@contextlib.contextmanager
def own_experts_by_products() -> Iterator[None]:
    """Have the layers of experts that are peculiar to a model computed by products by experts while the block runs."""
    with contextlib.ExitStack() as stack:
        for name, classes in _METHODS.items():
            module = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
            for owner, methods in classes.items() if module is not None else ():
                if hasattr(module, owner):
                    stack.enter_context(replaced(getattr(module, owner), methods))
        yield


def _llama4_experts(layer: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Llama 4's layer of experts: the sum of outputs [tokens, size], and the router's logits [tokens, experts].

    Its scores multiply the rows before the experts. A row of zeros gives zeros, so that only the chosen experts count.
    """
    router, experts = layer.router, layer.experts
    x = hidden_states.reshape(-1, layer.hidden_dim)
    logits = torch.nn.functional.linear(x, router.weight, router.bias)
    values, chosen = torch.topk(logits, router.top_k, dim=1)
    scores = torch.sigmoid(values.float()).to(values.dtype)
    rows = x[:, None] * scores[..., None]
    gate, up = expert_product(rows, experts.gate_up_proj, chosen).chunk(2, dim=-1)
    routed = expert_product(up * experts.act_fn(gate), experts.down_proj, chosen, torch.ones_like(scores))
    return layer.shared_expert(x) + routed, logits


def _dbrx_experts(
    layer: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute DBRX's experts, whose matrices lie in one, one below the other."""
    own, x = layer.mlp, hidden_states.reshape(-1, layer.hidden_size)
    gates, projections, outputs = (
        weight.view(layer.num_experts, layer.ffn_hidden_size, layer.hidden_size) for weight in (own.w1, own.v1, own.w2)
    )
    gate = own.activation_fn(expert_product(x, gates, top_k_index, None, True))
    y = gate * expert_product(x, projections, top_k_index, None, True)
    return expert_product(y, outputs, top_k_index, top_k_weights).view(hidden_states.shape[0], -1, layer.hidden_size)


def _longcat_experts(
    layer: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute LongCat-Flash's experts: those with the greatest numbers have no weights, and return their rows."""
    is_identity = top_k_index >= layer.num_routed_experts
    out = hidden_states * (top_k_weights * is_identity).sum(1, keepdim=True).to(hidden_states.dtype)
    if layer.gate_up_proj is None:
        return out
    gate, up = expert_product(hidden_states, layer.gate_up_proj, top_k_index, None, True).chunk(2, dim=-1)
    return out + expert_product(layer.act_fn(gate) * up, layer.down_proj, top_k_index, top_k_weights, True)


def _jetmoe_choices(router: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the experts of each row [rows, choices], their scales, and, fifth, the router's logits [rows, experts].

    transformers records the fifth result. Where rows are sorted by expert, there are other results before it.
    """
    logits = router.layer(hidden_states).float()
    values, chosen = logits.topk(router.top_k, dim=1)
    scales = torch.softmax(values, dim=1).type_as(hidden_states)
    return chosen, scales, chosen, scales, logits


def _jetmoe_experts(layer: Any, layer_input: torch.Tensor) -> torch.Tensor:
    """Compute JetMoE's layer of experts."""
    x = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, scales, *_ = layer.router(x)
    gate, up = expert_product(x, layer.input_linear.weight, chosen, None, True).chunk(2, dim=-1)
    out = expert_product(layer.activation(gate) * up, layer.output_linear.weight, chosen, scales, True)
    return out.view(layer_input.shape) + layer.bias


def _jetmoe_queries(layer: Any, layer_input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Compute the queries of JetMoE's attention, [batch, tokens, choices, size], by the chosen experts.

    Returns them with the router's logits, and what :func:`_jetmoe_outputs` takes.
    """
    x = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, scales, *_, logits = layer.router(x)
    queries = expert_product(x, layer.input_linear.weight, chosen, None, True)
    return queries.view(*layer_input.shape[:2], layer.top_k, -1), logits, (chosen, scales)


def _jetmoe_outputs(layer: Any, layer_input: torch.Tensor, topo_info: Any) -> torch.Tensor:
    """Project the results of JetMoE's attention, [batch, tokens, choices, size], by the experts of its queries."""
    chosen, scales = topo_info
    batch, tokens, choices, size = layer_input.shape
    rows = layer_input.reshape(batch * tokens, choices, size)
    out = expert_product(rows, layer.output_linear.weight, chosen, scales, True)
    return out.view(batch, tokens, layer.input_size) + layer.bias


_METHODS: Mapping[str, Mapping[str, Mapping[str, Callable[..., Any]]]] = {
    "llama4": {"Llama4TextMoe": {"forward": _llama4_experts}},
    "dbrx": {"DbrxExperts": {"forward": _dbrx_experts}},
    "longcat_flash": {"LongcatFlashExperts": {"forward": _longcat_experts}},
    "jetmoe": {
        "JetMoeTopKGating": {"forward": _jetmoe_choices},
        "JetMoeMoE": {"forward": _jetmoe_experts},
        "JetMoeMoA": {"map": _jetmoe_queries, "reduce": _jetmoe_outputs},
    },
}
"""What takes the place of the methods of classes, by the model's name in transformers and the class's."""
