"""hidet_dist: automatic parallelization for hidet. With hidet imported, the calls are in ``hidet.distributed`` too.

What is named here is imported when it is first used: a process that serves needs neither the search nor its solver, and
hidet and PyTorch only where an input or a transport asks for them.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from hidet_dist.compat import on_import
from hidet_dist.errors import HidetDistError

if TYPE_CHECKING:
    from hidet_dist.api import (
        AutoParallelResult,
        FamilyResult,
        auto_parallel,
        build_family,
        describe,
        make_plan,
        partition,
        recost,
        search_family,
        validate_plan,
    )
    from hidet_dist.calibration import calibrate
    from hidet_dist.frontends.onnx.model import from_onnx
    from hidet_dist.frontends.pretrained import from_transformers
    from hidet_dist.frontends.pytorch.module import from_torch
    from hidet_dist.frontends.pytorch.row_attention import attention_over_rows
    from hidet_dist.operators.states import replace_state, shift_state, write_rows
    from hidet_dist.phases import Compiled, Partitioned, Planned, Prepared, Traced
    from hidet_dist.runtime.loaded_program import LoadedProgram
    from hidet_dist.runtime.partition import LoadedPartition, load_partition
    from hidet_dist.runtime.profile import Profile, merge_traces
    from hidet_dist.runtime.session import init, shutdown
    from hidet_dist.spec import DeviceMesh, OpShardSpec, Plan, ReduceFn, TensorShardSpec
    from hidet_dist.weights import as_weight, as_weights, state, weight, weights_from_safetensors

    __version__: str

__all__ = [
    "AutoParallelResult",
    "Compiled",
    "DeviceMesh",
    "FamilyResult",
    "HidetDistError",
    "LoadedPartition",
    "LoadedProgram",
    "OpShardSpec",
    "Partitioned",
    "Plan",
    "Planned",
    "Prepared",
    "Profile",
    "ReduceFn",
    "TensorShardSpec",
    "Traced",
    "as_weight",
    "as_weights",
    "attention_over_rows",
    "auto_parallel",
    "build_family",
    "calibrate",
    "describe",
    "from_onnx",
    "from_torch",
    "from_transformers",
    "init",
    "load_partition",
    "make_plan",
    "merge_traces",
    "partition",
    "recost",
    "replace_state",
    "search_family",
    "shift_state",
    "shutdown",
    "state",
    "validate_plan",
    "weight",
    "weights_from_safetensors",
    "write_rows",
]

_HOMES = {
    "hidet_dist.api": (
        "AutoParallelResult",
        "FamilyResult",
        "auto_parallel",
        "build_family",
        "describe",
        "make_plan",
        "partition",
        "recost",
        "search_family",
        "validate_plan",
    ),
    "hidet_dist.calibration": ("calibrate",),
    "hidet_dist.frontends.onnx.model": ("from_onnx",),
    "hidet_dist.frontends.pretrained": ("from_transformers",),
    "hidet_dist.frontends.pytorch.module": ("from_torch",),
    "hidet_dist.frontends.pytorch.row_attention": ("attention_over_rows",),
    "hidet_dist.phases": ("Compiled", "Partitioned", "Planned", "Prepared", "Traced"),
    "hidet_dist.runtime.loaded_program": ("LoadedProgram",),
    "hidet_dist.runtime.partition": ("LoadedPartition", "load_partition"),
    "hidet_dist.runtime.profile": ("Profile", "merge_traces"),
    "hidet_dist.runtime.session": ("init", "shutdown"),
    "hidet_dist.spec": ("DeviceMesh", "OpShardSpec", "Plan", "ReduceFn", "TensorShardSpec"),
    "hidet_dist.operators.states": ("replace_state", "shift_state", "write_rows"),
    "hidet_dist.weights": ("as_weight", "as_weights", "state", "weight", "weights_from_safetensors"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name == "__version__":
        from importlib.metadata import version

        value = version("hidet_dist")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _extend_hidet() -> None:
    """Set right what is wrong in hidet, and add the calls to ``hidet.distributed``."""
    from hidet_dist.compat import (
        equality,
        exported_tensors,
        extremes,
        float_algebra,
        half_functions,
        infinities,
        matmul_definition,
        named_weights,
        predicates,
        reduced_dims,
        squeezed_dims,
    )

    matmul_definition.install()
    squeezed_dims.install()
    reduced_dims.install()
    infinities.install()
    predicates.install()
    extremes.install()
    half_functions.install()
    float_algebra.install()
    equality.install()
    named_weights.install()
    exported_tensors.install()
    distributed = importlib.import_module("hidet.distributed")

    def find(name: str) -> Any:
        if name in _HOME:
            return getattr(sys.modules[__name__], name)
        raise AttributeError(f"module {distributed.__name__!r} has no attribute {name!r}")

    distributed.__dict__["__getattr__"] = find
    distributed.__dict__["__dir__"] = lambda: sorted({*vars(distributed), *__all__})


on_import.after("hidet", _extend_hidet)
