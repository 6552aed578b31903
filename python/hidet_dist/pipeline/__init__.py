"""Pipelines: graphs cut into stages, each planned on a mesh of its own."""

from hidet_dist.pipeline.given import GivenStage, plan_given, stage_cluster

__all__ = ["GivenStage", "plan_given", "stage_cluster"]
