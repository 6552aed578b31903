"""Tiny configurations of transformers' models, made from their classes by rules.

A configuration class has defaults that describe one real model. :func:`tiny_configuration` shrinks its sizes by the
names of its fields and by their relations: heads that share keys go on to share them, a width that is the product of
heads and their sizes stays it, and of each kind of layer one is kept. Numbers of heads, experts, layers and tokens are
odd where the model allows it, so that no mesh divides them. Where rules do not suffice, ``OVERRIDES`` has the fields.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

HIDDEN, INNER, EXPERT_INNER, WORDS, LAYERS, EXPERTS, CHOSEN, POSITIONS = 48, 72, 24, 101, 3, 5, 2, 64
BATCH, TOKENS = 2, 9
INDEX_HEADS = 15
SPECIAL = 12  # ids of special tokens are less


@dataclasses.dataclass(frozen=True)
class _Default:
    """A configuration by its defaults, and the sizes of the tiny one that others follow from."""

    fields: Mapping[str, Any]

    def first(self, *names: str) -> Any:
        """The value of the first of these fields that is a number."""
        return next((v for n in names if isinstance(v := self.fields.get(n), int) and not isinstance(v, bool)), None)

    @property
    def layers(self) -> int | None:
        """The number of layers."""
        return self.first("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth")

    @property
    def heads(self) -> int | None:
        """The number of heads of queries."""
        return self.first("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")

    @property
    def groups(self) -> int | None:
        """The number of heads of keys and values."""
        return self.first("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_query_groups")

    @property
    def hidden(self) -> int | None:
        """The width of the model."""
        return self.first("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim")

    @property
    def tiny_groups(self) -> int:
        """The heads of keys and values of the tiny configuration."""
        return 1 if self.groups == 1 and self.heads != 1 else 3

    @property
    def tiny_heads(self) -> int:
        """The heads of the tiny configuration: three, or two for each of three groups."""
        return 3 if self.groups in (None, self.heads, 1) else 6

    @property
    def tiny_head_size(self) -> int:
        """The elements of a head, such that all make up the width if they do in the default."""
        size = self.first("head_dim", "d_kv", "d_head", "dim_head", "attention_head_size", "kv_channels")
        fills = None in (size, self.heads, self.hidden) or size * self.heads == self.hidden
        return HIDDEN // self.tiny_heads if fills else 8

    @property
    def expert_groups(self) -> int:
        """The groups of experts of the tiny configuration."""
        return 3 if (self.first("n_group", "num_expert_group") or 1) > 1 else 1


Rule = Callable[[int, _Default], int]


def _constant(value: int) -> Rule:
    return lambda old, _: min(old, value)


# The first pattern that a field's name matches says what becomes of its value.
_RULES: tuple[tuple[str, Rule], ...] = (
    (r"(image|video|audio|vision|bo[ai]|eo[ai])_.*token.*|.*_token_(id|index)", lambda old, _: old),  # see _tokens
    (r"chunk_size_feed_forward|adapter_reduction_factor|.*_merge_size", lambda old, _: old),
    (r"num_nextn_predict_layers|num_mtp_layers|num_kv_shared_layers", _constant(0)),
    (r"first_k_dense_replace|num_dense_layers|.*_offset|moe_layer_start_index", _constant(1)),
    (r"moe_layer_end_index|max_window_layers|num_global_layers", _constant(2)),
    (r".*(period|interval|every_n_layers|sliding_window_pattern)", _constant(2)),
    (r"n_layers_per_attn_res_block|layer_group_size|interleave_moe_layer_step|decoder_sparse_step", _constant(2)),
    (r"(num_|n_)?((encoder|decoder|hidden)_)?layers?(_per_stack)?|num_blocks|depth", _constant(LAYERS)),
    (r"conf_num_hidden_layers", _constant(LAYERS)),
    # Fewer heads of an indexer leave scores of zero, which are equal: which of them are the greatest is not defined.
    (r"(index|indexer)_n?_?heads", lambda old, _: INDEX_HEADS if old > INDEX_HEADS else 3),
    (r"(mamba|n_mamba)_n?_?heads|mamba_num_heads|swa_num_attention_heads", lambda *_: 3),
    (r"swa_num_key_value_heads|linear_num_(key|value)?_?heads|linear_num_heads", lambda *_: 3),
    (r"num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups", lambda _, d: d.tiny_groups),
    (r".*attention_heads|n_heads?|num_heads|num_attn_heads", lambda _, d: d.tiny_heads),
    (r"head_dim|d_kv|d_head|dim_head|attention_head_size|kv_channels", lambda _, d: d.tiny_head_size),
    (r"qk_head_dim", lambda *_: 24),
    (r"qk_nope_head_dim|v_head_dim|swa_head_dim|index_head_dim", _constant(16)),
    (r"qk_rope_head_dim|linear_.*head_dim|d_rel", _constant(8)),
    (r"mamba_(d_head|head_?dim)", lambda *_: 2 * HIDDEN // 3),  # with the usual expansion of 2
    (r"mamba_d_ssm|attention_hidden_size", lambda *_: 2 * HIDDEN),
    (r"rotary_dim", _constant(4)),
    (r"(n|num)_(expert_)?group", lambda _, d: d.expert_groups),
    (r"topk_group", lambda old, d: min(old, 2 if d.expert_groups > 1 else 1)),
    (r"((moe_)?num_(local_)?|n_routed_)experts", lambda _, d: 3 * d.expert_groups if d.expert_groups > 1 else EXPERTS),
    (r".*experts_per_tok(en)?|moe_(k|topk|top_k)|top_k_experts", _constant(CHOSEN)),
    (r"(moe|expert|shared).*(intermediate_size|hidden_size)", lambda *_: EXPERT_INNER),
    (r"(max_|n_)?(position(_embeddings|s)|ctx)|max_(source|target)_positions", _constant(POSITIONS)),
    (r"context_length|max_seq_len|model_max_length|original_max_position_embeddings", _constant(POSITIONS)),
    (r"sliding_window(_size)?|window_size|attention_window_size|local_attention", _constant(4)),
    (r"attention_chunk_size|.*chunk_(size|length)|block_size", lambda old, _: min(old, 4)),
    (r"index_topk|index_topk_blocks|keep_window_size", _constant(4)),
    (r"(q|o)_lora_rank", _constant(24)),
    (r".*(lora_rank|_rank|lowrank)|time_step_rank|laurel_rank|adapter_rank", _constant(16)),
    (r"(ssm_)?state_size|mamba_d_state", _constant(8)),
    (r"mamba_n_?groups|n_groups", lambda old, _: 3 if old > 1 else 1),
    (r".*vocab_size|vocab_size_per_layer_input|.*_group_vocab", _constant(WORDS)),
    (r"(.*_)?(hidden_size|embedding_size)(_global)?|d_model|n_embd|(embed|emb|embedding)_dim|lru_width|word_embed_proj_dim",
     lambda *_: HIDDEN),
    (r"dim_model_base", _constant(16)),
    (r".*(intermediate|ffn|ff|inner|feed_forward).*|dff|n_inner|mlp_dim", lambda *_: INNER),
    (r"image_size", _constant(32)),
    (r"patch_size", _constant(8)),
    (r"out_hidden_size|projection_dim|.*output_dim|.*input_dim", lambda *_: HIDDEN),
)  # fmt: skip


def tiny_configuration(kind: Any, overrides: Mapping[str, Any] | None = None) -> Any:
    """Make a tiny configuration of a class.

    Parameters
    ----------
    kind: type
        A configuration class of transformers.
    overrides: mapping, optional
        Fields that have these values; those of a configuration within it are a mapping as well.
    """
    overrides = dict(overrides or {})
    needed = {name: value for name, value in overrides.items() if not isinstance(value, Mapping)}
    try:
        default = kind()
    except Exception:  # defaults that contradict each other, or names that must be given
        default = kind(**needed)
    names = [field.name for field in dataclasses.fields(kind)]
    given = {name: _value(default, name) for name in names}
    known = _Default(given)
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if name in kind.sub_configs and value is not None:
            own = overrides.pop(name, {})
            changed[name] = tiny_configuration(type(value), own) if isinstance(own, Mapping) else own
        elif (rule := _rule(name)) is not None:
            if isinstance(value, int) and not isinstance(value, bool):
                changed[name] = rule(value, known)
            elif isinstance(value, list | tuple) and all(type(own) is int for own in value):
                given[name] = [rule(own, known) for own in value]  # of each layer
    if known.layers is not None:
        changed |= _fewer_layers(given, known.layers)
    changed |= _tokens(given)
    if "is_decoder" in given:
        changed["is_decoder"] = True
    return kind(**{**changed, **overrides})


def _rule(name: str) -> Rule | None:
    return next((rule for pattern, rule in _RULES if re.fullmatch(pattern, name)), None)


def _value(config: Any, name: str) -> Any:
    """The value of a field of all layers, which may have others of their own."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers refuses to name one value where layers differ
        return vars(config).get(name)


