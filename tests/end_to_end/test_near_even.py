"""Heads that the ranks do not divide, split nearly evenly over real processes, against PyTorch."""

import hidet
import numpy as np
import pytest
import torch
import transformers

import hidet_dist
from hidet_dist.artifacts import Manifest

from .conftest import serve, weight_bytes

VOCABULARY, TOKENS = 96, 16


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_head=12, n_embd=96, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(0, VOCABULARY, (1, TOKENS))}


def llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=72,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=192,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(0, VOCABULARY, (1, TOKENS))}


def vit():
    config = transformers.ViTConfig(
        num_hidden_layers=2,
        hidden_size=96,
        num_attention_heads=8,
        intermediate_size=192,
        image_size=32,
        patch_size=8,
    )
    return transformers.ViTModel(config), {"pixel_values": torch.rand(1, 3, 32, 32)}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "ranks"), [(gpt2, 5), (llama, 2), (llama, 4), (vit, 3)])
def test_ranks_answer_as_the_whole_model_does(make, ranks, tmp_path):
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    graph, out = hidet_dist.from_torch(model, inputs), tmp_path / "artifacts"
    result = hidet.distributed.auto_parallel(graph, {"mesh_shape": [ranks]}, {}, out)
    (stage,) = result.plan.stages
    assert not stage.has_equal_shards
    assert result.plan.collectives()
    (written,) = Manifest.load(out).program().stages
    assert written.parts
    assert max(result.weight_bytes_per_rank) < weight_bytes(graph)
    with torch.no_grad():
        want = model(**inputs)[0].numpy()
    for got, *_ in serve(ranks, out, [x.numpy() for x in inputs.values()], tmp_path):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
