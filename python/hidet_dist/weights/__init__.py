"""Weights that need not be there: named in a graph, lying in safetensors files, read slice by slice when it is time."""

from hidet_dist.weights.named import (
    as_weight,
    as_weights,
    is_weight,
    names_of,
    part_of_weight,
    weight,
    weights_from_safetensors,
)
from hidet_dist.weights.safetensors_file import Layout, SafetensorsFiles, write_safetensors
from hidet_dist.weights.sources import Source, check_weights, read_shard, shard_blocks, source_of

__all__ = [
    "Layout",
    "SafetensorsFiles",
    "Source",
    "as_weight",
    "as_weights",
    "check_weights",
    "is_weight",
    "names_of",
    "part_of_weight",
    "read_shard",
    "shard_blocks",
    "source_of",
    "weight",
    "weights_from_safetensors",
    "write_safetensors",
]
