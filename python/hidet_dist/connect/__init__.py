"""Connecting: converting a tensor from the spec it is produced in to the one it is consumed in."""

from hidet_dist.connect.steps import Connection, Step, connect, reduce_seconds

__all__ = ["Connection", "Step", "connect", "reduce_seconds"]
