"""Weights by name: a graph refers to them, safetensors files hold them, and they are read slice by slice when needed.

Serving needs :mod:`hidet_dist.weights.header` only, so the rest, which needs hidet and torch, is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hidet_dist.weights.header import StoredLayout

if TYPE_CHECKING:
    from hidet_dist.weights.combined import Source
    from hidet_dist.weights.named import (
        as_weight,
        as_weights,
        is_weight,
        names_of,
        part_of_weight,
        weight,
        weights_from_safetensors,
    )
    from hidet_dist.weights.safetensors_file import SafetensorsFiles, write_safetensors
    from hidet_dist.weights.sources import check_weights, read_shard, shard_blocks, source_of
    from hidet_dist.weights.states import state

__all__ = [
    "SafetensorsFiles",
    "Source",
    "StoredLayout",
    "as_weight",
    "as_weights",
    "check_weights",
    "is_weight",
    "names_of",
    "part_of_weight",
    "read_shard",
    "shard_blocks",
    "source_of",
    "state",
    "weight",
    "weights_from_safetensors",
    "write_safetensors",
]

_MODULES = {
    **dict.fromkeys(("SafetensorsFiles", "write_safetensors"), "safetensors_file"),
    "state": "states",
    "Source": "combined",
    **dict.fromkeys(("check_weights", "read_shard", "shard_blocks", "source_of"), "sources"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'named')}")
    return globals().setdefault(name, getattr(module, name))
