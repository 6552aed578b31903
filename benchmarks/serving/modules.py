"""Models of transformers with random weights, as modules that take tensors and return one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

SEED = 0


class OneOutput(nn.Module):
    """A model that is called with tensors, and returns one of its outputs."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], output: str):
        super().__init__()
        self.model, self.names, self.output = model, names, output

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(self.model(**dict(zip(self.names, inputs, strict=True))), self.output)
        return y


def _normalize(model: nn.Module, images: torch.Tensor) -> None:
    """Give the batch norms of a model the statistics of its activations for some images.

    Activations would else become numbers below the normal ones, which processors multiply slowly.
    """
    model.eval()
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_parameters()  # transformers' scales are near 0
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        model(images)
    model.eval()


def _efficientnet_b0() -> nn.Module:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    # The defaults are those of B7; the paper's B0 is the one that it scales (arXiv:1905.11946, table 1).
    config = EfficientNetConfig(
        image_size=224, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, num_labels=1000
    )
    model = EfficientNetForImageClassification(config)
    # The same mean; theirs is a window of hidden_dim x hidden_dim pixels, of which OpenVINO makes nothing.
    model.efficientnet.pooler = nn.AdaptiveAvgPool2d(1)
    for layer in model.modules():  # theirs vanish with depth
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    _normalize(model, torch.randn(4, 3, 224, 224))
    return OneOutput(model, ("pixel_values",), "logits")


def _convnext_tiny() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return OneOutput(ConvNextForImageClassification(ConvNextConfig(num_labels=1000)), ("pixel_values",), "logits")


def _vit_base() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return OneOutput(ViTForImageClassification(ViTConfig(num_labels=1000)), ("pixel_values",), "logits")


def _whisper_tiny() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    return OneOutput(WhisperEncoder(config), ("input_features",), "last_hidden_state")


def _bert_base() -> nn.Module:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(), add_pooling_layer=False)
    return OneOutput(model, ("input_ids", "attention_mask"), "last_hidden_state")


_MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "efficientnet_b0": _efficientnet_b0,
    "convnext_tiny": _convnext_tiny,
    "vit_base": _vit_base,
    "whisper_tiny": _whisper_tiny,
    "bert_base": _bert_base,
}


NAMES = tuple(_MODULES)


def make(name: str) -> nn.Module:
    """The model of a name, with the same weights each time."""
    torch.manual_seed(SEED)
    return _MODULES[name]().eval()
