"""Models of GGUF files: their configurations and weights, by the names that transformers gives them.

llama.cpp's converter makes such files of transformers' checkpoints
(https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py). Here its renamings and changes are undone. A
key or a tensor that is not known to be without effect is refused by name: left out, it would change the results.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hidet.graph import Tensor

from hidet_dist.checks import shown
from hidet_dist.errors import WeightsError
from hidet_dist.weights.combined import Joined
from hidet_dist.weights.gguf_file import GgufFile, GgufTensor, Reordered, Shifted
from hidet_dist.weights.named import weight_of

Fields = dict[str, Any]

_COMMON: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys, without the name of the architecture before them, that all architectures have, and transformers' fields."""

_ATTENTION: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS: Mapping[str, str] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GATED: Mapping[str, str] = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_OUTER: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp's converter does to the models of an architecture.

    Attributes
    ----------
    model_type: transformers' name.
    tensors: the modules of a layer by the name of their tensors.
    fields: further keys of the metadata, and transformers' fields.
    refine: completes the fields of a configuration.
    is_permuted: whether the rows of queries and keys are in the order of pairs that are rotated.
    norm_offset: what the converter adds to the weights of norms.
    """

    model_type: str
    tensors: Mapping[str, str]
    fields: Mapping[str, str] = field(default_factory=dict)
    refine: Callable[[GgufFile, Fields], None] = lambda file, fields: None
    is_permuted: bool = False
    norm_offset: float = 0.0


def _refine_llama(file: GgufFile, fields: Fields) -> None:
    if fields.get("num_local_experts"):
        fields["model_type"] = "mixtral"
    else:
        fields.pop("num_local_experts", None)
        fields.pop("num_experts_per_tok", None)
        fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def _refine_gemma(file: GgufFile, fields: Fields) -> None:
    # The largest model of each generation scales its scores otherwise, as llama.cpp knows by the number of layers.
    by_width = fields["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[fields["model_type"]]
    heads = fields["num_attention_heads"]
    fields["query_pre_attn_scalar"] = fields["hidden_size"] // heads if by_width else fields["head_dim"]


def _refine_gemma3(file: GgufFile, fields: Fields) -> None:
    _refine_gemma(file, fields)
    rope = fields["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": fields.pop("rope_local_base_freq", 10000.0)}
    fields["rope_parameters"] = {"full_attention": {"rope_theta": 1e6, **rope}, "sliding_attention": local}


def _refine_qwen3_moe(file: GgufFile, fields: Fields) -> None:
    fields["norm_topk_prob"] = True  # as llama.cpp does for this architecture


_EXPERT_FIELDS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_SOFTCAPS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"}

_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(
        "llama", {**_ATTENTION, **_NORMS, **_GATED, **_EXPERTS}, _EXPERT_FIELDS, _refine_llama, is_permuted=True
    ),
    "smollm3": _Architecture("smollm3", {**_ATTENTION, **_NORMS, **_GATED}, is_permuted=True),
    "qwen2": _Architecture("qwen2", {**_ATTENTION, **_NORMS, **_GATED}),
    "qwen3": _Architecture("qwen3", {**_ATTENTION, **_HEAD_NORMS, **_NORMS, **_GATED}),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        {**_ATTENTION, **_HEAD_NORMS, **_NORMS, **_EXPERTS},
        {**_EXPERT_FIELDS, "expert_feed_forward_length": "moe_intermediate_size"},
        _refine_qwen3_moe,
    ),
    "gemma2": _Architecture(
        "gemma2", {**_ATTENTION, **_FOUR_NORMS, **_GATED}, _SOFTCAPS, _refine_gemma, norm_offset=1.0
    ),
    "gemma3": _Architecture(
        "gemma3_text",
        {**_ATTENTION, **_HEAD_NORMS, **_FOUR_NORMS, **_GATED},
        {**_SOFTCAPS, "rope.freq_base_swa": "rope_local_base_freq"},
        _refine_gemma3,
        norm_offset=1.0,
    ),
    "phi3": _Architecture(
        "phi3",
        {
            **_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        {"attention.sliding_window": "sliding_window"},
    ),
    "olmo2": _Architecture(
        "olmo2",
        {
            **_ATTENTION,
            **_HEAD_NORMS,
            **_GATED,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}

ARCHITECTURES = tuple(_ARCHITECTURES)
"""The architectures that are read."""

_REAL = (
    *("attention.layer_norm_rms_epsilon", "attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base_swa"),
)
"""Keys of the above whose values are not whole numbers."""
_ZERO = ("attention.sliding_window", "expert_count", "expert_used_count")
"""Keys of the above that files have as 0 where a model lacks what they are of."""
_READ_APART = (
    *("vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    "rope.scaling.finetuned",  # whether the scaling was trained, which changes nothing
)
_FREQUENCIES = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.(\w+)", re.ASCII)
"""The names of the tensors of a layer: its number, written in one way alone, and what the tensor is."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FACTOR_TOLERANCE = 1e-4  # relative, of factors in float32


