"""Graphs brought into the form that is planned: the same values, from operators that shard better."""

from hidet_dist.normalize.normal_form import NormalGraph, normalize

__all__ = ["NormalGraph", "normalize"]
