"""Heads and groups that the ranks do not divide, split nearly evenly over real processes."""

from pathlib import Path

import hidet
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from hidet import ops

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.weights.packing import packed

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


@pytest.mark.parametrize(
    ("precision", "parts"),
    [
        ("int4", (3, 2)),
        *(pytest.param(name, parts, marks=pytest.mark.slow) for name, parts in [("int8", (2, 2, 1)), ("", (1, 4))]),
    ],
)
def test_ranks_hold_panels_of_their_parts_and_answer_as_one_does(
    precision: str, parts: tuple[int, ...], tmp_path: Path
) -> None:
    rng, inner, unit = np.random.default_rng(0), 160, 32
    x = hidet.symbol([5, 64], "float32", "cpu")
    up, down = (hidet.asarray(rng.standard_normal(shape, np.float32) / 8) for shape in ((64, inner), (64, inner)))
    graph = hidet.trace_from(ops.matmul_nt(ops.relu(ops.matmul(x, up)), down), [x])
    given, weights = rng.standard_normal((5, 64), np.float32), {"weights": {"precision": precision or None}}
    split = f"S0[{','.join(map(str, parts))}]"
    pins = {"w0": f"(R, {split})", "w1": f"(R, {split})"}
    one, several = tmp_path / "one", tmp_path / "several"
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, weights, one)
    hidet_dist.auto_parallel(graph, {"mesh_shape": [len(parts)]}, {**weights, "pins": pins}, several)
    manifest = Manifest.load(several)
    (stage,) = manifest.program().stages
    assert len(stage.panels) == 2
    ends = np.cumsum(parts) * unit
    for rank, end in enumerate(ends):
        stored = safetensors.torch.load_file(several / manifest.weights_files[rank])
        held = slice(end - parts[rank] * unit, end)
        for name, shard in (("w0", up.torch()[:, held]), ("w1", down.torch()[:, held])):
            panels = stage.panels[name].at(stage.part_sizes(rank))
            assert {panels.depth, panels.columns} == set(shard.shape)
            assert torch.equal(stored[name], packed(shard.contiguous(), panels))
    with hidet_dist.load_partition(one) as partition:
        whole = partition(given)
    for (answer,) in serve(len(parts), several, [given], tmp_path, 100):
        np.testing.assert_allclose(answer, whole, rtol=1e-5, atol=1e-5)
