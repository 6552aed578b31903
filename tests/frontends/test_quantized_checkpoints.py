"""Checkpoints quantized by GPTQ, AWQ and compressed-tensors: the values are those that they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.frontends.quantized_made import Quantized, Tensors, compressed_config, quantize_folder

import hidet_dist
from hidet_dist.errors import ConfigError, WeightsError
from hidet_dist.frontends.configuration import Configuration
from hidet_dist.frontends.quantized import problem_of, weights_of_folder
from hidet_dist.weights.named import mark_of
from hidet_dist.weights.sources import source_of
from hidet_dist.weights.stored_groups import read_groups, stored_precision_of

ROWS, COLUMNS = 40, 256
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


def taken(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Any:
    """The weight of the layer ``x`` of a folder with these tensors."""
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    weights = weights_of_folder(folder, config)
    assert weights.keys() == {"x.weight"}
    return weights["x.weight"]


def check(weight: Any, made: Quantized, precision: str | None, group: int = 0) -> None:
    """Compare a weight with the values that it was made of: whole, in parts, and in groups."""
    shape = list(made.values.shape)
    assert (list(weight.shape), weight.dtype.name) == (shape, "float32")
    source = source_of(weight)
    for rows, columns in (
        (slice(0, ROWS), slice(0, COLUMNS)),
        (slice(3, 17), slice(37, 101)),
        (slice(5, 5), slice(0, 9)),
    ):
        got = source.read([rows, columns])
        assert got.is_contiguous() and torch.equal(got, made.values[rows, columns])
    found = stored_precision_of(weight)
    assert (found and (found.name, found.group, found.exact)) == (precision and (precision, group, True))
    if found is not None:
        for rows, columns in ((slice(0, ROWS), slice(0, COLUMNS)), (slice(3, 17), slice(128, 256))):
            assert torch.equal(read_groups(source, [rows, columns]).values(), made.values[rows, columns])


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(
    ("bits", "symmetric", "group", "precision"),
    [
        (4, False, 64, "wide_uint4"),
        (4, True, 32, "int4"),
        (8, True, 128, "int8"),
        (8, False, 128, None),
        (4, True, 256, "int4"),
    ],
)
def test_gptq(tmp_path: Path, bits: int, symmetric: bool, group: int, precision: str | None, v2: bool):
    made = Quantized(ROWS, COLUMNS, group, bits, symmetric, torch.float16)
    config = {**GPTQ, "bits": bits, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    check(taken(tmp_path, made.gptq("x", group, v2), config), made, precision, min(group, 128))


def test_awq(tmp_path: Path):
    made = Quantized(ROWS, COLUMNS, 128, 4, False, torch.float16)
    check(taken(tmp_path, made.awq("x"), AWQ), made, "wide_uint4", 128)


@pytest.mark.parametrize(
    ("bits", "symmetric", "group", "dtype", "precision"),
    [
        (4, True, 32, torch.float16, "int4"),
        (4, True, 64, torch.bfloat16, "int4"),
        (4, False, 128, torch.bfloat16, "wide_uint4"),
        (8, True, 256, torch.bfloat16, "int8"),
        (4, True, 16, torch.bfloat16, None),
        (4, False, 32, torch.float32, None),  # a product of 24 bits and a zero point is rounded
    ],
)
def test_compressed_tensors(
    tmp_path: Path, bits: int, symmetric: bool, group: int, dtype: torch.dtype, precision: str | None
):
    made = Quantized(ROWS, COLUMNS, group, bits, symmetric, dtype)
    weight = taken(tmp_path, made.compressed("x", symmetric), compressed_config(bits, symmetric, group))
    if dtype == torch.float32:
        assert stored_precision_of(weight) is None
        return
    check(weight, made, precision, min(group, 128))


def test_scales_of_16_bits_that_float16_does_not_have_keep_their_own_range(tmp_path: Path):
    made = Quantized(ROWS, COLUMNS, 64, 4, True, torch.bfloat16)
    made.scales *= 2.0**-30
    made.values *= 2.0**-30
    check(taken(tmp_path, made.compressed("x", True), compressed_config(4, True, 64)), made, "wide_uint4", 64)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**GPTQ, "bits": 3}, "bits is 3"),
        ({"quant_method": "gptq"}, "bits is None"),
        ({**GPTQ, "bits": 4.0}, "bits is 4.0"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "dynamic gives layers other bits"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'"),
        ({**AWQ, "bits": 8}, "bits is 8"),
        ({"quant_method": "fp8"}, "method 'fp8' is not supported"),
        ({"quant_method": ["gptq"]}, "is not supported"),
        ({"load_in_4bit": True}, "method that it describes"),
        (compressed_config(4, True, 32, format="marlin-24"), "is 'marlin-24', and pack-quantized is read"),
        (compressed_config(2, True, 32), "of 2 bits"),
        (compressed_config(4, True, 32, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed_config(4, True, 32, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (compressed_config(4, True, 32, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (
            compressed_config(4, True, 32, config_groups={"g": {"weights": None, "format": "pack-quantized"}}),
            "config_groups['g'].weights",
        ),
        (compressed_config(4, True, 32, config_groups=[1]), "config_groups is"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, config: dict[str, Any], said: str):
    assert said in problem_of(config)
    fields = {"model_type": "llama", "hidden_size": 64, "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="quantization_config is"):
        Configuration.of(tmp_path)


def test_rounded_activations_are_refused_by_name():
    config = compressed_config(8, True, None)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    assert "input_activations, and only weights" in problem_of(config)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path):
    made = Quantized(ROWS, COLUMNS, 64, 4, False, torch.float16)
    tensors = made.gptq("x", 64)
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(0))
    for changed, said in (
        ({"x.g_idx": tensors["x.g_idx"][order].contiguous()}, "x.g_idx .*act-order"),
        ({"x.scales": tensors["x.scales"][:3].contiguous()}, "do not fit one another"),
        ({"x.qzeros": tensors["x.qzeros"].long()}, "x.qzeros is int64"),
        ({"x.weight": torch.zeros(2)}, "both x.qweight and x.weight"),
    ):
        with pytest.raises(WeightsError, match=said):
            taken(tmp_path, {**tensors, **changed}, GPTQ)
    del tensors["x.qzeros"]
    with pytest.raises(WeightsError, match=r"lack x\.qzeros"):
        taken(tmp_path, tensors, GPTQ)


@pytest.mark.parametrize(
    "method", ["gptq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("awq", "compressed-tensors"))]
)
def test_models_of_folders_have_the_values(tmp_path: Path, method: str):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=90, num_hidden_layers=1, **sizes)).eval()
    model.save_pretrained(tmp_path)
    values = quantize_folder(tmp_path, method, 32)
    assert len(values) == 7
    graph = hidet_dist.from_transformers(tmp_path, seq=4, weights="files")
    found = {}
    for op in graph.nodes:
        for x in op.inputs:
            mark = mark_of(x)
            if mark is not None and mark.name in values:
                found[mark.name] = source_of(x).read([slice(0, int(size)) for size in x.shape])
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], values[name]) for name in values)
