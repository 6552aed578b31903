"""The sizes of real models."""

from __future__ import annotations

from dataclasses import dataclass

NORM_EPSILON = 1e-5
"""The epsilon of LLaMA's norms, added to the mean square."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT-2 or GPT-3: learned positions, layer norm, GELU; the head has a separate matrix."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    batch: int
    sequence: int
    dtype: str = "float16"


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a LLaMA: rotary positions, RMS norm, gated SiLU, grouped queries, a separate head."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    batch: int
    sequence: int
    dtype: str = "float16"


GPT2 = GPTConfig(layers=12, hidden=768, heads=12, vocabulary=50257, batch=8, sequence=1024, dtype="float32")
GPT3_175B = GPTConfig(layers=96, hidden=12288, heads=96, vocabulary=50257, batch=8, sequence=2048)
TINY_LLAMA = LlamaConfig(22, 2048, 32, 4, 5632, 32000, batch=1, sequence=128, dtype="float32")
"""TinyLlama of 1.1e9 parameters (Zhang et al. 2024, table 2)."""
LLAMA3_8B = LlamaConfig(32, 4096, 32, 8, 14336, 128256, batch=16, sequence=128)
LLAMA3_70B = LlamaConfig(80, 8192, 64, 8, 28672, 128256, batch=16, sequence=128)
