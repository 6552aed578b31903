"""Models of transformers, torchvision and diffusers with tiny random configurations, for comparison with PyTorch.

Each is a case: a name, and a function that makes the module and the arguments of one call. Libraries are imported when
a case is made.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import torch

_WORDS, _HIDDEN, _HEADS, _INNER, _BATCH, _SEQ = 64, 32, 4, 64, 2, 8
_IMAGE, _PATCH = 32, 8


@dataclass(frozen=True)
class Case:
    """A model of a library.

    Attributes
    ----------
    name: the name of the model.
    make: makes the module and its arguments by name.
    library: the library of the model.
    form: the traced form: the module itself, or the result of ``torch.onnx.export``.
    """

    name: str
    make: Callable[[], tuple[torch.nn.Module, Mapping[str, Any]]]
    library: str = "transformers"
    form: Literal["torch", "onnx"] = "torch"

    def build(self) -> tuple[torch.nn.Module, Mapping[str, Any]]:
        """Make the module, in evaluation mode with random weights far from 0 and 1, and its arguments."""
        torch.manual_seed(0)
        module, inputs = self.make()
        module = module.eval()
        with torch.no_grad():
            for name, x in module.named_parameters():
                # Scales near 1, so that activations neither vanish nor explode; biases whose omission shows.
                if x.dim() <= 1:
                    x.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
                else:
                    x.normal_(0.0, 0.7 * (x[0].numel() ** -0.5))
            for name, held in module.named_buffers():
                if name.endswith("running_mean"):
                    held.normal_(0.0, 0.2)
                elif name.endswith("running_var"):
                    held.uniform_(0.5, 1.5)
        return module, inputs


def _ids(seq: int = _SEQ, name: str = "input_ids") -> dict[str, torch.Tensor]:
    return {name: torch.randint(3, _WORDS, (_BATCH, seq))}


def _masked() -> dict[str, torch.Tensor]:
    """Two sentences, the second of them shorter."""
    mask = torch.ones(_BATCH, _SEQ, dtype=torch.int64)
    mask[1, 5:] = 0
    return {**_ids(), "attention_mask": mask}


def _image(size: int = _IMAGE) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(_BATCH, 3, size, size)}


def _transformers(model: str, config: str, **options: Any) -> Any:
    library = importlib.import_module("transformers")
    settings = getattr(library, config)(**options)
    settings.use_cache = False
    return getattr(library, model)(settings)


def _case(name: str, model: str, config: str, inputs: Callable[[], Mapping[str, Any]], **options: Any) -> Case:
    return Case(name, lambda: (_transformers(model, config, **options), inputs()))


_COMMON: dict[str, Any] = {
    "vocab_size": _WORDS,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": _HEADS,
    "intermediate_size": _INNER,
    "max_position_embeddings": 64,
}
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_DECODER: dict[str, Any] = {**_COMMON, **_SPECIAL, "num_key_value_heads": 2}
_VISION: dict[str, Any] = {
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": _HEADS,
    "intermediate_size": _INNER,
    "image_size": _IMAGE,
    "patch_size": _PATCH,
}


def _encoder_part(model: str, config: str, inputs: Callable[[], Mapping[str, Any]], **options: Any) -> Any:
    """Make the encoder of an encoder-decoder model."""
    return lambda: (_transformers(model, config, **options).get_encoder(), inputs())


def _with_states(name: str = "encoder_hidden_states") -> dict[str, torch.Tensor]:
    return {**_ids(), name: torch.randn(_BATCH, 6, _HIDDEN)}


_T5: dict[str, Any] = {
    "vocab_size": _WORDS,
    "d_model": _HIDDEN,
    "d_kv": 8,
    "d_ff": _INNER,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": _HEADS,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_BART: dict[str, Any] = {
    "vocab_size": _WORDS,
    "d_model": _HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": _HEADS,
    "decoder_attention_heads": _HEADS,
    "encoder_ffn_dim": _INNER,
    "decoder_ffn_dim": _INNER,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 1,
}
_WHISPER: dict[str, Any] = {
    **{key: value for key, value in _BART.items() if key not in ("max_position_embeddings", "forced_eos_token_id")},
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 16,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def _resnet() -> tuple[torch.nn.Module, Mapping[str, Any]]:
    module = torchvision_models().resnet18(weights=None, num_classes=10)
    return module, {"x": torch.randn(_BATCH, 3, _IMAGE, _IMAGE)}


def _mobilenet() -> tuple[torch.nn.Module, Mapping[str, Any]]:
    """MobileNetV3 with a block of each kind: with and without squeeze and excitation, ReLU and hard swish."""
    library = torchvision_models().mobilenetv3
    blocks = [
        library.InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 1.0),
        library.InvertedResidualConfig(16, 3, 32, 24, False, "RE", 2, 1, 1.0),
        library.InvertedResidualConfig(24, 5, 48, 24, True, "HS", 1, 1, 1.0),
    ]
    module = library.MobileNetV3(blocks, last_channel=64, num_classes=10)
    return module, {"x": torch.randn(_BATCH, 3, _IMAGE, _IMAGE)}


def torchvision_models() -> Any:
    """Import torchvision's models, even if its operators were built for a different PyTorch.

    The operators then cannot be loaded, and registering derivatives and shapes for them fails. No model here calls
    them.
    """
    with suppress(RuntimeError):
        return importlib.import_module("torchvision.models")
    for name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
        sys.modules[name] = ModuleType(name)
    return importlib.import_module("torchvision.models")


def _unet() -> tuple[torch.nn.Module, Mapping[str, Any]]:
    diffusers = importlib.import_module("diffusers")
    module = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=_HIDDEN,
        attention_head_dim=8,
    )
    return module, {
        "sample": torch.randn(_BATCH, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(_BATCH, 6, _HIDDEN),
    }


def _swin_options() -> dict[str, Any]:
    return {
        "image_size": _IMAGE,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }


_MODULES: tuple[Case, ...] = (
    _case("BERT", "BertModel", "BertConfig", _masked, **_COMMON),
    _case("RoBERTa", "RobertaModel", "RobertaConfig", _masked, **_COMMON, **_SPECIAL),
    _case(
        "DeBERTa-v2",
        "DebertaV2Model",
        "DebertaV2Config",
        _masked,
        **_COMMON,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    _case("MPNet", "MPNetModel", "MPNetConfig", _masked, **_COMMON, **_SPECIAL),
    _case("ALBERT", "AlbertModel", "AlbertConfig", _masked, **_COMMON, embedding_size=16),
    _case(
        "ModernBERT",
        "ModernBertModel",
        "ModernBertConfig",
        _masked,
        **_COMMON,
        **_SPECIAL,
        local_attention=4,
        global_attn_every_n_layers=2,
    ),
    _case(
        "DistilBERT",
        "DistilBertModel",
        "DistilBertConfig",
        _masked,
        vocab_size=_WORDS,
        dim=_HIDDEN,
        n_layers=2,
        n_heads=_HEADS,
        hidden_dim=_INNER,
        max_position_embeddings=64,
    ),
    _case(
        "GPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        _ids,
        vocab_size=_WORDS,
        n_embd=_HIDDEN,
        n_layer=2,
        n_head=_HEADS,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=1,
    ),
    _case("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", _ids, **_COMMON, bos_token_id=0, eos_token_id=1),
    _case(
        "OPT",
        "OPTForCausalLM",
        "OPTConfig",
        _ids,
        vocab_size=_WORDS,
        hidden_size=_HIDDEN,
        word_embed_proj_dim=_HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=_HEADS,
        ffn_dim=_INNER,
        max_position_embeddings=64,
        **_SPECIAL,
    ),
    _case("LLaMA", "LlamaForCausalLM", "LlamaConfig", _ids, **_DECODER),
    _case("Mistral", "MistralForCausalLM", "MistralConfig", _ids, **_DECODER, sliding_window=4),
    _case(
        "Mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        _ids,
        **_DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    _case("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", _ids, **_DECODER),
    _case("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", _ids, **_DECODER, head_dim=8),
    _case(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _ids,
        **_DECODER,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    ),
    _case("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", _ids, **_DECODER, head_dim=8, sliding_window=4),
    _case("Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig", _ids, **_DECODER, head_dim=8, sliding_window=4),
    _case("Phi-3", "Phi3ForCausalLM", "Phi3Config", _ids, **_DECODER),
    _case(
        "Falcon",
        "FalconForCausalLM",
        "FalconConfig",
        _ids,
        vocab_size=_WORDS,
        hidden_size=_HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=_HEADS,
        new_decoder_architecture=False,
        multi_query=True,
        bos_token_id=0,
        eos_token_id=1,
    ),
    _case(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        _ids,
        vocab_size=_WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        state_size=4,
        **_SPECIAL,
    ),
    Case("T5 encoder", lambda: (_transformers("T5EncoderModel", "T5Config", **_T5), _masked())),
    Case(
        "T5 decoder",
        lambda: (_transformers("T5Model", "T5Config", **_T5).get_decoder(), _with_states()),
    ),
    Case("BART encoder", _encoder_part("BartModel", "BartConfig", _masked, **_BART)),
    Case(
        "BART decoder",
        lambda: (_transformers("BartModel", "BartConfig", **_BART).get_decoder(), _with_states()),
    ),
    Case(
        "Whisper encoder",
        _encoder_part(
            "WhisperModel", "WhisperConfig", lambda: {"input_features": torch.randn(_BATCH, 8, 24)}, **_WHISPER
        ),
    ),
    Case(
        "Whisper decoder",
        lambda: (_transformers("WhisperModel", "WhisperConfig", **_WHISPER).get_decoder(), _with_states()),
    ),
    Case(
        "CLIP",
        lambda: (
            _transformers(
                "CLIPModel",
                "CLIPConfig",
                text_config={**_COMMON, **_SPECIAL, "projection_dim": 16},
                vision_config={**_VISION, "projection_dim": 16},
                projection_dim=16,
            ),
            {**_masked(), **_image()},
        ),
    ),
    Case(
        "SigLIP",
        lambda: (
            _transformers(
                "SiglipModel", "SiglipConfig", text_config={**_COMMON, **_SPECIAL}, vision_config=dict(_VISION)
            ),
            {**_ids(), **_image()},
        ),
    ),
    _case("ViT", "ViTModel", "ViTConfig", _image, **_VISION),
    _case("DINOv2", "Dinov2Model", "Dinov2Config", _image, **_VISION),
    _case("Swin", "SwinModel", "SwinConfig", _image, **_swin_options()),
    _case("ConvNeXt", "ConvNextModel", "ConvNextConfig", _image, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]),
    _case(
        "ResNet (transformers)",
        "ResNetModel",
        "ResNetConfig",
        _image,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        layer_type="basic",
    ),
    Case("ResNet (torchvision)", _resnet, "torchvision"),
    _case(
        "EfficientNet",
        "EfficientNetModel",
        "EfficientNetConfig",
        _image,
        image_size=_IMAGE,
        width_coefficient=0.25,
        depth_coefficient=0.5,
        in_channels=[32, 16],
        out_channels=[16, 24],
        kernel_sizes=[3, 5],
        strides=[1, 2],
        expand_ratios=[1, 6],
        num_block_repeats=[1, 2],
        depthwise_padding=[],
        hidden_dim=320,
    ),
    Case("MobileNetV3", _mobilenet, "torchvision"),
    Case("U-Net", _unet, "diffusers"),
    _case(
        "SegFormer",
        "SegformerModel",
        "SegformerConfig",
        _image,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[4, 2],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
)
_EXPORTED = (  # without what PyTorch does not export to ONNX: T5 with a mask, Swin
    *("BERT", "RoBERTa", "MPNet", "ALBERT", "DistilBERT", "GPT-2", "GPT-NeoX", "LLaMA", "Qwen2"),
    *("BART decoder", "Whisper encoder", "CLIP", "ViT", "DINOv2", "ConvNeXt", "ResNet (transformers)"),
    "SegFormer",
)

CASES: tuple[Case, ...] = (
    *_MODULES,
    *(replace(case, name=f"{case.name} from ONNX", form="onnx") for case in _MODULES if case.name in _EXPORTED),
)
"""The models by name."""


def case_named(name: str) -> Case:
    """Return the case with a name. Raises KeyError."""
    return next(case for case in CASES if case.name == name)
