"""Graphs brought into the form that is planned: the same values, from operators that shard better."""

from hidet_dist.normalize.normal_form import as_normal, normalize

__all__ = ["as_normal", "normalize"]
