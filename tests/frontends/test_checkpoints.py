"""Folders of transformers models: which tensors of their files become which weights, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hidet.graph import FlowGraph
from safetensors.torch import load_file, save_file

import hidet_dist
from hidet_dist.errors import UnusedWeightsWarning, WeightsError
from hidet_dist.frontends.checkpoint import stored_weights
from hidet_dist.simulate import simulate
from hidet_dist.testing.tiny_configurations import causal_types, tiny_causal_model
from hidet_dist.weights import names_of, source_of, weights_from_safetensors

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
QUERIES = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA whose head is another tensor than its embeddings, although its configuration ties the two."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))
    model.save_pretrained(path)
    edit_configuration(path, tie_word_embeddings=True)
    return path


def edit_configuration(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def with_files(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, Any]]) -> Path:
    """A copy of the folder with other tensors."""
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(dict(change(load_file(folder / "model.safetensors"))), target / "model.safetensors")
    return target


def graph_of(folder: Path, **options: Any) -> FlowGraph:
    return hidet_dist.from_transformers(folder, weights="files", seq=4, **options)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The data of the weights of the folder's model, by name."""
    found = names_of(x for node in graph_of(folder).nodes for x in node.inputs)
    return {name: source_of(x).read([slice(0, size) for size in x.shape]) for name, x in found.items()}


@pytest.mark.slow
def test_weights_are_those_of_the_files_whatever_their_dtypes_and_the_ties_of_the_configuration(
    folder: Path, tmp_path: Path
):
    dtypes = itertools.cycle((torch.float16, torch.bfloat16, torch.float64, torch.float32))
    changed = with_files(folder, tmp_path, lambda tensors: {name: x.to(next(dtypes)) for name, x in tensors.items()})
    graph = graph_of(changed, dtype="float32")
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]})
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {x.label for x in plan.stages[0].weights}
    got = simulate(hidet_dist.partition(graph, plan), [np.arange(4)[None]])[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(changed, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(input_ids=torch.arange(4)[None], use_cache=False).logits.numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    edit_configuration(changed, intermediate_size=48)
    with pytest.raises(WeightsError, match="another configuration"):
        graph_of(changed)


@pytest.mark.parametrize("kept", ["both", "head", "embeddings"])
def test_one_tensor_is_one_weight_under_either_name(folder: Path, tmp_path: Path, kept: str):
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = tensors.pop("lm_head.weight")
        embeddings = tensors.pop("model.embed_tokens.weight")
        both = {
            "lm_head.weight": head if kept == "head" else embeddings.clone(),
            "model.embed_tokens.weight": embeddings,
        }
        dropped = {"head": "model.embed_tokens.weight", "embeddings": "lm_head.weight"}.get(kept)
        return tensors | {name: x for name, x in both.items() if name != dropped}

    tied = {"lm_head.weight", "model.embed_tokens.weight"}
    weights = weights_of(with_files(folder, tmp_path, change))
    (name,) = tied.intersection(weights)
    expected = load_file(folder / "model.safetensors")[name if kept == "head" else "model.embed_tokens.weight"]
    assert name == {"head": "lm_head.weight", "embeddings": "model.embed_tokens.weight"}.get(kept, name)
    assert torch.equal(weights[name], expected)


def test_names_of_earlier_versions_are_known_ties_included(tmp_path: Path):
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**sizes, intermediate_size=32, tie_word_embeddings=False)
    )
    model.save_pretrained(tmp_path)
    edit_configuration(tmp_path, tie_word_embeddings=True)
    files, weights = load_file(tmp_path / "model.safetensors"), weights_of(tmp_path)
    assert torch.equal(weights["embed_out.weight"], files["embed_out.weight"])
    assert torch.equal(weights["gpt_neox.embed_in.weight"], files["gpt_neox.embed_in.weight"])


