"""Phases: the values on the way from a traced graph to artifacts. Each is made by a method of the one before it."""

from hidet_dist.phases.values import Compiled, Partitioned, Planned, Prepared, Traced

__all__ = ["Compiled", "Partitioned", "Planned", "Prepared", "Traced"]
