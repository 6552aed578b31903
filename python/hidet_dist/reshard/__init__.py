"""Resharding: converting a tensor from the spec in which it is produced to the one that its consumer requires."""

from hidet_dist.reshard.cost import Element, StepSeconds, reduce_seconds, step_parts, step_seconds
from hidet_dist.reshard.path import (
    Conversion,
    cheapest_conversion,
    conversion_buffers,
    conversion_collectives,
    conversion_communication,
    conversion_seconds,
)
from hidet_dist.reshard.planned import PlannedSteps
from hidet_dist.reshard.steps import Step, moves, walk

__all__ = [
    "Conversion",
    "Element",
    "PlannedSteps",
    "Step",
    "StepSeconds",
    "cheapest_conversion",
    "conversion_buffers",
    "conversion_collectives",
    "conversion_communication",
    "conversion_seconds",
    "moves",
    "reduce_seconds",
    "step_parts",
    "step_seconds",
    "walk",
]
