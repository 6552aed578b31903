"""GGUF files of models of transformers, written by the ``gguf`` package as llama.cpp's converter does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

Q = gguf.GGMLQuantizationType
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 90,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
RENAMED = {"expert_feed_forward_length": "moe_intermediate_size", "attention.sliding_window": "sliding_window"}


def model_of(kind: str, **changes: Any) -> Any:
    """A small random model of transformers with norms that are not 1."""
    torch.manual_seed(3)
    experts = EXPERTS if kind in ("mixtral", "qwen3_moe", "gpt_oss") else {}
    config = AutoConfig.for_model(kind, **{**SIZES, **experts, **changes})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.normal_(0, 0.1)
            if "norm" in name:
                x.add_(1.0)
    return model


def write(path: Path, model: Any, kind: str, quantized: Any = Q.F32, **metadata: Any) -> dict[str, torch.Tensor]:
    """Write a model, and return the values of its parameters in the file.

    Matrices are quantized where their rows allow it. ``metadata`` has further keys; None leaves one out.
    """
    config = model.config
    name = ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(path, name)
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.dimension_count": 16,
        "vocab_size": config.vocab_size,
    }
    rope = config.rope_parameters
    keys["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    if kind in ("mixtral", "qwen3_moe"):
        keys |= {"expert_count": 4, "expert_used_count": 2}
    if kind == "qwen3_moe":
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if kind in ("gemma2", "gemma3_text", "phi3"):
        keys["attention.sliding_window"] = config.sliding_window
    if kind == "gemma2":
        keys["attn_logit_softcapping"] = config.attn_logit_softcapping
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    keys = {f"{name}.{key}": value for key, value in keys.items()}
    keys |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    for key, value in {**keys, **metadata}.items():
        add(writer, key, value)
    values = {}
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[name], config.num_hidden_layers
    )
    for parameter, x in model.state_dict().items():
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = {parameter: x}
        if parameter.endswith("experts.gate_up_proj"):
            gate, up = x.chunk(2, 1)
            parts = {parameter.replace("gate_up", part): y for part, y in (("gate", gate), ("up", up))}
        read_back = []
        for part, y in parts.items():
            stored, undone = y, None
            if name in ("llama", "smollm3") and re.search(r"self_attn\.[qk]_proj", part):
                heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
                stored = y.reshape(heads, 2, -1, *y.shape[1:]).swapaxes(1, 2).reshape(y.shape)
                undone = heads
            if name in ("gemma2", "gemma3") and "norm" in part:
                stored = y + 1
            base, suffix = (part, ".weight") if "experts" in part else part.rsplit(".", 1)
            target = names.get_name(base)
            assert target is not None, base
            suffix = suffix if suffix.startswith(".") else f".{suffix}"
            back = put(writer, target + suffix, stored.contiguous(), quantized)
            if undone:
                back = back.reshape(undone, -1, 2, *back.shape[1:]).swapaxes(1, 2).reshape(back.shape)
            read_back.append(back - 1 if name in ("gemma2", "gemma3") and "norm" in part else back)
        values[parameter] = torch.cat(read_back, 1) if len(read_back) > 1 else read_back[0]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key, with the type that llama.cpp gives such a value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_int32(key, value) if value < 0 else writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def put(writer: gguf.GGUFWriter, name: str, x: torch.Tensor, quantized: Any) -> torch.Tensor:
    """Add a tensor, and return what is read of it, by the package's reference."""
    values = x.numpy()
    if x.dim() == 1 or quantized == Q.F32 or x.shape[-1] % gguf.GGML_QUANT_SIZES[quantized][0]:
        writer.add_tensor(name, values)
        return x.clone()
    packed = gguf.quantize(values, quantized)
    if quantized == Q.F16:
        writer.add_tensor(name, packed)
    else:
        writer.add_tensor(name, packed, raw_dtype=quantized)
    return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(packed, quantized))).reshape(x.shape)