def _fewer_layers(fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields that say something of each layer, for one layer of each kind, or ``LAYERS``."""
    sequences = {name: list(value) for name, value in fields.items() if isinstance(value, list | tuple)}
    lists = {name: value for name, value in sequences.items() if len(value) == layers and layers > 1}
    chosen = {
        name: value for name, value in sequences.items() if name not in lists and _numbers_layers(name, value, layers)
    }
    if not lists and not chosen:
        return {}
    kinds = [
        (*(str(value[n]) for value in lists.values()), *(n in value for value in chosen.values()))
        for n in range(layers)
    ]
    kept = _of_each_kind(kinds)
    number = next(n for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks") if n in fields)
    return {
        number: len(kept),
        **{name: [value[n] for n in kept] for name, value in lists.items()},
        **{name: [new for new, n in enumerate(kept) if n in value] for name, value in chosen.items()},
    }


def _tokens(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of special tokens, which differ from each other and lie within the vocabulary."""
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        if re.fullmatch(r".*_token_(id|index)", name) and value is not None and value != -1:
            changed[name] = len(changed)
    return changed


_HEAD_OF_16: Mapping[str, Any] = {"head_dim": 16}
_GEMMA4: Mapping[str, Any] = {"global_head_dim": 16}
_DOTS3: Mapping[str, Any] = {
    **{f"swa_{name}": 3 for name in ("num_attention_heads", "num_key_value_heads")},
    **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
    "swa_head_dim": 24,
    "head_dim": 24,
}
_QWEN4: Mapping[str, Any] = {
    "indexer_n_heads": 3,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "eos_token_id": 1,
    "ple_embed_dim": HIDDEN,
    "heads_per_ngram": 3,
    "ngram_vocab_size_base": WORDS,
    "make_ngram_vocab_size_divisible_by": 2,
    "split_ngram_parts": 1,
}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "codegen": {"n_head": 4},  # it has a factor of 4 in its code
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}, "n_heads": 6},
    "deepseek_v2": {"num_experts_per_tok": CHOSEN},
    "diffllama": {"num_attention_heads": 6, "num_key_value_heads": 2},  # the last must be even
    "dots1": {"n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "dots3_note_text": _DOTS3,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {
        "attention_types": [[["global", "local", "global"], 1]],
        "attention_layers": ["global", "local", "global"],
    },
    "hunyuan_v1_dense": _HEAD_OF_16,
    "hunyuan_v1_moe": _HEAD_OF_16,
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 3, "head_dim": 2 * HIDDEN // 3},
    "ministral": _HEAD_OF_16,
    "nemotron": {**_HEAD_OF_16, "num_key_value_heads": 3},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_embds_dim": [16, 32], "axial_pos_shape": [8, 8]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"],
    },
}
"""Fields of the configurations that rules do not find, by the type of the model."""

