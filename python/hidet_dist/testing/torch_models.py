"""PyTorch models for comparison with the graphs of :mod:`hidet_dist.testing`, with the same names of weights.

Each has the same inputs and outputs as the graph, and is made from a safetensors file with its weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from hidet_dist.testing.sizes import NORM_EPSILON, GPTConfig, LlamaConfig


class GPTBlock(nn.Module):
    """A layer of :class:`GPT`, whose heads have ``size`` elements."""

    def __init__(self, hidden: int, size: int):
        super().__init__()
        self.size = size
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, sequence, hidden]`` to the same shape."""
        batch, seq, _ = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, seq, -1, self.size).transpose(1, 2)

        y = self.norm1(x)
        mixed = functional.scaled_dot_product_attention(
            heads(self.query(y)), heads(self.key(y)), heads(self.value(y)), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        down: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + down


class GPT(nn.Module):
    """GPT-2 as in :func:`hidet_dist.testing.shapes.gpt`.

    Its projections are separate, so that they can be split by heads, and its head has a separate matrix.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        hidden = config.hidden
        self.words = nn.Embedding(config.vocabulary, hidden)
        self.positions = nn.Parameter(torch.empty(config.sequence, hidden))
        self.layers = nn.ModuleList([GPTBlock(hidden, hidden // config.heads) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, config.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        """Map ``int32[batch, sequence]`` to logits. The mask is always causal; the argument is ignored."""
        x = self.words(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def load(self, file: Path, device: str = "cpu") -> GPT:
        """Make the model with the weights of a file."""
        self.load_state_dict(_linear_layers(file, device), assign=True)
        return self


class LlamaBlock(nn.Module):
    """A layer of :class:`Llama`."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden, self.size = config.hidden, config.hidden // config.heads
        self.norm1, self.norm2 = (nn.RMSNorm(hidden, NORM_EPSILON) for _ in range(2))
        self.query, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(hidden, config.kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, config.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(config.inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, sequence, hidden]``, given two tables ``[sequence, size of a head]``, to the same shape."""
        batch, seq, _ = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, seq, -1, self.size).transpose(1, 2)

        def rotate(y: torch.Tensor) -> torch.Tensor:
            left, right = y.chunk(2, dim=-1)
            return y * cosine + torch.cat([-right, left], dim=-1) * sine

        y = self.norm1(x)
        query, key, value = rotate(heads(self.query(y))), rotate(heads(self.key(y))), heads(self.value(y))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        y = self.norm2(x)
        down: torch.Tensor = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + down


class Llama(nn.Module):
    """LLaMA as in :func:`hidet_dist.testing.shapes.llama`; its tables of angles are in the file, too."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden = config.hidden
        self.words = nn.Embedding(config.vocabulary, hidden)
        self.layers = nn.ModuleList([LlamaBlock(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(hidden, NORM_EPSILON)
        self.head = nn.Linear(hidden, config.vocabulary, bias=False)
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(config.sequence, hidden // config.heads))

    def forward(self, ids: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        """Map ``int32[batch, sequence]`` to logits. The mask is always causal; the argument is ignored."""
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def load(self, file: Path, device: str = "cpu") -> Llama:
        """Make the model with the weights of a file."""
        self.load_state_dict(_linear_layers(file, device), assign=True)
        return self


def _linear_layers(file: Path, device: str) -> dict[str, torch.Tensor]:
    """Load a file's weights with PyTorch's names; matrices in the file are ``[in, out]``."""
    state = {}
    for name, weight in load_file(file, device=device).items():
        layer = name.removesuffix(".weight")
        kind = layer.rpartition(".")[2]
        is_matrix = weight.dim() == 2 and kind not in ("words", "positions", "cosine", "sine")
        torch_name = name if kind in ("positions", "cosine", "sine", "bias") else f"{layer}.weight"
        state[torch_name] = weight.T.contiguous() if is_matrix else weight
    return state


class BasicBlock(nn.Module):
    """A block of ResNet-18: two convolutions of 3 x 3."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, channels, height, width]`` to the block's number of channels, at its stride."""
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """A block of ResNet-50, with the stride in its convolution of 3 x 3."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(channels, 4 * width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, channels, height, width]`` to four times the block's channels, at its stride."""
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def _shortcut(channels: int, out: int, stride: int) -> nn.Module:
    if stride == 1 and channels == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class ResNet(nn.Module):
    """ResNet (He et al., CVPR 2016) with numbers of blocks per stage, with torchvision's names."""

    def __init__(self, block: type[BasicBlock | Bottleneck], blocks: tuple[int, int, int, int], classes: int = 1000):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        stages: list[nn.Module] = []
        channels = 64
        for number, count in enumerate(blocks):
            layer, width = [], 64 << number
            for block_number in range(count):
                layer.append(block(channels, width, 2 if block_number == 0 and number else 1))
                channels = block.expansion * width
            stages.append(nn.Sequential(*layer))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images ``[batch, 3, height, width]`` to logits ``[batch, classes]``."""
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits

    def load(self, file: Path, device: str = "cpu") -> ResNet:
        """Make the model with the weights of a file."""
        self.load_state_dict(load_file(file, device=device), strict=False)
        return self


def resnet18(classes: int = 1000) -> ResNet:
    """Make a ResNet-18."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet50() -> ResNet:
    """Make a ResNet-50."""
    return ResNet(Bottleneck, (3, 4, 6, 3))
