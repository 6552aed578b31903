"""hidet_dist: automatic parallelization for hidet. Importing it adds the calls below to ``hidet.distributed``."""

from importlib.metadata import version

import hidet.distributed

from hidet_dist.api import AutoParallelResult, auto_parallel, partition
from hidet_dist.compat import matmul_definition, named_weights
from hidet_dist.machine import calibrate
from hidet_dist.runtime.partition import LoadedPartition, load_partition
from hidet_dist.runtime.session import init, shutdown
from hidet_dist.search import recost, search_family
from hidet_dist.spec import DeviceMesh, OpShardSpec, Plan, ReduceFn, TensorShardSpec
from hidet_dist.weights import as_weight, as_weights, weight, weights_from_safetensors

__version__ = version("hidet_dist")

matmul_definition.install()
named_weights.install()

__all__ = [
    "AutoParallelResult",
    "DeviceMesh",
    "LoadedPartition",
    "OpShardSpec",
    "Plan",
    "ReduceFn",
    "TensorShardSpec",
    "as_weight",
    "as_weights",
    "auto_parallel",
    "calibrate",
    "init",
    "load_partition",
    "partition",
    "recost",
    "search_family",
    "shutdown",
    "weight",
    "weights_from_safetensors",
]

for _name in __all__:
    setattr(hidet.distributed, _name, globals()[_name])
