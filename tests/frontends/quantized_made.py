"""Quantized checkpoints made number by number, as the methods are described, with the values that they have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

Tensors = dict[str, torch.Tensor]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: which of eight columns is in the word's k-th lowest four bits


def packed(numbers: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack whole numbers into int32 words along a dim; what is missing from the last word is 0."""
    each = 32 // bits
    words = []
    for given in numbers.movedim(dim, -1).tolist():
        row = given + [0] * (-len(given) % each)
        of_row = []
        for begin in range(0, len(row), each):
            word = 0
            for place in range(each):
                word |= row[begin + (order[place] if order else place)] << (place * bits)
            of_row.append(word - 2**32 if word >= 2**31 else word)
        words.append(of_row)
    return torch.tensor(words, dtype=torch.int32).movedim(-1, dim).contiguous()


class Quantized:
    """Random numbers, zero points and scales of a linear layer [rows, columns], and the values that they make."""

    def __init__(
        self, rows: int, columns: int, group: int, bits: int, symmetric: bool, dtype: torch.dtype, seed: int = 0
    ):
        chance = torch.Generator().manual_seed(seed)
        count, self.bits, groups = 2**bits, bits, columns // group
        self.numbers = torch.randint(0, count, (rows, columns), generator=chance)
        self.zeros = torch.randint(0, count, (rows, groups), generator=chance)
        if symmetric:
            self.zeros.fill_(count // 2)
        self.scales = ((torch.rand(rows, groups, generator=chance) + 0.5) / (4 * count)).to(dtype)
        spread = self.numbers - self.zeros.repeat_interleave(group, 1)
        self.values = (spread.double() * self.scales.double().repeat_interleave(group, 1)).float()

    def gptq(self, layer: str, group: int, v2: bool = False) -> Tensors:
        """GPTQ's tensors."""
        stored = self.zeros if v2 else (self.zeros - 1) % 2**self.bits
        return {
            f"{layer}.qweight": packed(self.numbers.t(), self.bits, 0),
            f"{layer}.qzeros": packed(stored.t(), self.bits, 1),
            f"{layer}.scales": self.scales.t().contiguous(),
            f"{layer}.g_idx": (torch.arange(self.numbers.shape[1]) // group).int(),
        }

    def awq(self, layer: str) -> Tensors:
        """AWQ's tensors."""
        return {
            f"{layer}.qweight": packed(self.numbers.t(), 4, 1, _AWQ_ORDER),
            f"{layer}.qzeros": packed(self.zeros.t(), 4, 1, _AWQ_ORDER),
            f"{layer}.scales": self.scales.t().contiguous(),
        }

    def compressed(self, layer: str, symmetric: bool) -> Tensors:
        """The tensors of compressed-tensors."""
        found = {
            f"{layer}.weight_packed": packed(self.numbers, self.bits, 1),
            f"{layer}.weight_scale": self.scales.clone(),
            f"{layer}.weight_shape": torch.tensor(self.numbers.shape),
        }
        return found if symmetric else {**found, f"{layer}.weight_zero_point": packed(self.zeros, self.bits, 0)}


def compressed_config(bits: int, symmetric: bool, group: int | None, **changes: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
    }
    of_group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": of_group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **changes,
    }


def quantize_folder(folder: Path, method: str, group: int, bits: int = 4, symmetric: bool = False) -> Tensors:
    """Quantize the layers of a folder's model by a method, in place; return the values that they have since then."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    values: Tensors = {}
    stored: Tensors = {}
    dtype = torch.bfloat16 if method == "compressed-tensors" else torch.float16
    for number, (name, x) in enumerate(tensors.items()):
        if x.dim() != 2 or not name.endswith("_proj.weight"):
            stored[name] = x
            continue
        made = Quantized(*x.shape, group, bits, symmetric, dtype, number)
        layer = name.removesuffix(".weight")
        if method == "gptq":
            stored |= made.gptq(layer, group)
        elif method == "awq":
            stored |= made.awq(layer)
        else:
            stored |= made.compressed(layer, symmetric)
        values[name] = made.values
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    configs: Mapping[str, dict[str, Any]] = {
        "gptq": {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": symmetric},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        "compressed-tensors": compressed_config(bits, symmetric, group),
    }
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": configs[method]}))
    return values
