"""Configurations of transformers models as data from outside: what they may ask for, and what errors say of them."""

from __future__ import annotations

import builtins
import json
import logging
import math
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hidet_dist
from hidet_dist.cli.app import app
from hidet_dist.errors import ConfigError, HidetDistError
from hidet_dist.frontends import pretrained

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
DETR = {"model_type": "detr", "architectures": ["DetrForObjectDetection"]}
CLIP = {
    "model_type": "clip",
    "architectures": ["CLIPModel"],
    "text_config": {**SIZES, "max_position_embeddings": 16},
    "vision_config": {**SIZES, "image_size": 16, "patch_size": 8},
}
SWIN = {
    "model_type": "swin",
    "architectures": ["SwinModel"],
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
}
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    **SIZES,
}
GEMMA = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 4,
    "vision_config": {**SIZES, "image_size": 32, "patch_size": 8},
}
MAMBA = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 8,
}


class Reached(BaseException):
    """The network or the standard input was reached."""


@pytest.fixture(autouse=True)
def nothing_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Reached

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(builtins, "input", refuse)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without transformers' own messages."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def written(folder: Path, fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return file


def message_of(folder: Path, fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        hidet_dist.from_transformers(written(folder, fields), seq=4)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
    return str(caught.value)


@pytest.mark.parametrize("method", ["fp8", "torchao", "bitsandbytes", "a new one"])
def test_quantized_checkpoints_are_refused_by_their_method(tmp_path: Path, method: str):
    text = message_of(tmp_path, LLAMA | {"quantization_config": {"quant_method": method}})
    assert "quantization_config is" in text
    assert f"the method '{method}' is not supported" in text
    assert "architecture" not in text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (LLAMA | {"quantization_config": {"load_in_8bit": True}}, "quantization_config"),
        (LLAMA | {"quantization": {"group_size": 64, "bits": 4}}, "quantization"),
        (CLIP | {"text_config": {**SIZES, "quantization_config": {}}}, "text_config.quantization_config"),
        (LLAMA | {"compression_config": {"format": "dense"}}, "compression_config"),
    ],
)
def test_quantization_without_a_method_is_refused_wherever_it_is(tmp_path: Path, fields: dict[str, Any], field: str):
    assert f"{field} is {{" in message_of(tmp_path, fields)


