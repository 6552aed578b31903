"""Models of transformers from configurations and folders, and tiny models of several kinds against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.frontends.evaluated import evaluated
from torch.export import Dim

import hidet_dist
from hidet_dist.errors import ConfigError, InputError, WeightsError
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec.interface import interface_of
from hidet_dist.testing.model_zoo import case_named

transformers = pytest.importorskip("transformers")


def test_a_sharded_model_computes_what_pytorch_does():
    module, inputs = case_named("GPT-2").build()
    graph = hidet_dist.from_torch(module, inputs)
    interface = interface_of(graph)
    assert interface is not None
    with torch.no_grad():
        want = module(**inputs).logits.numpy()
    free = hidet_dist.make_plan(graph, {"mesh_shape": [2]})
    budget = int(0.75 * free.stages[0].weight_bytes_per_device)
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"mem_budget": budget})
    assert any(weight.spec.mesh_axes for weight in plan.stages[0].weights)
    flat = [x.numpy() for x in interface.flatten(**inputs)]
    got = interface.nest(evaluated(hidet_dist.partition(graph, plan), flat))
    np.testing.assert_allclose(got.logits, want, rtol=1e-4, atol=1e-4)


def config(**options: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
        **options,
    )


def test_a_model_without_data_is_planned_and_is_not_built():
    graph = hidet_dist.from_transformers(config(tie_word_embeddings=True), batch=4, seq=16, dtype="bfloat16")
    names = {x.label: x for x in hidet_dist.make_plan(graph, {"mesh_shape": [2]}).stages[0].weights if x.label}
    assert "lm_head.weight" not in names
    assert names["model.embed_tokens.weight"].dtype == "bfloat16"
    with pytest.raises(WeightsError, match="no data"):
        hidet_dist.auto_parallel(graph, {"mesh_shape": [2]}, {}, "nowhere")


def test_a_configuration_stays_as_it_is_and_frequencies_stay_in_float32():
    given = config(use_cache=True, dtype=torch.float32)
    before = given.to_dict()
    graph = hidet_dist.from_transformers(given, seq=64, dtype="bfloat16")
    assert given.to_dict() == before
    constants = [x for node in graph.nodes for x in node.inputs if x.storage is not None]
    angles = np.outer(np.arange(64), 1 / 10000 ** (np.arange(0, 8, 2) / 8))
    for x, function in zip(constants, (np.cos, np.sin), strict=False):
        want = function(np.concatenate([angles, angles], 1))
        np.testing.assert_allclose(x.torch().float().numpy()[0, 0], want, rtol=2**-8, atol=1e-4)
    assert len(constants) >= 2


def test_parts_that_a_model_keeps_in_float32_stay_so():
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 1}
    small = transformers.T5Config(**sizes, architectures=["T5EncoderModel"])
    graph = hidet_dist.from_transformers(small, seq=8, dtype="float16")
    weights = {x.label: x.dtype for x in hidet_dist.make_plan(graph, {"mesh_shape": [1]}).stages[0].weights if x.label}
    assert {name for name, dtype in weights.items() if dtype == "float32"} == {
        name for name in weights if name.endswith(".wo.weight")
    }


def bert() -> Any:
    return transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=24,
        architectures=["BertModel"],
    )


def gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=24, architectures=["GPT2LMHeadModel"]
    )


def test_one_graph_is_that_of_all_numbers_of_sequences_and_tokens() -> None:
    settings = gpt2()
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(settings).eval()
    graph = hidet_dist.from_torch(
        model,
        {"input_ids": torch.zeros(2, 8, dtype=torch.int64)},
        {"input_ids": {0: Dim("batch"), 1: Dim("seq", max=24)}},
    )
    for batch, seq in ((1, 5), (3, 24)):
        ids = torch.randint(0, 64, (batch, seq))
        got, *_ = evaluate_graph(graph, [ids.numpy()])
        with torch.no_grad():
            want = model(ids, use_cache=False).logits.numpy()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, config, bert])
def test_one_graph_serves_all_numbers_of_sequences_and_tokens(tmp_path: Path, make: Callable[[], Any]) -> None:
    settings = make()
    torch.manual_seed(0)
    model = getattr(transformers, settings.architectures[0])(settings).eval()
    model.save_pretrained(tmp_path)
    graph = hidet_dist.from_transformers(tmp_path, weights="files", dynamic=["batch", "seq"])
    assert list(map(str, graph.inputs[0].shape)) == ["batch", "seq"]
    most = settings.max_position_embeddings
    symbols = {"symbols": {"batch": {"expected": 4, "multiple_of": 2}, "seq": 12}}
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, symbols)
    program = hidet_dist.partition(graph, plan)
    # Kernels are compiled for each size, none of which is the one that was planned for.
    sizes = [(2, most), (2, most + 1)] if make is gpt2 else [(4, 5), (2, most), (2, most + 1)]
    for batch, seq in sizes:
        ids = torch.randint(0, 64, (batch, seq))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        given = [ids.numpy(), mask.numpy()][: len(graph.inputs)]
        if seq > most:
            with pytest.raises(InputError, match=f"seq must be at most {most}.*seq = {seq}"):
                simulate(program, given)
            continue
        got = simulate(program, given)[0]
        with torch.no_grad():
            want = model(ids, attention_mask=mask if len(given) > 1 else None, use_cache=False)[0].numpy()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=f"'expected' = {most + 1} is more than the greatest size, {most}"):
        hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"symbols": {"batch": 2, "seq": most + 1}})


def test_a_model_is_traced_as_a_person_calls_it() -> None:
    """Without a word on caches, of a model alone or within another one."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision = {**sizes, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
    llava = transformers.LlavaConfig(text_config={**sizes, "model_type": "llama"}, vision_config=vision)
    for settings in (config(), llava):
        kind = transformers.LlavaForConditionalGeneration if settings is llava else transformers.LlamaForCausalLM
        model = kind(settings).eval()
        ids = torch.randint(0, 64, (2, 5))
        graph = hidet_dist.from_torch(model, {"input_ids": ids})
        (got,) = evaluate_graph(graph, [ids.numpy()])
        with torch.no_grad():
            np.testing.assert_allclose(got, model(input_ids=ids).logits.numpy(), rtol=1e-4, atol=1e-5)
        assert (settings if settings is not llava else settings.text_config).use_cache


SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
VISION = {**SMALL, "image_size": 28, "patch_size": 14}


@pytest.mark.parametrize("kind", ["Llava", "Gemma3"])
def test_features_of_images_take_the_places_of_tokens(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "Llava":
        parts = {
            "text_config": {**SMALL, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
        }
    else:
        parts = {
            "text_config": {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        }
    settings = getattr(transformers, f"{kind}Config")(**parts, image_token_index=60)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(settings).eval()
    ids = torch.randint(0, 50, (2, 9))
    ids[0, 2:6] = ids[1, 5:] = 60
    images = torch.randn(2, 3, 28, 28)
    graph = hidet_dist.from_torch(model, {"input_ids": ids, "pixel_values": images})
    got, *_ = evaluate_graph(graph, [ids.numpy(), images.double().numpy()])
    with torch.no_grad():
        want = model(input_ids=ids, pixel_values=images).logits.numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_paths_other_than_models_are_refused(tmp_path: Path):
    for arguments, message in (
        ({"model": tmp_path}, "config.json"),
        ({"model": 3}, "configuration"),
        ({"model": config(), "weights": "some"}, "weights"),
        ({"model": config(), "weights": "files"}, "folder"),
        ({"model": config(), "dynamic": ["tokens"]}, "dynamic"),
        ({"model": config(), "dtype": "int8"}, "dtype"),
        ({"model": config(), "batch": 0}, "batch must be an integer of at least 1; got 0"),
        ({"model": config(), "seq": None}, "seq must be an integer of at least 1; got None"),
        ({"model": config(), "architecture": "Nothing"}, "architecture"),
    ):
        with pytest.raises(ConfigError, match=message):
            hidet_dist.from_transformers(**arguments)
