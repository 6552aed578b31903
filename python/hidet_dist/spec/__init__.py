"""Meshes, sharding specs of tensors and operators, and plans: immutable values that print in the form users write.

What is named here is imported when it is first used: a process that serves reads a manifest, and no plan.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hidet_dist.spec.mesh import DeviceMesh
    from hidet_dist.spec.operator import Dispatch, OpShardSpec, ReduceFn
    from hidet_dist.spec.partial import Layout, PartialSpec
    from hidet_dist.spec.pattern import OpSpecPattern, SpecPattern
    from hidet_dist.spec.plan import OperatorPlan, Plan, StagePlan, TensorPlan
    from hidet_dist.spec.tensor import TensorShardSpec

__all__ = [
    "DeviceMesh",
    "Dispatch",
    "Layout",
    "OpShardSpec",
    "OpSpecPattern",
    "OperatorPlan",
    "PartialSpec",
    "Plan",
    "ReduceFn",
    "SpecPattern",
    "StagePlan",
    "TensorPlan",
    "TensorShardSpec",
]

_HOMES = {
    "mesh": ("DeviceMesh",),
    "operator": ("Dispatch", "OpShardSpec", "ReduceFn"),
    "partial": ("Layout", "PartialSpec"),
    "pattern": ("OpSpecPattern", "SpecPattern"),
    "plan": ("OperatorPlan", "Plan", "StagePlan", "TensorPlan"),
    "tensor": ("TensorShardSpec",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hidet_dist.spec.{_HOME[name]}"), name)
    globals()[name] = value
    return value