def test_an_object_with_a_quantization_is_refused():
    config = transformers.LlamaConfig(**SIZES, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ConfigError, match=r"^LlamaConfig: quantization_config .* only that of a folder's whole model"):
        hidet_dist.from_transformers(config)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (DETR | {"use_pretrained_backbone": True, "backbone": "resnet50"}, "use_pretrained_backbone"),
        (DETR | {"backbone": "owner/name", "use_timm_backbone": False}, "backbone"),
        (DETR | {"backbone": "hf-hub:owner/name"}, "backbone"),
        ({"model_type": "timm_wrapper", "architecture": "hf-hub:owner/name"}, "architecture"),
        (DETR | {"backbone": "resnet50", "use_timm_backbone": False, "backbone_config": None}, "backbone"),
        (LLAMA | {"attn_implementation": "owner/name"}, "attn_implementation"),
        (LLAMA | {"_attn_implementation": "paged|owner/name"}, "_attn_implementation"),
        (LLAMA | {"attn_implementation": {"": "owner/name"}}, "attn_implementation"),
        (LLAMA | {"experts_implementation": "owner/name"}, "experts_implementation"),
        (CLIP | {"vision_config": {**SIZES, "attn_implementation": "a/b"}}, "vision_config.attn_implementation"),
        (LLAMA | {"configuration_files": ["../config.4.0.0.json"]}, "configuration_files"),
    ],
)
def test_what_would_load_from_another_place_is_refused(tmp_path: Path, fields: dict[str, Any], field: str):
    assert f"config.json: {field} is " in message_of(tmp_path, fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "new", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}},
        LLAMA | {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
        LLAMA | {"auto_map": {"AutoConfig": "owner/name--evil.Config"}},
        # The decoder's model is made from its own configuration.
        {
            "model_type": "llava",
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": {"model_type": "clip_vision_model", "auto_map": {"AutoModel": "evil.Model"}, **SIZES},
            "vision_config": {"model_type": "siglip", "auto_map": {"AutoModel": "evil.Model"}},
        },
    ],
    ids=["new", "known", "elsewhere", "nested"],
)
def test_code_of_a_folder_is_never_run_and_nothing_is_asked(
    tmp_path: Path, fields: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    monkeypatch.setattr(pretrained, "from_torch", lambda module, *_, **__: type(module).__name__)
    file = written(tmp_path, fields)
    if "evil" in str(fields.get("auto_map")) and fields["model_type"] == "llama":
        assert hidet_dist.from_transformers(file, seq=4) == "LlamaForCausalLM"
    else:
        with pytest.raises(ConfigError, match=r"config\.json") as caught:
            hidet_dist.from_transformers(file, seq=4)
        assert ("auto_map" in str(caught.value)) == (fields["model_type"] == "new")
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "ran").exists()
    assert "evil" not in sys.modules


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = YARN | {"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}


def rotary(base: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return LLAMA | {"rope_parameters": base | {name: value}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (rotary(YARN, "factor", -3), "rope_parameters.factor is -3, which must be a finite number above 0"),
        (rotary(YARN, "factor", 0), "rope_parameters.factor is 0, which must"),
        (rotary(YARN, "factor", math.inf), "rope_parameters.factor is inf, which must"),
        (rotary(YARN, "factor", "4"), "rope_parameters.factor is '4', which must"),
        (rotary(YARN, "factor", True), "rope_parameters.factor is True, which must"),
        (rotary(YARN, "original_max_position_embeddings", 0), "original_max_position_embeddings is 0, which must"),
        (rotary(YARN, "original_max_position_embeddings", -16), "original_max_position_embeddings is -16, which must"),
        (rotary(YARN, "rope_theta", -1.0), "rope_parameters.rope_theta is -1.0, which must"),
        (rotary(YARN, "attention_factor", 0), "rope_parameters.attention_factor is 0, which must"),
        (rotary(YARN, "beta_fast", -1), "rope_parameters.beta_fast is -1, which must be a finite number from 0 on"),
        (rotary(LLAMA3, "low_freq_factor", 0), "rope_parameters.low_freq_factor is 0, which must"),
        (rotary(LONG, "long_factor", [1.0, 0.0, 1.0, 1.0]), "long_factor is .* which must be a list of finite numbers"),
        (rotary(LONG, "short_factor", 1.0), "short_factor is 1.0, which must be a list of finite numbers above 0"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": -2.0}}, "rope_scaling.factor is -2.0, which must"),
        (
            GEMMA
            | {
                "text_config": {**SIZES, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": -8.0}}}
            },
            "text_config.rope_parameters.full_attention.factor is -8.0, which must",
        ),
        (LLAMA | {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.*'yarn'.*[Mm]issing.*factor"),
        (
            LLAMA | {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "rope_parameters.*Missing.*low_freq_factor",
        ),
        (LLAMA | {"rope_theta": 0}, "rope_theta is 0, which must be a finite number above 0"),
        (
            LLAMA | {"rope_theta": 1e-300},
            "rope_theta is 1e-300, and .*inv_freq' has elements that are no finite numbers",
        ),
        (LLAMA | {"partial_rotary_factor": -1.0}, "partial_rotary_factor is -1.0, which must be a number from 0 to 1"),
        (LLAMA | {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, which must be a finite number from 0 on"),
        (LLAMA | {"sliding_window": 0}, "sliding_window is 0, which must be a whole number from 1 on"),
        (LLAMA | {"sliding_window": -1}, "sliding_window is -1, which must"),
        ({"model_type": "gpt2", "layer_norm_epsilon": math.inf}, "layer_norm_epsilon is inf, which must"),
        (GEMMA | {"text_config": {**SIZES, "query_pre_attn_scalar": 0}}, "query_pre_attn_scalar is 0, which must"),
        (
            GEMMA | {"text_config": {**SIZES, "final_logit_softcapping": 0.0}},
            "final_logit_softcapping is 0.0, which must",
        ),
    ],
    ids=lambda value: str(value)[:80],
)
def test_numbers_that_no_model_computes_with_are_refused_by_field(tmp_path: Path, fields: Any, message: str):
    assert re.search(message, message_of(tmp_path, fields))


def test_numbers_of_rotary_embeddings_that_stand_for_defaults_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pretrained, "from_torch", lambda module, *_, **__: module.config.rope_parameters)
    given = YARN | {"beta_fast": None, "beta_slow": 0, "mscale": 0, "attention_factor": None}
    parameters: Any = hidet_dist.from_transformers(written(tmp_path, LLAMA | {"rope_parameters": given}), seq=4)
    assert parameters == given


HOSTILE = (None, -7, 0, 10**12, 1.5, "load" * 1000, ["a"], {"a": 1})


@pytest.mark.parametrize("step", [len(HOSTILE) + 1, pytest.param(1, marks=pytest.mark.slow)])
def test_hostile_values_of_any_field_are_refused_by_name_or_make_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None, step: int
):
    """The value of one field at a time; up to the trace, in which transformers has no part.

    Each field gets one value, neighbouring fields neighbouring values; all values are for the slow tests.
    """
    monkeypatch.setattr(pretrained, "from_torch", lambda *_, **__: None)
    plain = json.loads(transformers.LlamaConfig(**LLAMA).to_json_string(use_diff=False)) | {"torch_dtype": None}
    cases = [(LLAMA | {name: value}, name) for name in plain | {"layer_types": None} for value in HOSTILE]
    inner = ("hidden_size", "image_size", "hidden_act")
    cases += [
        (CLIP | {"vision_config": CLIP["vision_config"] | {name: value}}, name) for name in inner for value in HOSTILE
    ]
    cases += [(CLIP | {"text_config": value}, "text_config") for value in HOSTILE]
    made = 0
    for fields, name in cases[::step]:
        file = written(tmp_path, fields)
        try:
            hidet_dist.from_transformers(file, seq=4)
        except HidetDistError as error:
            assert name.removeprefix("torch_") in str(error), (name, fields)
            assert len(str(error)) < 2000
        else:
            made += 1
    assert made < len(cases[::step]) / 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("[" * 10**5 + "]" * 10**5, "is not a configuration"),
        ('{"a":' * 10**5 + "1" + "}" * 10**5, "is not a configuration"),
        (LLAMA | {"a": json.loads("[" * 40 + "]" * 40)}, "within more than 16 others"),
        ("[1, 2]", "must be a JSON object"),
        ("{", "cannot be read|can be read"),
        (LLAMA | {"architectures": ["BertModel"]}, "BertModel takes a BertConfig, .* 'llama' .* a LlamaConfig"),
        (LLAMA | {"architectures": ["Trainer"]}, "no architecture 'Trainer'.* architectures"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, which is more than 1024"),
        (LLAMA | {"rms_norm_eps": math.nan}, "rms_norm_eps is nan, which is no number"),
        (LLAMA | {"num_labels": 10**9}, "num_labels is 1000000000, which is more than"),
        (LLAMA | {"vocab_size": -7}, r"vocab_size is -7, and transformers says RuntimeError: .*negative dimension -7"),
        (LLAMA | {"hidden_act": "loud"}, r"hidden_act is 'loud', and transformers says KeyError"),
        (LLAMA | {"dtype": "load"}, "dtype is 'load', and"),
        (LLAMA | {"num_attention_heads": -7}, "num_attention_heads is -7, and"),
        (LLAMA | {"hidden_size": "16"}, "hidden_size is '16', and transformers says"),
        (CLIP | {"text_config": {**SIZES, "vocab_size": -7}}, r"text_config\.vocab_size is -7, and"),
        (
            LLAMA | {"num_key_value_heads": 3},
            "num_key_value_heads is 3, and .* cannot be exported by torch.export: ",
        ),
        (
            LLAMA | {"intermediate_size": 0},
            "intermediate_size is 0, and The weight 'model.layers.0.mlp.gate_proj.weight'",
        ),
        # Models whose results do not depend on what they have nothing of.
        (
            MIXTRAL | {"num_experts_per_tok": 0},
            "num_experts_per_tok is 0, and MixtralForCausalLM computes with tensors",
        ),
        pytest.param(
            {
                **{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **SIZES},
                **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
                **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 0},
                **{"moe_intermediate_size": 8, "first_k_dense_replace": 0},
            },
            "topk_group is 0, and DeepseekV3ForCausalLM computes with tensors of no elements",
            marks=pytest.mark.slow,
        ),
        ({"model_type": "gpt2", "n_positions": 10**8}, "n_positions is 100000000, and"),
        (
            {
                "model_type": "gpt2",
                "architectures": ["GPT2Model"],
                "n_embd": 8,
                "n_layer": 1,
                "n_head": 2,
                "n_positions": 3,
            },
            "n_positions is 3, and The model reads row 3 of an embedding of 3 rows",
        ),
        (MAMBA | {"n_groups": -7}, "n_groups is -7, and .* groups must be a positive integer"),
        # Sizes that contradict each other are named together, and of two wrong fields the one that comes first.
        (SWIN | {"window_size": 7}, "image_size is 16, patch_size is 2, window_size is 7, and"),
        (
            LLAMA | {"num_key_value_heads": -1, "rope_parameters": 1.5},
            r"rope_parameters is 1\.5, and transformers says",
        ),
        (LLAMA | {"architectures": "LlamaForCausalLM"}, "architectures must be a list .* got 'LlamaForCausalLM'"),
        pytest.param(
            GEMMA | {"text_config": {**SIZES, "head_dim": 8, "num_key_value_heads": 1, "output_hidden_states": "x"}},
            r"text_config\.output_hidden_states is 'x', and",
            marks=pytest.mark.slow,
        ),
        # Names are of the file, too.
        (LLAMA | {"id2label": {"1.5": "a"}}, r"id2label\.1\.5 is 'a', and"),
        (LLAMA | {"a\nb": {"quantization_config": 5}}, r"a\\nb\.quantization_config is 5, which"),
        (LLAMA | {"a" * 10**5: {"quantization_config": 5}}, r"aaa\.\.\.aaa.*\.quantization_config is 5, which"),
        (f"[{'[],' * 2**18}[]]", "more than 262144 values"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_is_wrong_is_said(tmp_path: Path, fields: Any, message: str):
    assert re.search(message, message_of(tmp_path, fields))


def test_images_of_any_size_have_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretrained, "from_torch", lambda _, inputs, *__, **___: inputs)
    fields = {"model_type": "vit", **SIZES, "image_size": 2**16, "patch_size": 2**12}
    inputs: Any = hidet_dist.from_transformers(written(tmp_path, fields), batch=2**6)
    assert inputs["pixel_values"].is_meta
    assert inputs["pixel_values"].shape == (2**6, 3, 2**16, 2**16)


def test_the_command_prints_one_line(tmp_path: Path):
    file = written(tmp_path, LLAMA | {"hidden_act": "loud"})
    done = CliRunner().invoke(app, ["plan", str(file), "--mesh", "2"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"hidet-dist: {file}: hidden_act is 'loud', and transformers says KeyError")
    assert done.stderr.count("\n") == 1
