"""Pipelines: a graph cut into stages, each on a slice of the machine, that work on micro-batches at once."""

from hidet_dist.pipeline.constraints import StageConstraint, parse_stages
from hidet_dist.pipeline.family import search_pipeline_family
from hidet_dist.pipeline.given import GivenStage, plan_given, stage_cluster
from hidet_dist.pipeline.options import PipelineOptions
from hidet_dist.pipeline.planner import search_pipeline
from hidet_dist.pipeline.stages import PipelineResult, PlannedStage, StageMessage

__all__ = [
    "GivenStage",
    "PipelineOptions",
    "PipelineResult",
    "PlannedStage",
    "StageConstraint",
    "StageMessage",
    "parse_stages",
    "plan_given",
    "search_pipeline",
    "search_pipeline_family",
    "stage_cluster",
]
