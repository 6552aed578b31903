"""Language models: a checkpoint in, tokens out.

``step`` and ``text`` say what a loaded model and a tokenizer offer. ``engine`` serves many requests with them at once,
``ranks`` steps one model on several ranks, and ``server`` puts an engine behind HTTP.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hidet_dist.llm.loading import LanguageModel, load

__all__ = ["LanguageModel", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hidet_dist.llm.loading"), name)