def configuration_of(file: GgufFile) -> Fields:
    """Return the fields of transformers' configuration of a model.

    Raises
    ------
    WeightsError
        When the file has no model of a known architecture, lacks a key or has one of another type, or has one that
        is not known; the message names the key.
    """
    architecture, name = _architecture(file)
    fields: Fields = {"model_type": architecture.model_type}
    known = {**_COMMON, **architecture.fields}
    for key in file.metadata:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in {*known, *_READ_APART}:
            raise WeightsError(
                f"{file.path}: {key} is {shown(file.metadata[key])}, and what it means for a model of the architecture "
                f"{name} is not known."
            )
    for key, entry in known.items():
        least = 0 if key in _ZERO else 1
        value = _real(file, f"{name}.{key}") if key in _REAL else _count(file, f"{name}.{key}", least)
        if value is not None:
            fields[entry] = value
    for key in ("block_count", "embedding_length", "attention.head_count"):
        if known[key] not in fields:
            raise WeightsError(f"{file.path} has no {name}.{key}, which must be a positive whole number.")
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    fields["head_dim"] = _head_size(file, name, fields)
    fields["rope_parameters"] = _rotation(file, name, fields["head_dim"])
    vocabulary = _count(file, f"{name}.vocab_size")
    fields["vocab_size"] = vocabulary or len(file.value("tokenizer.ggml.tokens", list, ()))
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    for token in ("bos", "eos"):
        fields[f"{token}_token_id"] = file.value(f"tokenizer.ggml.{token}_token_id", int)
    fields["pad_token_id"] = None
    architecture.refine(file, fields)
    return fields


def weights_of(file: GgufFile) -> dict[str, Tensor]:
    """Return the weights of a model by transformers' names, dequantized when they are read.

    Raises
    ------
    WeightsError
        When a tensor is not known for the architecture, or has a shape that its change does not fit.
    """
    architecture, name = _architecture(file)
    blocks = file.value(f"{name}.block_count", int, 0)
    weights: dict[str, Tensor] = {}
    pending = {key: tensor for key, tensor in file.tensors.items() if key != _FREQUENCIES}
    for parameter, stacked, shape, dtype in _experts(file, pending, blocks):
        weights[parameter] = weight_of(parameter, stacked, shape, dtype)
    for key, tensor in pending.items():
        known = _parameter(architecture, key, blocks)
        if known is None:
            raise WeightsError(
                f"{file.path}: the tensor {shown(key)} is not known for the architecture {name} with {blocks} blocks."
            )
        data: Any = tensor
        shape, dtype = tensor.shape, tensor.dtype
        part = key.split(".")[-2]
        if architecture.is_permuted and part in ("attn_q", "attn_k"):
            heads = "head_count" if part == "attn_q" else "head_count_kv"
            count = file.value(f"{name}.attention.{heads}", int) or file.value(f"{name}.attention.head_count", int)
            data = Reordered(tensor, _pairs_apart(file, tensor, count))
        elif architecture.norm_offset and part.endswith("norm"):
            data, dtype = Shifted(tensor, -architecture.norm_offset), "float32"
        weights[known] = weight_of(known, data, shape, dtype)
    return weights


def _count(file: GgufFile, key: str, least: int = 1) -> int | None:
    """Return a whole number of at least ``least``, or None if there is none. Raises WeightsError for others."""
    value: int | None = file.value(key, int)
    if value is not None and value < least:
        raise WeightsError(f"{file.path}: {key} must be a whole number of at least {least}; it is {value}.")
    return value


def _real(file: GgufFile, key: str) -> float | None:
    """Return a positive number as it was before it became a float32, or None. Raises WeightsError for others."""
    value: float | None = file.value(key, float)
    if value is not None and not 0 < value < math.inf:
        raise WeightsError(f"{file.path}: {key} must be a positive number; it is {value}.")
    return None if value is None else _shortest(value)


def _architecture(file: GgufFile) -> tuple[_Architecture, str]:
    """Find the architecture of a file, and its name. Raises WeightsError."""
    name = file.value("general.architecture", str)
    kind = file.value("general.type", str, "model")
    if kind != "model":
        raise WeightsError(f"{file.path} has a {shown(kind)}, and not a whole model.")
    if file.value("split.count", int, 1) > 1:
        raise WeightsError(f"{file.path} is one of several parts of a model: join them with llama.cpp's gguf-split.")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise WeightsError(f"{file.path} has a model of the architecture {shown(name)}; {known} are read.")
    return _ARCHITECTURES[name], name


