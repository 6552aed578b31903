"""The cases on a GPU: language models with random weights, the same for the graph and PyTorch's model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hidet_dist.testing import torch_models
from hidet_dist.testing.sizes import GPT2, TINY_LLAMA, GPTConfig, LlamaConfig

if TYPE_CHECKING:
    from hidet.graph import FlowGraph

SEQUENCE, SEED = 128, 0
_MASKED = -1e9  # its exp is 0, also where half precision makes it its least value
_TORCH_COMPILE = {"compile": "default", "compile_graph": "reduce-overhead"}


@dataclass(frozen=True)
class Case:
    """A model at a batch size and in a precision.

    Attributes
    ----------
    title: what a person calls it.
    model: the name of the model: cases of the same share a file of weights.
    config: its sizes, in float32.
    precision: what it is computed in, ``float16`` or ``float32``.
    """

    title: str
    model: str
    config: GPTConfig | LlamaConfig
    precision: str

    def graph(self) -> FlowGraph:
        """The float32 graph, its weights by name."""
        from hidet_dist.testing import shapes  # hidet, which PyTorch's processes do without

        return shapes.gpt(self.config) if isinstance(self.config, GPTConfig) else shapes.llama(self.config)

    def inputs(self) -> list[np.ndarray]:
        """Sentences without padding, and the causal mask."""
        size = (self.config.batch, self.config.sequence)
        ids = np.random.default_rng(SEED).integers(0, self.config.vocabulary, size).astype(np.int32)
        mask = np.triu(np.full(size[1:] * 2, _MASKED, np.float32), 1)
        return [ids, mask[None, None]]

    def peer(self, file: Path, device: str, how: str) -> Callable[..., Any]:
        """PyTorch's model with the weights of a file, ``eager`` or compiled in one of two modes."""
        with torch.device("meta"):  # its weights are the file's
            model: Any = (
                torch_models.GPT(self.config) if isinstance(self.config, GPTConfig) else torch_models.Llama(self.config)
            )
        model = model.load(file, device).to(getattr(torch, self.precision)).eval()
        run = torch.compile(model, mode=_TORCH_COMPILE[how]) if how != "eager" else model

        def call(*inputs: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                return run(*inputs)

        return call


def _cases() -> dict[str, Case]:
    models: dict[str, tuple[str, GPTConfig | LlamaConfig]] = {
        "gpt2": ("GPT-2 124M", GPT2),
        "llama": ("TinyLlama 1.1B", TINY_LLAMA),
    }
    return {
        f"{model}_{batch}_{precision}": Case(
            f"{title}, batch {batch}, {precision}", model, replace(config, batch=batch, sequence=SEQUENCE), precision
        )
        for precision in ("float16", "float32")
        for model, (title, config) in models.items()
        for batch in (1, 8)
    }


CASES = _cases()
"""The cases by name, those that matter most first."""
