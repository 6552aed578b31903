"""The models in PyTorch, and how an expert would run each in two processes.

All take and give what the graphs of :mod:`cases` do. Weights go by the names that those graphs have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional


class SentenceEncoder(nn.Module):
    """transformers' BERT, the mean of the tokens that are not padding, and division by the Euclidean norm."""

    def __init__(self, folder: Path):
        super().__init__()
        from transformers import AutoModel

        self.bert = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa")

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return functional.normalize(mean, dim=1)


class GPTBlock(nn.Module):
    def __init__(self, hidden: int, size: int):
        super().__init__()
        self.size = size
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, seq, -1, self.size).transpose(1, 2)

        y = self.norm1(x)
        mixed = functional.scaled_dot_product_attention(
            heads(self.query(y)), heads(self.key(y)), heads(self.value(y)), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2 with separate projections, so that they can be split by heads, and a head of its own."""

    def __init__(self, layers: int, hidden: int, heads: int, words: int, seq: int):
        super().__init__()
        self.words = nn.Embedding(words, hidden)
        self.positions = nn.Parameter(torch.empty(seq, hidden))
        self.layers = nn.ModuleList([GPTBlock(hidden, hidden // heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, words, bias=False)

    def forward(self, ids: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def load(self, file: Path) -> GPT:
        """The same with the weights of a file, where matrices lie ``[in, out]``."""
        state = {}
        for name, weight in load_file(file).items():
            matrix = name == "head" or (name.startswith("layers.") and weight.dim() == 2)
            own = f"{name}.weight" if name in ("words", "head") else name
            state[own] = weight.T.contiguous() if matrix else weight
        self.load_state_dict(state)
        return self


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
            if stride != 1 or channels != 4 * width
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet50(nn.Module):
    """ResNet-50 (He et al., CVPR 2016) with the stride in the 3 x 3 convolutions, by torchvision's names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        channels = 64
        for number, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
            made = []
            for block in range(blocks):
                made.append(Bottleneck(channels, width, 2 if block == 0 and number else 1))
                channels = 4 * width
            setattr(self, f"layer{number + 1}", nn.Sequential(*made))
        self.fc = nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))

    def load(self, file: Path) -> ResNet50:
        """The same with the weights of a file."""
        self.load_state_dict(load_file(file))
        return self


def split_encoder(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Megatron-LM's plan: matrices by columns, then by rows."""
    for layer in model.bert.encoder.layer:
        plan = {f"attention.self.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"attention.output.dense": RowwiseParallel(), "intermediate.dense": ColwiseParallel()}
        parallelize_module(layer, mesh, plan | {"output.dense": RowwiseParallel()})
    return model


def split_gpt(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Megatron-LM's plan: matrices by columns, then by rows; the head by columns, its logits gathered."""
    for layer in model.layers:
        plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        parallelize_module(layer, mesh, plan | {"out": RowwiseParallel(), "down": RowwiseParallel()})
    return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


class HalfBatch(nn.Module):
    """Each process runs the whole model on its part of the batch, and the results are gathered."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        size, rank = dist.get_world_size(), dist.get_rank()
        part = self.model(*(x.chunk(size)[rank] for x in inputs))
        whole = part.new_empty(part.shape[0] * size, *part.shape[1:])
        dist.all_gather_into_tensor(whole, part)
        return whole


@dataclass(frozen=True)
class Peer:
    """A model in PyTorch: how it is made from the file or folder with its weights, and how it is split."""

    build: Callable[[Path], nn.Module]
    split: Callable[[nn.Module, DeviceMesh], nn.Module]


PEERS = {
    "minilm": Peer(SentenceEncoder, split_encoder),
    "gpt2": Peer(lambda file: GPT(12, 768, 12, 50257, 128).load(file), split_gpt),
    "resnet50": Peer(lambda file: ResNet50().load(file), lambda model, _: HalfBatch(model)),
}


def make(name: str, weights: Path, how: str) -> Callable[..., Any]:
    """The model ready to be called, ``eager``, by ``compile``, or ``parallel``: then this process is one of several."""
    model = PEERS[name].build(weights).eval()
    if how == "parallel":
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        model = PEERS[name].split(model, mesh)
    run = torch.compile(model) if how == "compile" else model

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        # DTensor's collectives do not run in inference mode.
        with torch.no_grad() if how == "parallel" else torch.inference_mode():
            return run(*inputs)

    return call
