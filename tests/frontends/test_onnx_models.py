"""Models of transformers, with random weights and small sizes, exported to ONNX: traced, planned and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import hidet_dist
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec.interface import interface_of

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
}


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 99, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}


def ids() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 99, (2, 6))}


def image() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def made(name: str, config: str, **options: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        own = getattr(transformers, config)(**options)
        own._attn_implementation = "eager"
        return getattr(transformers, name)(own)

    return make


IMAGE = {"image_size": 32, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
MODELS: Mapping[str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "bert": (made("BertModel", "BertConfig", **SIZES), tokens),
    "roberta": (made("RobertaModel", "RobertaConfig", **SIZES, pad_token_id=1), tokens),
    "distilbert": (
        made("DistilBertModel", "DistilBertConfig", dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=99),
        tokens,
    ),
    "albert": (made("AlbertModel", "AlbertConfig", **SIZES, embedding_size=16), tokens),
    "mpnet": (made("MPNetModel", "MPNetConfig", **SIZES), tokens),
    "gpt2": (
        made("GPT2Model", "GPT2Config", n_embd=32, n_layer=2, n_head=4, vocab_size=99, use_cache=False), ids
    ),
    "llama": (made("LlamaModel", "LlamaConfig", **SIZES, num_key_value_heads=2, use_cache=False), ids),
    "qwen2": (made("Qwen2Model", "Qwen2Config", **SIZES, num_key_value_heads=2, use_cache=False), ids),
    "gpt_neox": (made("GPTNeoXModel", "GPTNeoXConfig", **SIZES, use_cache=False), ids),
    "t5_encoder": (
        made("T5EncoderModel", "T5Config", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99), ids
    ),
    "vit": (made("ViTModel", "ViTConfig", **SIZES, **IMAGE), image),
    "dinov2": (made("Dinov2Model", "Dinov2Config", **SIZES, **IMAGE), image),
    "convnext": (made("ConvNextModel", "ConvNextConfig", **STAGES), image),
    "resnet": (
        made("ResNetModel", "ResNetConfig", **STAGES, embedding_size=8, layer_type="basic"), image
    ),
    "segformer": (
        made("SegformerModel", "SegformerConfig", **STAGES, num_attention_heads=[1, 2, 2, 4], sr_ratios=[4, 2, 1, 1]),
        image,
    ),
    "swin": (
        made("SwinModel", "SwinConfig", image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 4],
             window_size=4),
        image,
    ),
}  # fmt: skip


class First(torch.nn.Module):
    """The last hidden state alone, with the arguments by place."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, values, strict=True)), return_dict=True).last_hidden_state


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_by_way_of_onnx(name, tmp_path):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    given = inputs()
    model = First(make(), list(given)).eval()
    path = Path(tmp_path) / "model.onnx"
    torch.onnx.export(model, tuple(given.values()), str(path), opset_version=18, dynamo=True, verbose=False)
    with torch.no_grad():
        want = model(*given.values()).numpy()
    graph = hidet_dist.from_onnx(path)
    interface = interface_of(graph)
    assert interface is not None
    arrays = [x.double().numpy() if x.is_floating_point() else x.numpy() for x in given.values()]
    # The exporter leaves out arguments that make no difference, such as a mask of ones.
    kept = [
        array
        for array, x in zip(arrays, given, strict=True)
        if len(graph.inputs) == len(given) or x != "attention_mask"
    ]
    (found,) = evaluate_graph(graph, kept)
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-4)
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {})
    assert plan is not None
