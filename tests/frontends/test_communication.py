"""The plans of models like LLaMA communicate as often as Megatron's, or less.

A collective counts as its ring passes: 2 of an all-reduce, and 1 of each other kind, since a reduce-scatter and an
all-gather are the halves of an all-reduce (Korthikanti et al., arXiv:2205.05198). Megatron (Shoeybi et al.,
arXiv:1909.08053) all-reduces twice a layer and once for an embedding that is split by its vocabulary, and gathers the
logits.
"""

from __future__ import annotations

from typing import Any

import pytest

import hidet_dist
from hidet_dist.spec.collectives import COLLECTIVES

transformers = pytest.importorskip("transformers")

LAYERS, DEVICES = 2, 8
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256},
    "MistralForCausalLM": {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000},
    "Qwen2ForCausalLM": {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 152064},
    "Qwen3ForCausalLM": {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128},
    "GemmaForCausalLM": {"hidden_size": 3072, "intermediate_size": 24576, "vocab_size": 256000, "head_dim": 256},
    "Phi3ForCausalLM": {"hidden_size": 4096, "intermediate_size": 8192, "vocab_size": 32064},
}
QUICK = "LlamaForCausalLM"


def graph_of(name: str, batch: int, seq: int) -> Any:
    config = getattr(transformers, name).config_class(
        **MODELS[name],
        num_hidden_layers=LAYERS,
        num_attention_heads=16 if name == "GemmaForCausalLM" else 32,
        num_key_value_heads=16 if name == "GemmaForCausalLM" else 8,
        architectures=[name],
        dtype="bfloat16",
        tie_word_embeddings=False,
    )
    return hidet_dist.from_transformers(config, batch=batch, seq=seq)


def ring_passes(plan: hidet_dist.Plan) -> int:
    return sum(count * COLLECTIVES[kind].ring_passes for kind, count in plan.collectives().items())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in MODELS]
)
def test_a_decoder_communicates_as_often_as_megatrons_or_less(name: str) -> None:
    graph = graph_of(name, 1, 128)
    megatron = 2 * (2 * LAYERS + 1) + 1
    for machine in ("dgx-h100", "cpu"):
        config = {"mesh_shape": [DEVICES], "machine": machine}
        plan = hidet_dist.make_plan(graph, config)
        held = plan.stages[0].weight_bytes_per_device
        assert ring_passes(plan) <= megatron, (machine, plan.collectives())
        # With an eighth more than an even share of the weights: none is held by all devices.
        total = sum(weight.nbytes for weight in plan.stages[0].weights)
        tight = hidet_dist.make_plan(graph, config, {"mem_budget": total // DEVICES * 9 // 8 + 2**28})
        assert tight.stages[0].weight_bytes_per_device <= held
        assert ring_passes(tight) <= megatron, (machine, tight.collectives())
