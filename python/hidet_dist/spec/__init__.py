"""Meshes, sharding specs of tensors and operators, and plans: immutable values that print in the form users write."""

from hidet_dist.spec.mesh import DeviceMesh
from hidet_dist.spec.operator import OpShardSpec, ReduceFn
from hidet_dist.spec.partial import Layout, PartialSpec
from hidet_dist.spec.pattern import OpSpecPattern, SpecPattern
from hidet_dist.spec.plan import OperatorPlan, Plan, StagePlan, TensorPlan
from hidet_dist.spec.tensor import TensorShardSpec

__all__ = [
    "DeviceMesh",
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
