"""Whether tiny configurations keep the relations of the sizes of the models that they are made from."""

from __future__ import annotations

import pytest

from hidet_dist.testing.tiny_configurations import EXPERTS, LAYERS, WORDS, tiny_configuration

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("LlamaConfig", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "vocab_size": WORDS}),
        ("MixtralConfig", {"num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": EXPERTS}),
        ("DeepseekV3Config", {"n_group": 3, "topk_group": 2, "n_routed_experts": 9, "num_hidden_layers": LAYERS}),
        ("FalconConfig", {"num_attention_heads": 3, "num_hidden_layers": LAYERS}),
        ("DeepseekV32Config", {"index_n_heads": 15, "index_topk": 4}),
    ],
)
def test_sizes_are_small_and_odd(kind: str, fields: dict[str, int]) -> None:
    config = tiny_configuration(getattr(transformers, kind))
    assert {name: getattr(config, name) for name in fields} == fields


def test_a_layer_of_each_kind_is_kept() -> None:
    config = tiny_configuration(transformers.Qwen3NextConfig)
    assert config.num_hidden_layers == len(config.layer_types) == LAYERS
    assert set(config.layer_types) == {"linear_attention", "full_attention"}


def test_parts_of_a_composite_model_are_tiny_and_fields_can_be_given() -> None:
    config = tiny_configuration(transformers.Gemma3Config, {"text_config": {"head_dim": 32}})
    assert config.text_config.head_dim == 32
    assert config.vision_config.num_hidden_layers == config.text_config.num_hidden_layers == LAYERS
    tokens = [config.boi_token_index, config.eoi_token_index, config.image_token_index]
    assert len(set(tokens)) == 3 and max(tokens) < WORDS