ROWS = {"musicgen": 4, "musicgen_melody": 4}
"""Rows of token ids of a sequence, where there are more than one: of sound, a row for each codebook."""


def causal_types() -> dict[str, str]:
    """The causal language models of the installed transformers: their classes' names by their types."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_causal_model(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, torch.Tensor]]:
    """Make a causal model of a type, in evaluation mode with random weights, and the arguments of one call by name."""
    transformers = importlib.import_module("transformers")
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    config = tiny_configuration(auto.CONFIG_MAPPING[name], OVERRIDES.get(name))
    torch.manual_seed(0)
    kind = getattr(transformers, causal_types()[name])
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)  # as AutoModelForCausalLM does
    module = kind._from_config(config, dtype=dtype).eval()
    randomize(module)
    text = config.get_text_config(decoder=True)
    # No token twice in a row: models that choose the greatest of some scores choose among equal ones as they like.
    words = min(WORDS, text.vocab_size) - SPECIAL
    ids = torch.stack([SPECIAL + torch.randperm(words)[:TOKENS] for _ in range(BATCH * ROWS.get(name, 1))])
    return module, {"input_ids": ids}


def randomize(module: torch.nn.Module) -> None:
    """Fill a module with random weights: scales near 1, so that activations neither vanish nor explode, and biases
    whose omission shows."""
    with torch.no_grad():
        for name, x in module.named_parameters():
            if x.dim() <= 1:
                x.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
            else:
                x.normal_(0.0, 0.7 * _fan(x.shape) ** -0.5)
        for name, held in module.named_buffers():
            if name.endswith("running_mean"):
                held.normal_(0.0, 0.2)
            elif name.endswith("running_var"):
                held.uniform_(0.5, 1.5)


def _fan(shape: Sequence[int]) -> int:
    """The number of elements of a weight that an element of the output sums up; of stacked matrices, of one."""
    return max(shape[1:]) if len(shape) == 3 else torch.Size(shape[1:]).numel()


def _of_each_kind(kinds: Sequence[Any]) -> list[int]:
    """The first layer of each kind, and the first others until there are ``LAYERS``."""
    kept = sorted({kinds.index(kind) for kind in kinds})
    kept += [n for n in range(len(kinds)) if n not in kept][: max(0, LAYERS - len(kept))]
    return sorted(kept)


def _numbers_layers(name: str, value: Sequence[Any], layers: int) -> bool:
    """Whether a field, by its name and its elements, has numbers of layers."""
    is_named = re.search(r"(idxs|indices|indexes|layer_ids|layers)$", name) is not None
    return is_named and all(isinstance(n, int) and 0 <= n < layers for n in value)
