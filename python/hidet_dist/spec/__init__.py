"""The words of the RFC as values: meshes, tensor and operator sharding specs, plans. Immutable, hashable, parsable."""

from hidet_dist.spec.mesh import DeviceMesh
from hidet_dist.spec.operator import OpShardSpec, ReduceFn
from hidet_dist.spec.pattern import OpSpecPattern, SpecPattern
from hidet_dist.spec.plan import OperatorPlan, Plan, StagePlan, TensorPlan
from hidet_dist.spec.tensor import TensorShardSpec

__all__ = [
    "DeviceMesh",
    "OpShardSpec",
    "OpSpecPattern",
    "OperatorPlan",
    "Plan",
    "ReduceFn",
    "SpecPattern",
    "StagePlan",
    "TensorPlan",
    "TensorShardSpec",
]
