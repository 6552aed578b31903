"""Connecting: converting a tensor from the spec it is produced in to the one it is consumed in."""

from hidet_dist.connect.cost import Element, StepSeconds, reduce_seconds, step_parts, step_seconds
from hidet_dist.connect.path import Connection, connect, connect_all
from hidet_dist.connect.planned import PlannedSteps
from hidet_dist.connect.steps import Step, moves, walk

__all__ = [
    "Connection",
    "Element",
    "PlannedSteps",
    "Step",
    "StepSeconds",
    "connect",
    "connect_all",
    "moves",
    "reduce_seconds",
    "step_parts",
    "step_seconds",
    "walk",
]