def _parameter(architecture: _Architecture, key: str, blocks: int) -> str | None:
    """Return transformers' name of a tensor of a model with so many blocks, or None."""
    name, _, suffix = key.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if name in _OUTER:
        return f"{_OUTER[name]}.{suffix}"
    found = _BLOCK.fullmatch(name)
    if found is None or int(found[1]) >= blocks or found[2] not in architecture.tensors:
        return None
    return f"model.layers.{found[1]}.{architecture.tensors[found[2]]}.{suffix}"


def _experts(
    file: GgufFile, pending: dict[str, GgufTensor], blocks: int
) -> Iterator[tuple[str, Any, tuple[int, ...], str]]:
    """Take the stacked matrices of experts from ``pending``, and yield transformers' parameters made of them."""
    for key in [key for key in pending if key.endswith(".ffn_down_exps.weight")]:
        found = _BLOCK.fullmatch(key.removesuffix(".weight"))
        if found is None or int(found[1]) >= blocks:
            continue
        gate, up = (pending.get(f"blk.{found[1]}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        if gate is None or up is None:
            continue
        if gate.shape != up.shape or len(gate.shape) != 3 or gate.dtype != up.dtype:
            raise WeightsError(
                f"{file.path}: the experts' {gate.name} and {up.name} must have one shape of three dims and one "
                f"encoding; they have {list(gate.shape)} and {list(up.shape)}."
            )
        down = pending.pop(key)
        del pending[gate.name], pending[up.name]
        prefix = f"model.layers.{found[1]}.mlp.experts"
        shape = (gate.shape[0], 2 * gate.shape[1], gate.shape[2])
        yield f"{prefix}.gate_up_proj", Joined((gate, up), (gate.shape[1], up.shape[1]), 1), shape, gate.dtype
        yield f"{prefix}.down_proj", down, down.shape, down.dtype


def _pairs_apart(file: GgufFile, tensor: GgufTensor, heads: int) -> torch.Tensor:
    """Return, for each row in transformers' order, its number in a file: there, the rows of a pair are neighbours.

    transformers rotates row i of a head together with row i + size / 2.
    """
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise WeightsError(f"{file.path}: {tensor.name} has {rows} rows, which are not those of {heads} heads.")
    return torch.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _head_size(file: GgufFile, name: str, fields: Fields) -> int:
    """Return the size of a head. Raises WeightsError if keys and values have two sizes, or not all of it is rotated."""
    rotated = _count(file, f"{name}.rope.dimension_count")
    default = fields["hidden_size"] // fields["num_attention_heads"]
    size = _count(file, f"{name}.attention.key_length") or rotated or default
    for key in ("attention.value_length", "rope.dimension_count"):
        value = file.value(f"{name}.{key}", int, size)
        if value != size:
            raise WeightsError(
                f"{file.path}: {name}.{key} is {value}, and heads have {size} elements: other values are not supported."
            )
    return size


def _rotation(file: GgufFile, name: str, size: int) -> Fields:
    """Return transformers' ``rope_parameters``. Raises WeightsError for a scaling that is not known."""
    theta = _real(file, f"{name}.rope.freq_base")
    rope: Fields = {"rope_type": "default"}
    if theta is not None:
        rope["rope_theta"] = theta
    prefix = f"{name}.rope.scaling"
    kind = file.value(f"{prefix}.type", str, "none")
    factor = _real(file, f"{prefix}.factor")
    original = _count(file, f"{prefix}.original_context_length")
    if kind in ("linear", "yarn") and factor is not None:
        rope.update(rope_type=kind, factor=factor)
        if original is not None:
            rope["original_max_position_embeddings"] = original
    elif kind != "none":
        raise WeightsError(f"{file.path}: {prefix}.type is {shown(kind)}; those that are read are linear and yarn.")
    if (stored := file.tensors.get(_FREQUENCIES)) is not None:
        rope.update(_llama3(file, stored, rope.get("rope_theta", 10000.0), size))
    return rope


def _llama3(file: GgufFile, stored: GgufTensor, theta: float, size: int) -> Fields:
    """Find the scaling of LLaMA 3 whose factors of frequencies a file has. Raises WeightsError if there is none."""
    if stored.shape != (size // 2,):
        raise WeightsError(f"{file.path}: {_FREQUENCIES} must have {size // 2} elements; it has {list(stored.shape)}.")
    factors = stored.read([slice(0, size // 2)]).double()
    factor = _shortest(float(factors.max()))
    low, high, context = _LLAMA3.values()
    lengths = 2 * math.pi * theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    smooth = ((context / lengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not (math.isfinite(factor) and (factors / expected - 1).abs().max() <= _FACTOR_TOLERANCE):  # NaN is no factor
        raise WeightsError(
            f"{file.path}: {_FREQUENCIES} has factors of frequencies that are not those of LLaMA 3's scaling, which "
            "are not supported."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _shortest(value: float) -> float:
    """Return the number of the fewest digits that has the same value in float32, in which the file has it."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
        except OverflowError:
            break
    return value