EXPERTS = {"num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "ernie4_5_moe", "jamba", "minimax_m2"])
def test_weights_that_transformers_joins_are_read_as_it_joins_them(tmp_path: Path, kind: str):
    """Files have each expert by itself, and its gate apart from its projection."""
    more = EXPERTS | {"moe_num_experts": 3, "mamba_dt_rank": 2}
    config = transformers.AutoConfig.for_model(kind, **SIZES | {"num_hidden_layers": 2, "pad_token_id": 0}, **more)
    check_read_as_loaded(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    assert any(".experts.2." in name for name in weights_from_safetensors(tmp_path))


def test_weights_that_transformers_reshapes_are_made_as_it_makes_them(tmp_path: Path):
    """Files have the rows of gates and projections in turn."""
    if "inkling2_text" not in causal_types():
        pytest.skip("a newer transformers has the type")
    check_read_as_loaded(tiny_causal_model("inkling2_text")[0], tmp_path)


def check_read_as_loaded(saved: Any, folder: Path) -> None:
    """Save a model, and compare the weights read from the folder's files, and parts of them, with those loaded."""
    saved.save_pretrained(folder)
    model = type(saved).from_pretrained(folder, dtype=torch.float32)
    with torch.device("meta"):
        weights = stored_weights(type(saved)(saved.config), weights_from_safetensors(folder))
    for name, expected in model.state_dict().items():
        source = source_of(weights[name])
        assert torch.equal(source.read([slice(0, size) for size in expected.shape]), expected), name
        inner = [slice(size // 3, max(size // 3 + 1, size - 1)) for size in expected.shape]
        assert torch.equal(source.read(inner), expected[tuple(inner)]), name


def test_files_that_lack_an_expert_are_refused(tmp_path: Path):
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=3))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: x for name, x in tensors.items() if "experts.1.w1." not in name}, file)
    with pytest.raises(WeightsError, match=r"gate_up_proj' cannot be made from .*experts\.0\.w1.*other? configuration"):
        graph_of(tmp_path)
    save_file({name: x for name, x in tensors.items() if "experts.1." not in name}, file)
    with pytest.raises(WeightsError, match=r"gate_up_proj' in the shape \[2, 64, 16\], and the model in \[3, 64, 16\]"):
        graph_of(tmp_path)


def test_integers_are_not_weights_of_a_float_model(folder: Path, tmp_path: Path):
    quantized = {f"{QUERIES}.weight": torch.ones(16, 16, dtype=torch.int8), f"{QUERIES}.SCB": torch.ones(16)}
    changed = with_files(folder, tmp_path, lambda tensors: tensors | quantized)
    with pytest.raises(WeightsError, match=rf"'{QUERIES}.weight' is stored as int8, and the model has it as float32"):
        graph_of(changed)


@pytest.mark.parametrize("more", [f"{QUERIES}.weight_scale_inv", f"{QUERIES}.bias"])
def test_tensors_of_a_layer_that_nothing_uses_are_refused(folder: Path, tmp_path: Path, more: str):
    changed = with_files(folder, tmp_path, lambda tensors: tensors | {more: torch.ones(16)})
    with pytest.raises(WeightsError, match=f"1 tensors of layers .* such as {more}: its results"):
        graph_of(changed)


def test_other_tensors_that_nothing_uses_are_named(folder: Path, tmp_path: Path):
    more = {"value_head.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    changed = with_files(folder, tmp_path, lambda tensors: tensors | more)
    with pytest.warns(UnusedWeightsWarning, match=r"does not use 1 tensors of the files, such as value_head\.weight\."):
        graph_of(changed)


def test_what_the_files_lack_is_named_with_what_is_left_over(folder: Path, tmp_path: Path):
    def pack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n.replace("q_proj.weight", "q_proj.qweight"): x for n, x in tensors.items()}

    changed = with_files(folder, tmp_path, pack)
    with pytest.raises(WeightsError, match=rf"lack 1 .* such as {QUERIES}\.weight\. .* such as {QUERIES}\.qweight\."):
        graph_of(changed)
