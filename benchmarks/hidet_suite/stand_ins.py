"""What takes the place of things that hidet's tests and examples would download, or need a GPU to measure.

Models have their structure and random weights; language models are small. A text is random tokens.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import hidet.utils.benchmark
import torch
from hidet.testing.models import gpt2
from huggingface_hub import constants

from hidet_dist.testing.model_zoo import torchvision_models

_TORCHVISION = "pytorch/vision"
_TEXTS = 2  # of the data set
_LONGEST_TEXT = 24  # tokens, at least 12 of which the examples want


@contextlib.contextmanager
def small_models() -> Iterator[None]:
    """Have models with random weights in the place of released ones, which would be downloaded."""
    import transformers

    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4)
    with contextlib.ExitStack() as stack:
        for owner, name, made in (
            (transformers.GPT2Config, "from_pretrained", lambda *_, **__: config),
            (
                transformers.GPT2LMHeadModel,
                "from_pretrained",
                lambda *_, **__: transformers.GPT2LMHeadModel(config).eval(),
            ),
            (torch.hub, "load", _from_hub),
        ):
            stack.enter_context(mock.patch.object(owner, name, made))
        with contextlib.suppress(ImportError):
            models = torchvision_models()
            stack.enter_context(mock.patch.object(models, "resnet50", _untrained(models.resnet50)))
        stack.enter_context(mock.patch.object(constants, "HF_HUB_OFFLINE", True))
        yield


def _from_hub(repository: str, name: str, **_: Any) -> torch.nn.Module:
    if not repository.startswith(_TORCHVISION):
        raise RuntimeError(f"{repository} would be downloaded")
    model: torch.nn.Module = getattr(torchvision_models(), name)(weights=None)
    return model


def _untrained(build: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    return lambda **_: build(weights=None)


@contextlib.contextmanager
def small_data() -> Iterator[None]:
    """Have random texts in the place of a data set and its tokenizer, and functions run once in that of benchmarks."""
    datasets = ModuleType("datasets")
    datasets.load_dataset = lambda *_, **__: {"test": _Texts()}  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, {"datasets": datasets}),
        mock.patch.object(gpt2, "tokenizer", lambda *_: None),
        mock.patch.object(hidet.utils.benchmark, "benchmark_func", _run_once),
    ):
        yield


class _Texts:
    """A part of a data set of texts."""

    def map(self, *_: Any, **__: Any) -> dict[str, list[list[int]]]:
        """The texts as tokens."""
        return {"input_ids": [[random.randrange(96) for _ in range(_LONGEST_TEXT - n)] for n in range(_TEXTS)]}


def _run_once(function: Callable[[], Any], *_: Any, **__: Any) -> float:
    function()
    return 0.0
