"""Normalization of graphs before planning: the same values, computed by operators that shard better."""

from hidet_dist.normalize.normal_form import NormalGraph, normalize

__all__ = ["NormalGraph", "normalize"]
